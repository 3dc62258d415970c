#include "refused_dtypes.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TypeProperties.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include "../../support/stack_utils.h"
#include "../../torch_internals/torch_compat.h"
#include "../calls/errors.h"
#include "refused_dtypes_table.h"

namespace torchext {

using c10::ScalarType;

namespace {

// Ways in which a kernel chooses its code, besides the position of an argument.
constexpr int kPromoted = -1;             // the dtype to which tensors and Python numbers are promoted
constexpr int kPromotedWithScalars = -2;  // the same, and scalar arguments also take part
constexpr int kRequested = -3;            // the argument `dtype`, or the dtype of the first argument

constexpr bool kIsOfRelease = compat::applies("dtypes_of_cuda");

// Arguments that take part in type promotion.
constexpr std::array<std::string_view, 7> kPromotes{"other", "exponent", "self", "min", "max", "min_val", "max_val"};

std::optional<ScalarType> promoted(const OperatorHandle& op, ArrayRef<IValue> arguments, bool with_scalars) {
  at::native::ResultTypeState state;
  try {
    for (const auto i : c10::irange(arguments.size())) {
      const c10::Argument& argument = op.schema().arguments()[i];
      if (argument.is_out()) {
        continue;
      }
      forEachTensor(arguments[i],
                    [&state](const Tensor& tensor) { state = at::native::update_result_type_state(tensor, state); });
      if (with_scalars && arguments[i].isScalar() && isAmong(kPromotes, argument.name())) {
        state = at::native::update_result_type_state(arguments[i].toScalar(), state);
      }
    }
    return at::native::result_type(state);
  } catch (const c10::Error&) {  // float8 is not promoted
    return std::nullopt;
  }
}

std::optional<ScalarType> dtypeOf(const IValue& value) {
  std::optional<ScalarType> dtype;
  const bool is_mixed = hasTensor(value, [&dtype](const Tensor& tensor) {
    dtype = dtype.value_or(tensor.scalar_type());
    return *dtype != tensor.scalar_type();
  });
  return is_mixed ? std::nullopt : dtype;
}

std::optional<ScalarType> chosenBy(int chooses_by, const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (chooses_by == kPromoted || chooses_by == kPromotedWithScalars) {
    return promoted(op, arguments, chooses_by == kPromotedWithScalars);
  }
  if (chooses_by == kRequested) {
    const int dtype = findArgument(op.schema(), "dtype");
    if (dtype >= 0 && arguments[static_cast<std::size_t>(dtype)].isInt()) {
      return arguments[static_cast<std::size_t>(dtype)].toScalarType();
    }
    chooses_by = 0;
  }
  return dtypeOf(arguments[static_cast<std::size_t>(chooses_by)]);
}

// Calls `visit` for the tensors that the call reads.
void forEachInput(const OperatorHandle& op, ArrayRef<IValue> arguments, TensorVisitor visit) {
  for (const auto i : c10::irange(arguments.size())) {
    if (!op.schema().arguments()[i].is_out()) {
      forEachTensor(arguments[i], visit);
    }
  }
}

bool isEmpty(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() == 0;
}

}  // namespace

void refuseDtypesOnCuda(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!kIsOfRelease || namespaceOf(op.operator_name()) != "aten" || at::detail::getCUDAHooks().hasROCM()) {
    return;
  }
  const std::string name = c10::toString(op.operator_name());
  const std::string_view key = std::string_view{name}.substr(std::string_view{"aten::"}.size());
  const auto* entry =
      std::lower_bound(kDtypeRefusalsOf.begin(), kDtypeRefusalsOf.end(), key,
                       [](const DtypeRefusalOf& one, std::string_view other) { return one.op < other; });
  if (entry == kDtypeRefusalsOf.end() || entry->op != key) {
    return;
  }
  bool has_empty = hasTensor(results, isEmpty);
  bool has_dimensions = true;
  forEachInput(op, arguments, [&](const Tensor& tensor) {
    has_empty = has_empty || isEmpty(tensor);
    has_dimensions = has_dimensions && (tensor.dim() > 0 || tensor.unsafeGetTensorImpl()->is_wrapped_number());
  });
  for (; !has_empty && entry != kDtypeRefusalsOf.end() && entry->op == key; ++entry) {
    const DtypeRefusal& row = kDtypeRefusals[entry->refusal];
    const auto dtype = chosenBy(row.chooses_by, op, arguments);
    if (dtype && ((row.dtypes >> static_cast<unsigned>(*dtype)) & 1U) != 0 && (has_dimensions || !row.has_dimensions)) {
      TORCHEXT_THROW(RefusedOnCudaError,
                     c10::str('"', row.kernel, "\" not implemented for '", c10::toString(*dtype), "'"));
    }
  }
}

}  // namespace torchext
