#include "replay_fill.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/fills/twister.h"
#include "../../libraries/support/recently_shared.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/registrations.h"
#include "draws.h"
#include "twister_tape.h"

namespace torchext {

namespace {

// ---- Truncated normal values ----

// The arguments of `torch.nn.init.trunc_normal_`, except for the tensor and the generator.
struct Parameters {
  c10::ScalarType dtype;
  double mean;
  double std;
  double a;
  double b;

  bool operator==(const Parameters& other) const {
    return std::tie(dtype, mean, std, a, b) == std::tie(other.dtype, other.mean, other.std, other.a, other.b);
  }

  TruncatedFill fill() const {
    return TruncatedFill::between(dtype, mean, std, a, b);
  }
};

Tensor emptyTensor(std::int64_t numel, c10::ScalarType dtype) {
  return at::empty({numel}, at::dtype(dtype).device(at::kCPU));
}

// PyTorch draws normal values for bounds that accept at least three in ten. A trial with bounds that accept next to
// nothing would not end.
bool isLikely(const Parameters& parameters) {
  constexpr double kLeastAccepted = 0.3;
  const auto below = [&parameters](double bound) {
    return std::erfc((parameters.mean - bound) / parameters.std / std::sqrt(2.0)) / 2;
  };
  return below(parameters.b) - below(parameters.a) >= kLeastAccepted;
}

// Compares the bits of some values, the last of them in an incomplete chunk, and the generators afterwards.
bool agrees(const OperatorHandle& op, const Parameters& parameters) {
  constexpr std::int64_t kCount = 1003;
  const RealDispatch guard;
  const Tensor own = emptyTensor(kCount, parameters.dtype);
  const at::Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937_data_pod engine = impl.engine().data();
  if (!fillTruncated(parameters.fill(), own.mutable_data_ptr(), kCount, engine)) {
    return false;
  }
  const Tensor theirs = emptyTensor(kCount, parameters.dtype);
  Stack stack{theirs, parameters.mean, parameters.std, parameters.a, parameters.b, generator};
  op.callBoxed(stack);
  return std::memcmp(own.const_data_ptr(), theirs.const_data_ptr(), own.nbytes()) == 0 &&
         areSame(engine, impl.engine().data());
}

// Compares values with bounds that are among the drawn values, and many values that are rejected more than once.
bool agreesAtBounds(const OperatorHandle& op, c10::ScalarType dtype) {
  constexpr std::int64_t kSome = 160;
  const RealDispatch guard;
  const Tensor some = emptyTensor(kSome, dtype);
  at::mt19937_data_pod engine = at::mt19937{at::default_rng_seed_val}.data();
  constexpr float kFar = 100;
  fillTruncated({dtype, 0, 1, -kFar, kFar}, some.mutable_data_ptr(), kSome, engine);
  const Tensor sorted = std::get<0>(some.to(c10::kDouble).sort());
  const auto bound = [&sorted](std::int64_t index) { return sorted.const_data_ptr<double>()[index]; };
  return agrees(op, {dtype, 0, 1, bound(kSome / 5), bound(kSome - kSome / 5)});
}

bool isExact(const OperatorHandle& op, const Parameters& parameters) {
  using Result = std::pair<Parameters, bool>;
  thread_local RecentlyShared<Result, 16> results;  // a model repeats the same arguments for all of its layers
  const auto is_same = [&parameters](const Result& known) { return known.first == parameters; };
  const auto compare = [&] {
    return Result{parameters, isLikely(parameters) && agrees(op, parameters) && agreesAtBounds(op, parameters.dtype)};
  };
  return results.get(is_same, compare)->second;
}

}  // namespace

std::optional<Distribution> distributionOf(const OperatorHandle& op) {
  if (op.schema().name() == "aten::uniform_") {
    return Distribution::Uniform;
  }
  if (op.schema().name() == "aten::normal_") {
    return Distribution::Normal;
  }
  return std::nullopt;
}

bool isTruncNormal(const OperatorHandle& op) {
  return op.schema().name() == "torchext::trunc_normal_";
}

std::optional<RequestedFill> requestedFillOf(const OperatorHandle& op,
                                             c10::ScalarType dtype,
                                             ArrayRef<IValue> arguments) {
  const auto number = [&arguments](std::size_t index) { return arguments[index].toDouble(); };
  if (const auto distribution = distributionOf(op)) {
    return RandomFill{*distribution, dtype, number(1), number(2)};
  }
  if (isTruncNormal(op)) {
    const Parameters parameters{dtype, number(1), number(2), number(3), number(4)};
    return isExact(op, parameters) ? std::optional<RequestedFill>{parameters.fill()} : std::nullopt;
  }
  return std::nullopt;
}

bool replayFill(const OperatorHandle& op, Stack& stack, const at::Generator& generator, AfterStretch after) {
  if (!distributionOf(op) && !isTruncNormal(op)) {
    return false;
  }
  const auto arguments = argumentsOf(op, stack);
  const Tensor self = arguments.front().toTensor();
  if (!self.is_cpu() || !isPlainlyContiguous(self)) {
    return false;
  }
  const auto fill = requestedFillOf(op, self.scalar_type(), arguments);
  if (!fill) {
    return false;
  }
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937_data_pod engine = impl.engine().data();
  void* values = self.mutable_data_ptr();
  const auto* random = std::get_if<RandomFill>(&*fill);
  const bool is_filled = random != nullptr
                             ? fillRandomly(*random, values, self.numel(), engine, after)
                             : fillTruncated(std::get<TruncatedFill>(*fill), values, self.numel(), engine).has_value();
  if (!is_filled) {
    return false;
  }
  setEngine(impl, engine);
  stack = {self};
  return true;
}

void registerReplayFill() {
  hooks().replay_fill = [](const OperatorHandle& op, Stack& stack, const at::Generator& generator) {
    return replayFill(op, stack, generator);
  };
}

}  // namespace torchext
