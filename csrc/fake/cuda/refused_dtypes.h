#pragma once

// NOTE [Dtypes that CUDA kernels refuse]
//
// Meta kernels accept every dtype, and CPU kernels accept others than CUDA kernels do: `addmm` of integers, `softmax`
// of uint16. Which dtypes a CUDA kernel has is compiled into PyTorch's CUDA library, so refused_dtypes_table.h is a
// table of facts: `make dtype-facts` has made the calls of PyTorch's `op_db`, and variants of them, with each dtype on
// PyTorch's own host code for CUDA, under a driver that does nothing.
//
//   * A row holds for an operator if no call of that kind with such a dtype was accepted, whatever the other arguments
//     were, and if one was refused in which all arguments had the dtype. Many kernels return early if there are no
//     elements, so calls with empty arguments or results are left alone, and so are tensors without dimensions where
//     the facts differ. Where the name of the kernel depends on other arguments, the one that was met most is named.
//   * The facts are without cuDNN. Kernels that it may replace are called with it, too, and a row is dropped where that
//     is accepted; rows of convolutions leave out the dtypes that cuDNN convolves.
//   * PyTorch adds dtypes from release to release and hardly takes one away. For releases after that of the facts the
//     table is not used, nor for ROCm.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

// Raises PyTorch's NotImplementedError (`"addmm_cuda" not implemented for 'Long'`) if the CUDA kernel of `op` is known
// to have no code for the dtypes of `arguments`. `results` are those of the Meta kernel.
void refuseDtypesOnCuda(const c10::OperatorHandle& op,
                        c10::ArrayRef<c10::IValue> arguments,
                        c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
