#pragma once

// What fake tensors cannot do, as types of their own.

#include <cstdint>
#include <string>

#include <c10/util/Exception.h>

namespace torchext {

// The result depends on values that do not exist.
class DataDependentError : public c10::Error {
 public:
  using c10::Error::Error;
};

// PyTorch has no Meta kernel for the operator, or none for these arguments.
class UnsupportedOperatorError : public c10::NotImplementedError {
 public:
  using c10::NotImplementedError::NotImplementedError;
};

// C10_THROW_ERROR for the types above; that one looks for them in namespace c10.
#define TORCHEXT_THROW(type, message) throw type({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message)

// PyTorch turns every c10::Error into one of its own few exceptions, so the bindings are given the chance to raise a
// better one. A translator that returns leaves it at that.
enum class ErrorKind { kDataDependent, kUnsupportedOperator };
using ErrorTranslator = void (*)(ErrorKind kind, const std::string& message);
void setErrorTranslator(ErrorTranslator translator);

// Calls the translator, if one is set.
void translateError(ErrorKind kind, const c10::Error& error);

}  // namespace torchext
