#include "assumed_values.h"

#include <atomic>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include "known_values.h"

namespace torchext {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

std::atomic<Assumption> assumption_in_use{nullptr};

// As `_local_scalar_dense` makes it: of the kind of the dtype.
c10::Scalar numberOf(c10::ScalarType dtype, double value) {
  if (dtype == c10::kBool) {
    return value != 0;
  }
  if (c10::isComplexType(dtype)) {
    return c10::complex<double>{value, 0};
  }
  return c10::isIntegralType(dtype, /*includeBool=*/false) ? c10::Scalar(static_cast<int64_t>(value))
                                                           : c10::Scalar(value);
}

}  // namespace

void setAssumption(Assumption assumption) noexcept {
  assumption_in_use = assumption;
}

bool assumesValues() noexcept {
  return assumption_in_use != nullptr;
}

bool assumeValue(const OperatorHandle& op, Stack& stack) {
  const Assumption assumption = assumption_in_use;
  const std::string& name = op.schema().name();
  const bool is_number = name == "aten::_local_scalar_dense";
  if (assumption == nullptr || !(is_number || name == "aten::equal")) {
    return false;
  }
  const std::size_t count = op.schema().arguments().size();
  const at::Tensor& first = torch::jit::peek(stack, 0, count).toTensor();
  const c10::ScalarType dtype = is_number ? first.scalar_type() : c10::ScalarType::Bool;
  const auto value = assumption(op, dtype, is_number ? assumedValue(first) : std::nullopt);
  if (!value) {
    return false;
  }
  torch::jit::drop(stack, count);
  stack.emplace_back(is_number ? IValue(numberOf(dtype, *value)) : IValue(*value != 0));
  return true;
}

}  // namespace torchext
