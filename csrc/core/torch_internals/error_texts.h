#pragma once

// Classifies PyTorch errors that differ by their messages, not by their types. Each function names the origin of its
// message.

#include <string_view>

#include <c10/util/Exception.h>

namespace torchext {

// Returns true for errors of `TORCH_INTERNAL_ASSERT` (c10/util/Exception.cpp, `torchInternalAssertFail()`).
bool isInternalAssert(const c10::Error& error);

// Returns true for errors about inference tensors outside inference mode: writing to one (`VariableVersion::bump()`),
// saving one for backward (saved_variable.cpp), making a tracked view of one.
bool isAboutInferenceTensors(const c10::Error& error);

// Returns true for the error of writing to an inference tensor outside inference mode, raised when its version is
// bumped (`VariableVersion::bump()`, TensorImpl.h).
bool isWriteToInferenceTensor(const c10::Error& error);

// Returns true for the message of the CPU allocator's out-of-memory error (`alloc_cpu()`, c10/core/impl/alloc_cpu.cpp),
// which has no type.
bool isOutOfMemory(std::string_view message);

// Returns true if PyTorch still uses these messages.
bool testErrorTexts(bool is_broken);

}  // namespace torchext
