#pragma once

// The framework for tests in C++. test/package/test_cpp.py compiles each file against the installed PyTorch and
// torchext, and calls its tests.

#include <cstddef>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>

#define EXPECT(condition)                                                                    \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      throw std::logic_error("line " + std::to_string(__LINE__) + ": expected " #condition); \
    }                                                                                        \
  } while (false)

struct Test {
  const char* name;
  void (*run)();
};

// `test_name()` returns the name of the test at `index`, or null after the last. `run_test()` returns an error message,
// or an empty string.
#define EXPORT_TESTS(tests)                                                                    \
  extern "C" __attribute__((visibility("default"))) const char* test_name(std::size_t index) { \
    return index < std::size(tests) ? (tests)[index].name : nullptr;                           \
  }                                                                                            \
  extern "C" __attribute__((visibility("default"))) const char* run_test(std::size_t index) {  \
    static std::string message;                                                                \
    message.clear();                                                                           \
    try {                                                                                      \
      (tests)[index].run();                                                                    \
    } catch (const std::exception& error) {                                                    \
      message = error.what();                                                                  \
    }                                                                                          \
    return message.c_str();                                                                    \
  }
