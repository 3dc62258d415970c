#pragma once

// NOTE [Dtypes that CUDA kernels refuse]
//
// Meta kernels accept every dtype, and CPU kernels accept other dtypes than CUDA kernels: `addmm` of integers,
// `softmax` of uint16. The dtypes of CUDA kernels are compiled into PyTorch's CUDA library, so they are facts in a file
// that is read at the first use, torchext/share/torchext/refused_dtypes.tsv. `make dtype-facts` runs every call in
// `op_db`, and variants of it, with each dtype on PyTorch's own CUDA host code, under a driver that does nothing.
//
//   * A row applies to an operator if every such call with the dtype was refused, regardless of the other arguments,
//     and if all arguments of one refused call had the dtype. Many kernels return early if there are no elements, so
//     calls with empty arguments or results are never refused. The same holds for tensors without dimensions where the
//     facts differ. If other arguments determine the name of the kernel, the most frequent name is used.
//   * The facts were collected without cuDNN. Kernels that it may replace were also called with it, and a row was
//     dropped if that call was accepted. Rows of convolutions leave out the dtypes that cuDNN convolves.
//   * New PyTorch releases add dtypes and rarely remove one. The table is not used for releases after that of the
//     facts, nor for ROCm.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

// Raises PyTorch's NotImplementedError (`"addmm_cuda" not implemented for 'Long'`) if the table shows that the CUDA
// kernel of `op` does not support the dtypes of `arguments`. `results` are those of the Meta kernel.
void refuseDtypesOnCuda(const c10::OperatorHandle& op,
                        c10::ArrayRef<c10::IValue> arguments,
                        c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
