#pragma once

// NOTE [Operators that compare devices]
//
// PyTorch's code generator puts a comparison of devices (`check_and_update_common_device()`, Device.h) in front of CUDA
// kernels, which a build without CUDA does not have. It compares all positional tensor arguments and outputs. This
// includes numbers in CPU tensors without dimensions, which kernels on a TensorIterator accept. The operators that
// compare devices are listed in native_functions.yaml, which every installation of PyTorch has in `torchgen`: all
// operators with CUDA kernels, except those with `device_check: NoCheck`.

#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <torchext/macros.h>

namespace torchext {

// Answers the hooks of `DeviceKernels`. Call while the library is loaded.
void registerDeviceKernels();

// The names of the operators that have that comparison, and of those for which `sharesKernels()` returns true.
using NativeFunctions = std::pair<std::unordered_set<std::string>, std::unordered_set<std::string>>;

// Sets the function that reads the file. It is called when the names are first needed. Call once, before there are
// fakes. Without it, there are no names.
TORCHEXT_API void setNativeFunctions(std::function<NativeFunctions()> read);

// Returns true if one function implements `op` on the CPU and on CUDA, or if its kernels are built on a TensorIterator,
// according to the file. Then both devices make the checks of this function. Loops that only the CPU has may check
// more.
bool sharesKernels(const c10::OperatorHandle& op);

// Returns the kernel of a `_foreach_` operator whose lists have tensors on several devices: it calls an operator for
// each tensor, like CUDA's kernels then do (`can_use_fast_route()`, ForeachUtils.h). Returns nothing for other calls.
std::optional<c10::DispatchKey> kernelForSeveralDevices(const c10::OperatorHandle& op,
                                                        c10::ArrayRef<c10::IValue> arguments);

// Returns the result of a TensorIterator over `tensors`, on the meta device and in `dtype`. Numbers may be on the CPU.
TORCHEXT_API at::Tensor resultOfIterator(c10::ArrayRef<at::Tensor> tensors, c10::ScalarType dtype);

}  // namespace torchext
