#pragma once

// NOTE [Convolutions by device]
//
// PyTorch chooses a library for each convolution (`select_conv_backend()`, Convolution.cpp), by the device above all.
// The choice checks shapes, and decides whether results are channels last (`determine_backend_memory_format()`). On the
// meta device it is "overrideable", which checks less; and the Meta kernels (`meta_conv()`, _meta_registrations.py)
// make what is contiguous.
//
// On the CPU PyTorch is asked, with zeros that take no memory. With CUDA it is known without asking, which would wake
// CUDA, or need it: cuDNN computes what is channels last, as long as it is not float64.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace torchext {

// True for `aten::convolution`, forwards.
bool isConvolution(const c10::OperatorHandle& op);

// True for the operators whose results `giveMemoryFormat()` lays out.
bool hasFormatOfConvolution(const c10::OperatorHandle& op);

// Raises what PyTorch raises when it chooses a library for such a call.
void checkShapesOfConvolution(c10::ArrayRef<c10::IValue> arguments);

// Lays out the `results` that such an operator has on the meta device as they are on `device`.
void giveMemoryFormat(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      torch::jit::Stack& results);

}  // namespace torchext
