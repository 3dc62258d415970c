#pragma once

// Operations on fake tensors for other components and the bindings, in addition to the public API.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/macros/Macros.h>
#include <torchext/fake.h>
#include <torchext/macros.h>

namespace torchext {

// Returns a fake tensor on the storage of `fake` with the dtype, shape, strides and storage offset of `like`, detached
// from autograd.
TORCHEXT_API at::Tensor viewStorageLike(const at::Tensor& fake, const at::Tensor& like);

// Raises ValueError for a real tensor, and NotImplementedError for a sparse fake.
void checkFake(const at::Tensor& fake);

// Returns a fake tensor of `nbytes` bytes on `device`, on a new storage. Calls neither the dispatcher nor a mode.
TORCHEXT_API at::Tensor fakeBytes(std::int64_t nbytes, c10::Device device);

// Returns the whole of `storage`, which must be a fake storage, as a fake tensor of bytes.
TORCHEXT_API at::Tensor bytesOfStorage(const c10::Storage& storage);

// Call when a block of fakes is entered: shares the kernels that another owner of the `Fake` key has registered for
// single operators since the last call. Does nothing without another owner.
void shareFakeKernels();

// While an instance exists, the fakes among the outputs of a call appear to have no memory (`isTensorSubclassLike()`),
// so that `at::native::resize_output()` calls the operator `resize_`. Otherwise it would allocate memory directly for a
// tensor on the CPU, which fails after the tensor has got its new sizes.
class ResizableOutputs {
 public:
  ResizableOutputs(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  C10_DISABLE_COPY_AND_ASSIGN(ResizableOutputs);
  ~ResizableOutputs();

  // Returns true for operators whose outputs an instance finds: each `out`, and the tensor that `resize_as_` resizes.
  static bool existFor(const c10::OperatorHandle& op);

  // Returns true for the outputs of an instance.
  static bool isOne(const at::Tensor& tensor);

 private:
  std::vector<at::Tensor> outputs_;
};

}  // namespace torchext
