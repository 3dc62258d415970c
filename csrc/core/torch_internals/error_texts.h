#pragma once

// Classifies PyTorch errors that differ by their messages, not by their types. Each function names the origin of its
// message.

#include <string>
#include <string_view>

#include <c10/util/Exception.h>

namespace torchext {

// Returns true for errors of `TORCH_INTERNAL_ASSERT` (c10/util/Exception.cpp, `torchInternalAssertFail()`).
inline bool isInternalAssert(const c10::Error& error) {
  return error.msg().find("INTERNAL ASSERT FAILED") != std::string::npos;
}

// Returns true for errors about inference tensors outside inference mode: writing to one (`VariableVersion::bump()`),
// saving one for backward (saved_variable.cpp), making a tracked view of one.
inline bool isAboutInferenceTensors(const c10::Error& error) {
  return std::string_view{error.what_without_backtrace()}.find("nference tensor") != std::string_view::npos;
}

// Returns true for the error of writing to an inference tensor outside inference mode, raised when its version is
// bumped (`VariableVersion::bump()`, TensorImpl.h).
inline bool isWriteToInferenceTensor(const c10::Error& error) {
  return std::string_view{error.what_without_backtrace()}.find("Inplace update to inference tensor") !=
         std::string_view::npos;
}

// Returns true for the message of the CPU allocator's out-of-memory error (`alloc_cpu()`, c10/core/impl/alloc_cpu.cpp),
// which has no type.
inline bool isOutOfMemory(std::string_view message) {
  return message.find("allocate memory") != std::string_view::npos;
}

}  // namespace torchext
