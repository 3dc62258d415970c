#include "elementwise_steps.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include "../support/stack_utils.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// What kernels may call: kernels, and factories, which this key leads to them.
constexpr DispatchKeySet kSelect{DispatchKey::BackendSelect};
constexpr DispatchKeySet kAllButKernels =
    DispatchKeySet(DispatchKeySet::FULL) - DispatchKeySet(DispatchKey::Dense) - kSelect;
constexpr DispatchKeySet kCpu{DispatchKey::CPU};

// Each with one that works in place, whose name ends in an underscore. All are one operation of IEEE 754.
constexpr std::array<std::string_view, 6> kRoundingOnce{"aten::mul", "aten::div", "aten::add",
                                                        "aten::sub", "aten::neg", "aten::abs"};

bool isFloatingPoint(const Geometry& geometry) {
  return c10::isFloatingType(c10::typeMetaToScalarType(geometry.dtype)) &&
         c10::elementSize(c10::typeMetaToScalarType(geometry.dtype)) >= 2;
}

bool isContiguous(const Geometry& geometry) {
  int64_t expected = 1;
  for (auto i = geometry.sizes.size(); i-- > 0;) {
    if (geometry.sizes[i] != 1 && geometry.strides[i] != expected) {
      return false;
    }
    expected *= geometry.sizes[i];
  }
  return !geometry.is_conj && !geometry.is_neg;
}

// Are all of the other tensors numbers, and are sums not multiplied, which would be rounded twice or once?
bool takesNumbersOnly(const OpNode& node) {
  const auto& tensors = node.tensors();
  const bool are_numbers = std::all_of(tensors.begin() + 1, tensors.end(),
                                       [](const TensorArgument& argument) { return argument.number.has_value(); });
  const int alpha = findArgument(node.op().schema(), "alpha");
  return are_numbers && (alpha < 0 || node.arguments()[static_cast<std::size_t>(alpha)].toScalar().equal(1));
}

// Like `mul_`, for `mul_` and `mul`.
std::optional<OperatorHandle> inPlace(const OperatorHandle& op) {
  std::string name = op.schema().name();
  if (name.back() != '_') {
    name += '_';
  }
  const bool rounds_once = isAmong(kRoundingOnce, std::string_view{name}.substr(0, name.size() - 1)) &&
                           (op.schema().overload_name().empty() || op.schema().overload_name() == "Tensor");
  if (!rounds_once) {
    return std::nullopt;
  }
  return c10::Dispatcher::singleton().findSchema({name, op.schema().overload_name()});
}

// A copy with another dtype, in memory like that of the first one.
bool isConversion(const OpNode& node) {
  if (node.op().schema().name() != "aten::_to_copy") {
    return false;
  }
  const auto given = [&node](const char* name) -> const c10::IValue& {
    return node.arguments()[static_cast<std::size_t>(findArgument(node.op().schema(), name))];
  };
  return !given("pin_memory").toOptional<bool>().value_or(false) &&
         given("device").toOptional<c10::Device>().value_or(c10::kCPU).is_cpu();
}

}  // namespace

ElementwiseStep::ElementwiseStep(const OpNode& node, OperatorHandle op, Geometry source, Geometry shown)
    : node_{&node}, op_{std::move(op)}, source_{std::move(source)}, shown_{std::move(shown)} {}

std::optional<ElementwiseStep> ElementwiseStep::of(const OpNode& node, const Geometry& shown) {
  if (node.written().size() != 1 || node.tensors().empty() || node.tensors().front().value == nullptr ||
      node.tensors().front().geometry != shown || !isFloatingPoint(shown)) {
    return std::nullopt;
  }
  const WrittenStorage& written = node.written().front();
  if (const auto in_place = inPlace(node.op()); in_place && takesNumbersOnly(node)) {
    const bool keeps_memory = written.is_argument ? written.position == 0 && !written.was_resized
                                                  : written.geometry == shown && shown.storage_offset == 0;
    return keeps_memory ? std::optional{ElementwiseStep{node, *in_place, shown, shown}} : std::nullopt;
  }
  const bool is_same_shape = !written.is_argument && written.geometry.sizes == shown.sizes &&
                             isContiguous(written.geometry) && written.geometry.storage_offset == 0;
  if (isConversion(node) && node.tensors().size() == 1 && is_same_shape && isFloatingPoint(written.geometry)) {
    return ElementwiseStep{node, node.op(), shown, written.geometry};
  }
  return std::nullopt;
}

const c10::Storage& ElementwiseStep::prepare(const c10::Storage& storage) {
  from_ = storage;
  to_ = isConversion(*node_) ? shown_.makeEmptyTensor(c10::kCPU).storage() : storage;
  return to_;
}

Tensor ElementwiseStep::stretchOf(const c10::Storage& storage,
                                  const Geometry& geometry,
                                  std::int64_t begin,
                                  std::int64_t end) const {
  const auto itemsize = static_cast<std::int64_t>(geometry.dtype.itemsize());
  auto* data = static_cast<std::byte*>(storage.mutable_data()) + (geometry.storage_offset + begin) * itemsize;
  return at::from_blob(data, {end - begin}, at::dtype(geometry.dtype));
}

void ElementwiseStep::compute(std::int64_t begin, std::int64_t end) const {
  const c10::impl::ForceDispatchKeyGuard guard{kSelect, kAllButKernels};
  const Tensor source = stretchOf(from_, source_, begin, end);
  if (isConversion(*node_)) {
    Tensor converted = stretchOf(to_, shown_, begin, end);
    at::_ops::copy_::redispatch(kCpu, converted, source, /*non_blocking=*/false);
    return;
  }
  std::vector<Tensor> tensors{source};
  for (const auto i : c10::irange(std::size_t{1}, node_->tensors().size())) {
    tensors.push_back(at::native::wrapped_scalar_tensor(*node_->tensors()[i].number));
  }
  Stack stack = node_->arguments(tensors);
  op_.redispatchBoxed(kCpu, &stack);
}

}  // namespace torchext
