#pragma once

// NOTE [Convolutions by device]
//
// PyTorch chooses a library for each convolution (`select_conv_backend()`, Convolution.cpp), mainly by the device.
// Choosing it checks shapes, and the choice decides whether results are channels last
// (`determine_backend_memory_format()`). On the meta device the choice is "overrideable", which checks less, and the
// Meta kernels (`meta_conv()`, _meta_registrations.py) return contiguous results.
//
// For the CPU, PyTorch's functions are called with zeros that occupy no memory. For CUDA, these functions would
// initialize CUDA, or require it, but their result is known: cuDNN's results are channels last if its arguments are,
// unless they are float64.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// Returns true for `aten::convolution`, the forward operator.
bool isConvolution(const c10::OperatorHandle& op);

// Returns true for the operators whose results `giveMemoryFormat()` lays out.
bool hasFormatOfConvolution(const c10::OperatorHandle& op);

// Returns true if the call runs the same kernel on one thread. `ConvParams::use_mkldnn()` reads the number of threads.
// If `only_checks`, another kernel may run that refuses the same calls.
bool isSameOnOneThread(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, bool only_checks);

// Raises the errors that PyTorch raises while choosing a library for `aten::convolution` with these arguments.
void checkShapesOfConvolution(c10::ArrayRef<c10::IValue> arguments);

// Gives the meta `results` of such an operator the layout that they have on `device`.
void giveMemoryFormat(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      torch::jit::Stack& results);

}  // namespace torchext
