#include "draws.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/fills/fill.h"
#include "../../libraries/fills/mt19937.h"
#include "../../libraries/fills/random_fill.h"
#include "../../libraries/support/recently_shared.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/registrations.h"
#include "twister_tape.h"

namespace torchext {

using at::Generator;

namespace {

// Returns true for a tensor whose elements fill a contiguous range of memory in order, unmodified. For a conjugate or
// negative view, PyTorch fills a copy and writes that back (MathBitsFallback.h).
bool isPlainlyContiguous(const Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// ---- Truncated normal values ----

// Returns true for `torchext::trunc_normal_`, which stands for `torch.nn.init.trunc_normal_` where that may reject
// drawn values: torchext/fake/python_functions.py.
bool isTruncNormal(const OperatorHandle& op) {
  return op.schema().name() == "torchext::trunc_normal_";
}

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

// ---- Draws ----

namespace {

// These operators fill a tensor with a number of draws that is an affine function of its number of elements: a fixed
// number per element, through `cpu_serial_kernel` (DistributionTemplates.h), or a constant number where MKL gets a seed
// (`bernoulli_`, `exponential_`). It depends on the dtype, the arguments and the release, so a trial run on a small
// tensor measures it.
constexpr std::array<std::string_view, 6> kAffine{"aten::uniform_",     "aten::random_",    "aten::bernoulli_",
                                                  "aten::exponential_", "aten::geometric_", "aten::cauchy_"};

bool isAffine(const OperatorHandle& op) {
  // `bernoulli_.Tensor` depends on the values of its probabilities.
  return isAmong(kAffine, op.schema().name()) && op.schema().overload_name() != "Tensor";
}

// Fills `numel` elements of `dtype` with a private generator, and counts its draws.
std::uint64_t tryOut(const OperatorHandle& op, const Stack& stack, int64_t numel, c10::ScalarType dtype) {
  const auto count = op.schema().arguments().size();
  Stack trial(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  const Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  impl.random();  // the first draw begins a block; trials are too short to reach its end
  const int left = impl.engine().data().left_;
  {
    const RealDispatch guard;
    trial[0] = at::empty({numel}, at::TensorOptions().dtype(dtype).device(at::kCPU));
    trial[toSize(generatorArgument(op.schema()))] = generator;
    op.callBoxed(trial);
  }
  return static_cast<std::uint64_t>(left - impl.engine().data().left_);
}

// A trial and its result. `numbers` are the arguments between the tensor and the generator.
struct Trial {
  const c10::FunctionSchema* schema;
  int64_t numel;
  c10::ScalarType dtype;
  Stack numbers;
  std::uint64_t draws;
};

// Counts the draws that `op` takes to fill `numel` elements of `dtype`. A trial costs more than all other recording,
// and a model repeats its layers, so the last results are cached.
std::uint64_t countByTrial(const OperatorHandle& op, const Stack& stack, int64_t numel, c10::ScalarType dtype) {
  thread_local RecentlyShared<Trial, 16> trials;
  const auto& schema = op.schema();
  const std::size_t self = stack.size() - schema.arguments().size();
  const auto count = toSize(generatorArgument(schema)) - 1;
  const auto numbers = c10::ArrayRef<IValue>(stack).slice(self + 1, count);
  const auto is_same = [&](const Trial& known) {
    return known.schema == &schema && known.numel == numel && known.dtype == dtype &&
           std::equal(known.numbers.begin(), known.numbers.end(), numbers.begin(), numbers.end());
  };
  const auto run = [&] { return Trial{&schema, numel, dtype, numbers.vec(), tryOut(op, stack, numel, dtype)}; };
  return trials.get(is_same, run)->draws;
}

std::uint64_t countAffine(const OperatorHandle& op, const Stack& stack, int64_t numel, c10::ScalarType dtype) {
  constexpr int64_t kSmall = 32;
  if (numel <= kSmall) {
    return countByTrial(op, stack, numel, dtype);
  }
  const auto small = countByTrial(op, stack, kSmall, dtype);
  const auto slope = countByTrial(op, stack, kSmall + 1, dtype) - small;
  return small + static_cast<std::uint64_t>(numel - kSmall) * slope;
}

// `normal_fill` works on chunks, and draws a last chunk again if the number of elements is not a multiple of the chunk
// size. Whether it draws the incomplete chunk first depends on the dtype and the release, so a trial measures it.
std::uint64_t countChunkedNormals(const OperatorHandle& op, const Stack& stack, int64_t numel, c10::ScalarType dtype) {
  const auto chunk = countByTrial(op, stack, kNormalChunk, dtype);
  const auto tail = countByTrial(op, stack, kNormalChunk + numel % kNormalChunk, dtype);
  return tail + static_cast<std::uint64_t>(numel / kNormalChunk - 1) * chunk;
}

// `native_dropout` fills a mask of Booleans with `bernoulli_` (Dropout.cpp), and takes no generator.
TapePositionPtr takeDrawsOfDropout(const Stack& stack, const Generator& generator) {
  static const auto bernoulli = c10::Dispatcher::singleton().findSchemaOrThrow("aten::bernoulli_", "float");
  const Tensor& input = torch::jit::peek(stack, 0, 3).toTensor();
  const double p = torch::jit::peek(stack, 1, 3).toDouble();
  const bool trains = torch::jit::peek(stack, 2, 3).toOptional<bool>().value_or(true);
  if (!trains || input.numel() == 0) {
    return takeDraws(generator, 0);
  }
  const Stack fill{Tensor{}, 1 - p, IValue{}};
  return takeDraws(generator, countAffine(bernoulli, fill, input.numel(), c10::kBool));
}

// `trunc_normal_` redraws rejected values, so counting requires drawing: torchext/fake/python_functions.py. Unsupported
// for a target that `normal_` fills number by number, because there the number left over from a pair matters.
TapePositionPtr takeDrawsOfTruncNormal(const OperatorHandle& op, const Stack& stack, const Generator& generator) {
  static const auto count = c10::Dispatcher::singleton().findSchemaOrThrow("torchext::trunc_normal_draws", "");
  const auto arguments = argumentsOf(op, stack);
  const Tensor& self = arguments[0].toTensor();
  if (self.numel() < kNormalChunk || !isPlainlyContiguous(self)) {
    return nullptr;
  }
  if (const auto fill = requestedFillOf(op, self.scalar_type(), arguments)) {
    auto& impl = *generator.get<at::CPUGeneratorImpl>();
    at::mt19937_data_pod engine = [&impl] {
      const std::lock_guard lock(impl.mutex_);
      return impl.engine().data();
    }();
    if (const auto draws = fillTruncated(std::get<TruncatedFill>(*fill), nullptr, self.numel(), engine)) {
      return takeDraws(generator, *draws);
    }
  }
  Stack counted{self.numel(), self.scalar_type()};
  counted.insert(counted.end(), arguments.begin() + 1, arguments.begin() + 5);
  counted.emplace_back(generator);
  {
    const RealDispatch guard;
    count.callBoxed(counted);
  }
  return takeDraws(generator, static_cast<std::uint64_t>(counted.front().toInt()));
}

bool isNormal(std::string_view name) {
  return name == "aten::normal_" || name == "aten::log_normal_";
}

// The number of draws depends on these properties of the filled tensor.
TapePositionPtr takeDrawsOfFill(const OperatorHandle& op,
                                const Stack& stack,
                                int64_t numel,
                                c10::ScalarType dtype,
                                bool is_contiguous,
                                const Generator& generator) {
  if (numel == 0) {
    return takeDraws(generator, 0);
  }
  const std::string& name = op.schema().name();
  // These two fill a complex tensor as a real one with twice the elements (DistributionTemplates.h). Operators that
  // refuse complex tensors raise in the trial.
  if (c10::isComplexType(dtype) && (isNormal(name) || name == "aten::uniform_")) {
    dtype = c10::toRealValueType(dtype);
    numel *= 2;
  }
  if (name == "aten::normal_" && numel >= kNormalChunk && is_contiguous) {
    return takeDraws(generator, countChunkedNormals(op, stack, numel, dtype));
  }
  if (isNormal(name)) {
    return takeNormals(generator, static_cast<std::uint64_t>(numel));
  }
  return takeDraws(generator, countAffine(op, stack, numel, dtype));
}

}  // namespace

TapePositionPtr takeDrawsOf(const OperatorHandle& op, const Stack& stack, const Generator& generator) {
  const std::string& name = op.schema().name();
  if (name == "aten::native_dropout") {
    return takeDrawsOfDropout(stack, generator);
  }
  if (isTruncNormal(op)) {
    return takeDrawsOfTruncNormal(op, stack, generator);
  }
  if (!isNormal(name) && !isAffine(op)) {
    return nullptr;
  }
  const Tensor& self = argumentsOf(op, stack)[0].toTensor();
  if (self.is_conj() || self.is_neg()) {
    return nullptr;  // the copy that is filled may be contiguous even if `self` is not
  }
  return takeDrawsOfFill(op, stack, self.numel(), self.scalar_type(), self.is_contiguous(), generator);
}

std::uint64_t skipFill(const std::string& name,
                       int64_t numel,
                       c10::ScalarType dtype,
                       const std::vector<double>& numbers,
                       const Generator& generator) {
  TORCH_CHECK_VALUE(generator.device().is_cpu(), "skip_fill() takes a CPU generator, found one on ", generator.device(),
                    ".");
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "");
  TORCH_CHECK_VALUE(isNormal(op.schema().name()) || isAffine(op), "skip_fill() cannot determine how many numbers `",
                    op.operator_name(), "` draws.");
  TORCH_CHECK_VALUE(numbers.size() + 2 == op.schema().arguments().size(), "skip_fill() takes as many numbers as `",
                    op.operator_name(), "`, found ", numbers.size(), ".");
  Stack stack{Tensor{}};
  stack.insert(stack.end(), numbers.begin(), numbers.end());
  stack.emplace_back();
  return takeDrawsOfFill(op, stack, numel, dtype, /*is_contiguous=*/true, generator)->length().value_or(0);
}

// ---- Replays ----

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
