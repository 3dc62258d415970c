#pragma once

// Types of the errors about what fake tensors cannot do.

#include <cstdint>

#include <c10/util/Exception.h>

#include "../../support/interpreter.h"

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

// A kernel of PyTorch's for CUDA has no code for the dtype. The operator is not run for real instead.
class RefusedOnCudaError : public c10::NotImplementedError {
 public:
  using c10::NotImplementedError::NotImplementedError;
};

// C10_THROW_ERROR for the types above. PyTorch's macro looks for types in namespace c10.
#define TORCHEXT_THROW(type, message) throw type({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, message)

// Lets the language raise an error of a class of its own (interpreter.h); returns if it does not.
inline void translateError(ErrorKind kind, const c10::Error& error) {
  interpreter().raise(kind, error.what_without_backtrace());
}

}  // namespace torchext
