#pragma once

// NOTE [Operators that compare devices]
//
// PyTorch's code generator puts a comparison of devices (`check_and_update_common_device()`, Device.h) in front of CUDA
// kernels, which a build without CUDA does not have. It compares all positional tensor arguments and outputs. This
// includes numbers in CPU tensors without dimensions, which kernels on a TensorIterator accept. The operators that
// compare devices are listed in native_functions.yaml, which every installation of PyTorch has in `torchgen`: all
// operators with CUDA kernels, except those with `device_check: NoCheck`.

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

namespace torchext {

// Sets the path of the file. Call once, before there are fakes. Without the file, both functions below
// return false.
TORCHEXT_API void setNativeFunctions(std::string path);

// Returns true if `op` has that comparison. The first call reads the file.
bool comparesDevices(const c10::OperatorHandle& op);

// Returns true if one function implements `op` on the CPU and on CUDA, or if its kernels are built on a TensorIterator,
// according to the file. Then both devices make the checks of this function. Loops that only the CPU has may check
// more.
bool sharesKernels(const c10::OperatorHandle& op);

}  // namespace torchext
