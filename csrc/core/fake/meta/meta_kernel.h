#pragma once

// The sources of the metadata of a call's results.
//
// NOTE [C++ Meta kernels]
//
// For most operators PyTorch registers Python functions as Meta kernels (`activate_meta()`,
// torch/_meta_registrations.py), even if C++ code for Meta exists. They are slow, above all in their first calls, and
// their dtypes, strides or errors may differ from eager ones. So these are used instead:
//
//   * for structured operators, the C++ Meta kernel that the Python function overrides: the code with which the kernels
//     of all devices check their arguments and make their results. If the operator is not elementwise, only for real
//     numbers on the CPU: `linalg_lu_factor_ex` checks the device, and the kernel of `linalg_lu_solve` conjugates;
//   * for small calls on the CPU, a trial: NOTE [Trials instead of Meta kernels];
//   * composite C++ code on the meta device, if its results differ from those of the Python function.
//
// Kernels that a program registers for Meta are always called.
//
// NOTE [Fake implementations]
//
// `torch.library.register_fake()` also registers a Meta kernel. PyTorch's FakeTensorMode calls the function with fakes
// that claim their device, so it may mix devices and allocate on them. Here it also runs on fakes, which are copies of
// the arguments. Its calls are answered like those of the program, but are not recorded or counted, do not communicate,
// draw no random numbers, and bypass modes (`ImplementationGuard`, recording.h). On meta tensors, PyTorch's Python
// functions would compute strides other than those of real tensors (`empty_like` in dimensions of length 1).

#include <cstdint>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

enum class MetadataKernel : std::uint8_t {
  kMeta,
  kComposite,  // the kernel of `CompositeExplicitAutograd`
  kFake,       // a fake implementation of the program: NOTE [Fake implementations]
  kOwn,        // `DeviceKernels::callMeta()` computes the results: DeviceKernels::replaces()
  kZeros,      // there is no Meta kernel: NOTE [Running the CPU kernel]
  kMissing,    // there is neither a Meta kernel nor a usable CPU kernel: the call raises an error
};

// Returns the kernel for a call of `op` with the arguments on top of `stack`, on any device.
MetadataKernel metadataKernelFor(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true if the program has registered a fake implementation: NOTE [Fake implementations].
bool hasFakeImplementation(const c10::OperatorHandle& op);

// Returns true if PyTorch's Meta kernel of `op` is written in Python, without C++ code that it overrides.
bool hasOnlyPythonMetaKernel(const c10::OperatorHandle& op);

// Calls the kernel for `device` with the arguments on top of `stack`, which must be on the meta device, or fakes for a
// fake implementation. Without a kernel, calls PyTorch's fallback for the meta device, which raises the corresponding
// error.
void callMetadataKernel(MetadataKernel kernel,
                        c10::Device device,
                        const c10::OperatorHandle& op,
                        torch::jit::Stack& stack);

// Returns the `device` of the innermost call of `callMetadataKernel()` on this thread. PyTorch's Python Meta kernels
// call `device_hint()` (torch/_meta_registrations.py), and torchext/fake/python_functions.py makes it return this
// device.
TORCHEXT_API std::optional<c10::Device> deviceOfMetaCall();

}  // namespace torchext
