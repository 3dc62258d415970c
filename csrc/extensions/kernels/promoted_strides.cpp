#include "promoted_strides.h"

#include <algorithm>
#include <vector>

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty_like.h>

#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

bool isStrided(const Tensor& tensor) {
  return tensor.layout() == c10::kStrided;
}

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

// Like the copies of TensorIteratorBase::compute_types().
std::vector<Tensor> converted(std::vector<Tensor> tensors, c10::ScalarType dtype) {
  for (Tensor& tensor : tensors) {
    if (tensor.scalar_type() != dtype) {
      tensor = at::empty_like(tensor, tensor.options().dtype(dtype));
    }
  }
  return tensors;
}

// Returns the tensors among the arguments on the meta device, or nothing if copies of them could not change the order.
std::vector<Tensor> decidingTensors(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<Tensor> tensors;
  forEachTensor(arguments, [&tensors](const Tensor& tensor) { tensors.push_back(tensor); });
  const bool may_decide = std::all_of(tensors.begin(), tensors.end(), isStrided) &&
                          std::any_of(tensors.begin(), tensors.end(), isExpanded) &&
                          std::any_of(tensors.begin(), tensors.end(), [&tensors](const Tensor& tensor) {
                            return tensor.scalar_type() != tensors.front().scalar_type();
                          });
  if (!may_decide) {
    return {};
  }
  for (Tensor& tensor : tensors) {
    tensor = emptyOnMeta(tensor);
  }
  return tensors;
}

}  // namespace

Tensor resultOfIterator(c10::ArrayRef<Tensor> tensors, c10::ScalarType dtype) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).declare_static_dtype_and_device(dtype, c10::kMeta).add_owned_output(Tensor{});
  for (const Tensor& tensor : tensors) {
    config.add_owned_const_input(emptyOnMeta(tensor));
  }
  return config.build().output();
}

void giveStridesOfCuda(c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results) {
  if (results.size() != 1 || !results.front().isTensor()) {
    return;
  }
  const std::vector<Tensor> tensors = decidingTensors(arguments);
  const Tensor& result = results.front().toTensor();
  if (tensors.empty()) {
    return;
  }
  const Tensor of_copies = resultOfIterator(converted(tensors, commonDtype(tensors)), result.scalar_type());
  // Some Meta kernels are formulas of several steps and computed the result differently.
  if (of_copies.sizes() == result.sizes() && of_copies.strides() == result.strides()) {
    results.front() = resultOfIterator(tensors, result.scalar_type());
  }
}

}  // namespace torchext
