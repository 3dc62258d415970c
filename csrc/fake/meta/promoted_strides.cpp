#include "promoted_strides.h"

#include <algorithm>
#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include "../../support/stack_utils.h"

namespace torchext {

using at::Tensor;

namespace {

bool isExpanded(const Tensor& tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      return true;
    }
  }
  return false;
}

c10::ScalarType commonDtype(const std::vector<Tensor>& tensors) {
  at::native::ResultTypeState state;
  for (const Tensor& tensor : tensors) {
    state = at::native::update_result_type_state(tensor, state);
  }
  return at::native::result_type(state);
}

// The strides that a TensorIterator gives to the result of these arguments.
c10::DimVector stridesOfResult(const std::vector<Tensor>& tensors) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false);
  config.declare_static_dtype_and_device(tensors.front().scalar_type(), tensors.front().device());
  config.add_owned_output(Tensor{});
  for (const Tensor& tensor : tensors) {
    config.add_owned_const_input(tensor);
  }
  return c10::DimVector(config.build().output().strides());
}

}  // namespace

void giveStridesOfCuda(c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results) {
  if (results.size() != 1 || !results.front().isTensor() || !hasTensor(arguments, isExpanded)) {
    return;
  }
  std::vector<Tensor> tensors;
  forEachTensor(arguments, [&tensors](const Tensor& tensor) {
    tensors.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta)));
  });
  if (tensors.size() < 2) {
    return;
  }
  const c10::ScalarType common = commonDtype(tensors);
  std::vector<Tensor> copied = tensors;
  for (Tensor& tensor : copied) {
    if (tensor.scalar_type() != common) {
      tensor = at::empty_like(tensor, tensor.options().dtype(common));
    }
  }
  const Tensor& result = results.front().toTensor();
  // Some Meta kernels are formulas of several steps, and have made the result in another way.
  if (stridesOfResult(copied) == result.strides()) {
    results.front() = at::empty_strided(result.sizes(), stridesOfResult(tensors), result.options());
  }
}

}  // namespace torchext
