#include "truncated_normals.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../libraries/fills/mt19937.h"
#include "../../libraries/support/recently_shared.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

constexpr std::size_t kArguments = 6;

bool isTruncNormal(const c10::OperatorHandle& op) {
  return op.schema().name() == "torchext::trunc_normal_";
}

Tensor emptyTensor(std::int64_t numel, c10::ScalarType dtype) {
  return at::empty({numel}, at::dtype(dtype).device(at::kCPU));
}

// PyTorch draws normal values for bounds that accept at least three in ten. A trial with bounds that accept next to
// nothing would not end.
bool isLikely(const TruncatedNormals::Parameters& parameters) {
  constexpr double kLeastAccepted = 0.3;
  const auto below = [&parameters](double bound) {
    return std::erfc((parameters.mean - bound) / parameters.std / std::sqrt(2.0)) / 2;
  };
  return below(parameters.b) - below(parameters.a) >= kLeastAccepted;
}

}  // namespace

bool TruncatedNormals::Parameters::operator==(const Parameters& other) const {
  return std::tie(dtype, mean, std, a, b) == std::tie(other.dtype, other.mean, other.std, other.a, other.b);
}

std::optional<TruncatedNormals> TruncatedNormals::of(const c10::OperatorHandle& op, const Stack& stack) {
  return isTruncNormal(op)
             ? of(op, torch::jit::peek(stack, 0, kArguments).toTensor().scalar_type(), topOf(stack, kArguments))
             : std::nullopt;
}

std::optional<TruncatedNormals> TruncatedNormals::of(const c10::OperatorHandle& op,
                                                     c10::ScalarType dtype,
                                                     c10::ArrayRef<c10::IValue> arguments) {
  const auto number = [&arguments](std::size_t index) { return arguments[index].toDouble(); };
  return isTruncNormal(op) ? std::optional{TruncatedNormals{op, {dtype, number(1), number(2), number(3), number(4)}}}
                           : std::nullopt;
}

std::optional<TruncatedFill> TruncatedNormals::asFill() const {
  const auto& [dtype, mean, std, a, b] = parameters_;
  return isExact() ? std::optional{TruncatedFill::between(dtype, mean, std, a, b)} : std::nullopt;
}

bool TruncatedNormals::fill(void* values, std::int64_t count, Engine& engine) const {
  const auto fill = asFill();
  return fill && fillTruncated(*fill, values, count, engine).has_value();
}

std::optional<std::uint64_t> TruncatedNormals::countDraws(std::int64_t count, const at::Generator& generator) const {
  const auto fill = asFill();
  if (!fill) {
    return std::nullopt;
  }
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  Engine engine = [&impl] {
    const std::lock_guard lock(impl.mutex_);
    return impl.engine().data();
  }();
  return fillTruncated(*fill, nullptr, count, engine);
}

bool TruncatedNormals::isExact() const {
  using Result = std::pair<Parameters, bool>;
  thread_local RecentlyShared<Result, 16> results;  // a model repeats the same arguments for all of its layers
  return results
      .get([this](const Result& known) { return known.first == parameters_; },
           [this] { return Result{parameters_, isLikely(parameters_) && agrees(parameters_) && agreesAtBounds()}; })
      ->second;
}

// Compares the bits of some values, the last of them in an incomplete chunk, and the generators afterwards.
bool TruncatedNormals::agrees(const Parameters& parameters) const {
  constexpr std::int64_t kCount = 1003;
  const auto& [dtype, mean, std, a, b] = parameters;
  const RealDispatch guard;
  const Tensor own = emptyTensor(kCount, dtype);
  const at::Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  Engine engine = impl.engine().data();
  if (!fillTruncated(TruncatedFill::between(dtype, mean, std, a, b), own.mutable_data_ptr(), kCount, engine)) {
    return false;
  }
  const Tensor theirs = emptyTensor(kCount, dtype);
  Stack stack{theirs, mean, std, a, b, generator};
  op_.callBoxed(stack);
  return std::memcmp(own.const_data_ptr(), theirs.const_data_ptr(), own.nbytes()) == 0 &&
         areSame(engine, impl.engine().data());
}

// Compares values with bounds that are among the drawn values, and many values that are rejected more than once.
bool TruncatedNormals::agreesAtBounds() const {
  constexpr std::int64_t kSome = 160;
  const RealDispatch guard;
  const Tensor some = emptyTensor(kSome, parameters_.dtype);
  Engine engine = at::mt19937{at::default_rng_seed_val}.data();
  constexpr float kFar = 100;
  fillTruncated({parameters_.dtype, 0, 1, -kFar, kFar}, some.mutable_data_ptr(), kSome, engine);
  const Tensor sorted = std::get<0>(some.to(c10::kDouble).sort());
  const auto bound = [&sorted](std::int64_t index) { return sorted.const_data_ptr<double>()[index]; };
  return agrees({parameters_.dtype, 0, 1, bound(kSome / 5), bound(kSome - kSome / 5)});
}

}  // namespace torchext
