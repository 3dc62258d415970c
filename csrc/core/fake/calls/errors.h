#pragma once

// Types of the errors of operators on fake and deferred tensors.

#include <cstdint>

#include <c10/util/Exception.h>

#include "../../../libraries/support/interpreter.h"

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

// A CUDA kernel of PyTorch does not support the dtype. Unlike an unsupported operator, the call is not run for real.
class RefusedOnCudaError : public c10::NotImplementedError {
 public:
  using c10::NotImplementedError::NotImplementedError;
};

// A deferred tensor cannot be computed.
class MaterializationError : public c10::Error {
 public:
  using c10::Error::Error;
  explicit MaterializationError(const c10::Error& error) : c10::Error{error} {}
};

// C10_THROW_ERROR for the types above. PyTorch's macro looks for types in namespace c10.
#define TORCHEXT_THROW(type, message) throw type({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message)

// Lets the language raise its own class of error (interpreter.h). Returns if it does not.
inline void translateError(ErrorKind kind, const c10::Error& error) {
  interpreter().raise(kind, error.what_without_backtrace());
}

// Calls `run` and translates MaterializationError. For the functions through which a program reads values.
template <typename Function>
auto translatingFailures(const Function& run) {
  try {
    return run();
  } catch (const MaterializationError& error) {
    translateError(ErrorKind::kMaterialization, error);
    throw;
  }
}

}  // namespace torchext
