#pragma once

// NOTE [Operators that compare devices]
//
// PyTorch's code generator puts a comparison of devices (`check_and_update_common_device()`, Device.h) in front of the
// kernels for CUDA, which a build without CUDA does not have. It compares all positional tensor arguments and outputs,
// also numbers in CPU tensors without dimensions, which kernels on a TensorIterator accept. Which operators have it
// says native_functions.yaml, which every installation of PyTorch has in `torchgen`: all with kernels for CUDA, except
// those with `device_check: NoCheck`.

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

namespace torchext {

// Names the file. To be called once, before there are fakes. Without it, no operator is taken to compare devices.
TORCHEXT_API void setNativeFunctions(std::string path);

// Returns true if `op` has that comparison. The first call reads the file.
bool comparesDevices(const c10::OperatorHandle& op);

}  // namespace torchext
