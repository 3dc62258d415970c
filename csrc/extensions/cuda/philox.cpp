#include "philox.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Utils.h>
#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DistributionTemplates.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "fake_cuda.h"

namespace torchext {

namespace {

constexpr std::int64_t kBlock = 256;  // threads

// `philox_cuda_state()` rounds the requested offset up to a multiple of this.
constexpr std::uint64_t kDrawsOfCall = 4;

// `calc_execution_policy()`: threads stride over the elements, and each curand call yields `unroll` values.
std::uint64_t offsetOfGrid(std::int64_t numel, std::int64_t unroll, const PhiloxGpu& gpu) {
  if (numel <= 0) {
    return 0;
  }
  const std::int64_t threads = std::min(gpu.wave(), at::round_up(numel, kBlock));
  return static_cast<std::uint64_t>(at::ceil_div(numel, threads * unroll)) * kDrawsOfCall;
}

// The dimensions of a tensor as an iterator traverses them: strides in bytes, ascending, and merged where possible
// (TensorIteratorBase::reorder_dimensions(), coalesce_dimensions()).
struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};
using Dimensions = c10::SmallVector<Dimension, 8>;

Dimensions dimensionsOf(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::int64_t itemsize) {
  Dimensions sorted;
  for (const auto i : c10::irange(sizes.size())) {
    sorted.push_back({sizes[sizes.size() - 1 - i], strides[sizes.size() - 1 - i] * itemsize});
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  Dimensions merged;
  for (const Dimension& next : sorted) {
    if (next.size == 1) {
      continue;
    }
    if (!merged.empty() && merged.back().size * merged.back().stride == next.stride) {
      merged.back().size *= next.size;
    } else {
      merged.push_back(next);
    }
  }
  return merged;
}

std::int64_t numelOf(const Dimensions& dimensions) {
  std::int64_t numel = 1;
  for (const Dimension& dimension : dimensions) {
    numel *= dimension.size;
  }
  return numel;
}

// `can_use_32bit_indexing()`
bool hasShortIndexes(const Dimensions& dimensions) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t reached = 1;
  for (const Dimension& dimension : dimensions) {
    reached += (dimension.size - 1) * dimension.stride;
  }
  return numelOf(dimensions) <= kMost && reached <= kMost;
}

// `with_32bit_indexing()`: halves the dimension with the largest extent until all parts are small enough.
std::uint64_t offsetOfParts(const Dimensions& dimensions, std::int64_t unroll, const PhiloxGpu& gpu) {
  if (hasShortIndexes(dimensions)) {
    return offsetOfGrid(numelOf(dimensions), unroll, gpu);
  }
  const auto extent = [](const Dimension& dimension) { return (dimension.size - 1) * dimension.stride; };
  // The last of equal ones.
  const auto longest =
      std::max_element(dimensions.rbegin(), dimensions.rend(),
                       [&extent](const Dimension& a, const Dimension& b) { return extent(a) < extent(b); });
  const auto place = toSize(std::distance(longest, dimensions.rend()) - 1);
  Dimensions first = dimensions;
  Dimensions second = dimensions;
  first[place].size /= 2;
  second[place].size -= first[place].size;
  return offsetOfParts(first, unroll, gpu) + offsetOfParts(second, unroll, gpu);
}

// `distribution_nullary_kernel()` advances the generator for all elements, and again for each part if there are too
// many elements for 32-bit indices.
std::uint64_t offsetOfFill(const Dimensions& dimensions, std::int64_t unroll, const PhiloxGpu& gpu) {
  const std::uint64_t whole = offsetOfGrid(numelOf(dimensions), unroll, gpu);
  return hasShortIndexes(dimensions) ? whole : whole + offsetOfParts(dimensions, unroll, gpu);
}

// ---- Calls ----

struct Call {
  const c10::FunctionSchema& schema;
  c10::ArrayRef<IValue> arguments;
  const PhiloxGpu& gpu;

  const IValue& operator[](std::size_t i) const {
    return arguments[i];
  }
  const Tensor& tensor(std::size_t i) const {
    return arguments[i].toTensor();
  }
  const IValue& named(const char* name) const {
    return arguments[toSize(findArgument(schema, name))];
  }
};

using Draws = std::optional<PhiloxDraws>;
using Rule = Draws (*)(const Call& call);

// For a new temporary tensor that is filled.
PhiloxDraws drawsOfNewFill(std::int64_t numel, std::size_t itemsize, std::int64_t unroll, const PhiloxGpu& gpu) {
  return {offsetOfFill({{numel, toSigned(itemsize)}}, unroll, gpu), numel};
}

PhiloxDraws drawsOfGrid(std::int64_t numel, std::int64_t unroll, const PhiloxGpu& gpu) {
  return {offsetOfGrid(numel, unroll, gpu), numel};
}

// Two double-precision values need as many bits as four single-precision ones.
std::int64_t unrollOf(c10::ScalarType dtype) {
  return dtype == c10::kDouble ? 2 : 4;
}

// `parts`: the number of values in each element, which a further dimension counts.
Draws drawsOfFill(const Tensor& self, std::int64_t unroll, const PhiloxGpu& gpu, std::int64_t parts = 1) {
  if (self.is_conj() || self.is_neg()) {
    return std::nullopt;  // PyTorch fills a copy, whose strides may differ
  }
  if (self.numel() == 0) {
    return PhiloxDraws{};
  }
  c10::DimVector sizes{self.sizes()};
  c10::DimVector strides;
  for (const std::int64_t stride : self.strides()) {
    strides.push_back(stride * parts);
  }
  sizes.push_back(parts);
  strides.push_back(1);
  const auto dimensions = dimensionsOf(sizes, strides, toSigned(self.dtype().itemsize()) / parts);
  return PhiloxDraws{offsetOfFill(dimensions, unroll, gpu), self.numel() * parts};
}

// A complex number is drawn as two real numbers.
Draws drawsOfFloats(const Call& call) {
  const Tensor& self = call.tensor(0);
  const std::int64_t unroll = unrollOf(c10::toRealValueType(self.scalar_type()));
  return drawsOfFill(self, unroll, call.gpu, self.is_complex() ? 2 : 1);
}

// ---- Integers ----

thread_local std::uint64_t range_of_integers = 0;

// Replaces the kernel and records the range that PyTorch determines for a dtype.
template <typename Generator>
struct RecordRange {
  void operator()(at::TensorIteratorBase& /*iter*/,
                  std::uint64_t range,
                  std::int64_t /*base*/,
                  const std::optional<at::Generator>& /*generator*/) {
    range_of_integers = range;
  }
  void operator()(at::TensorIteratorBase& /*iter*/, const std::optional<at::Generator>& /*generator*/) {
    range_of_integers = std::numeric_limits<std::uint64_t>::max();
  }
};

// `random_from_to_kernel()` draws 64 bits for ranges of at least 2^28.
Draws drawsOfIntegersFrom(const Call& call, std::int64_t from, std::optional<std::int64_t> to) {
  constexpr std::uint64_t kSmallRange = std::uint64_t{1} << 28U;
  const NoWarnings guard;  // the call itself warns about numbers that the dtype cannot represent
  Tensor one{at::detail::empty_cpu({1}, call.tensor(0).scalar_type())};
  at::native::templates::random_from_to_impl<RecordRange, at::CPUGeneratorImpl>(one, from, to, std::nullopt);
  return drawsOfFill(call.tensor(0), range_of_integers >= kSmallRange ? 2 : 4, call.gpu);
}

Draws drawsOfIntegers(const Call& call) {
  const std::string& overload = call.schema.overload_name();
  if (overload == "from") {
    return drawsOfIntegersFrom(call, call[1].toInt(), call[2].toOptional<std::int64_t>());
  }
  if (overload == "to") {
    return drawsOfIntegersFrom(call, 0, call[1].toInt());
  }
  const c10::ScalarType dtype = call.tensor(0).scalar_type();
  return drawsOfFill(call.tensor(0), dtype == c10::kDouble || dtype == c10::kLong ? 2 : 4, call.gpu);
}

// Sorts random keys, then shuffles the elements with equal keys.
Draws drawsOfPermutation(const Call& call) {
  const std::int64_t count = call[0].toInt();
  if (count <= 0) {
    return PhiloxDraws{};
  }
  PhiloxDraws draws =
      drawsOfNewFill(count, sizeof(std::int64_t), 2, call.gpu);  // keys have 64 bits where the difference matters
  draws.offset += at::round_up(static_cast<std::uint64_t>(count), kDrawsOfCall);
  return draws;
}

// ---- By the values of tensors ----

template <std::uint64_t kOffset>
Draws drawsOfEach(const Call& call) {
  return PhiloxDraws{at::round_up(kOffset, kDrawsOfCall), call.tensor(0).numel()};
}

// `bernoulli_tensor_cuda_kernel()`
Draws drawsOfBernoulli(const Call& call) {
  const std::string& overload = call.schema.overload_name();
  if (overload == "float" || overload == "p" || overload == "float_out") {
    return drawsOfFloats(call);
  }
  return call.tensor(0).numel() == 0 ? PhiloxDraws{} : drawsOfEach<10>(call);
}

// Draws standard normal numbers into the output, then scales and shifts them (`normal_out_impl()`).
Draws drawsOfNormal(const Call& call) {
  const bool has_both = call[0].isTensor() && call[1].isTensor();
  const auto sizes = has_both ? at::infer_size_dimvector(call.tensor(0).sizes(), call.tensor(1).sizes())
                              : c10::DimVector{call.tensor(call[0].isTensor() ? 0 : 1).sizes()};
  const int out = findArgument(call.schema, "out");
  const Tensor& like = out >= 0 ? call.tensor(toSize(out)) : call.tensor(call[0].isTensor() ? 0 : 1);
  const std::int64_t numel = c10::multiply_integers(sizes) * (like.is_complex() ? 2 : 1);
  const c10::ScalarType dtype = c10::toRealValueType(like.scalar_type());
  const std::size_t itemsize = c10::elementSize(dtype);
  if (!hasShortIndexes({{numel, toSigned(itemsize)}}) && out >= 0 && !like.is_contiguous()) {
    return std::nullopt;
  }
  return drawsOfNewFill(numel, itemsize, unrollOf(dtype), call.gpu);
}

Draws drawsOfDropout(const Call& call) {
  const bool trains = call.schema.name() != "aten::native_dropout" || call[2].toOptional<bool>().value_or(true);
  const bool keeps_none = call.schema.name() == "aten::native_dropout" && call[1].toDouble() == 1;
  return trains && !keeps_none ? drawsOfGrid(call.tensor(0).numel(), 4, call.gpu) : PhiloxDraws{};
}

Draws drawsOfRrelu(const Call& call) {
  const Tensor& self = call.tensor(0);
  return call.named("training").toBool() ? drawsOfGrid(self.numel(), unrollOf(self.scalar_type()), call.gpu)
                                         : PhiloxDraws{};
}

// Sampling without replacement draws exponential numbers for all categories. Sampling with replacement draws one number
// per sample, and the blocks of a grid column share the distributions.
Draws drawsOfMultinomial(const Call& call) {
  constexpr std::int64_t kBlocks = 65535;
  const Tensor& weights = call.tensor(0);
  const std::int64_t samples = call[1].toInt();
  if (!call[2].toBool() || samples == 1) {
    const auto itemsize = weights.dtype().itemsize();
    return drawsOfNewFill(weights.numel(), itemsize, unrollOf(weights.scalar_type()), call.gpu);
  }
  const std::int64_t distributions = weights.dim() == 1 ? 1 : weights.size(0);
  if (distributions == 0) {
    return PhiloxDraws{};
  }
  const std::int64_t turns = at::ceil_div(distributions, std::min(distributions, kBlocks));
  return PhiloxDraws{static_cast<std::uint64_t>(turns) * kDrawsOfCall, 0};
}

// ---- Attention ----

// The position of an element determines its random number on every device.
template <bool kIsFlash>
Draws drawsOfAttention(const Call& call) {
  constexpr std::int64_t kOfHead = 32;
  const Tensor& query = call.tensor(0);
  const Tensor& key = call.tensor(1);
  const auto isGiven = [&call](const char* name) {
    return findArgument(call.schema, name) >= 0 && !call.named(name).isNone();
  };
  // The lengths of variable-length sequences are values.
  if (query.dim() != 4 || key.dim() != 4 || isGiven("cum_seq_q") || isGiven("cu_seqlens_q")) {
    return std::nullopt;
  }
  if (call.named("dropout_p").toDouble() <= 0) {
    return PhiloxDraws{};
  }
  // In the operators below those with derivatives, the dimension of heads follows that of the sequence.
  const bool is_forward = call.schema.name().find("_attention_forward") != std::string::npos;
  const std::int64_t sequence = is_forward ? 1 : 2;
  const std::int64_t heads = query.size(0) * query.size(3 - sequence);  // of the whole batch
  const std::int64_t offset = kIsFlash ? heads * kOfHead : heads * query.size(sequence) * key.size(sequence);
  return PhiloxDraws{at::round_up(static_cast<std::uint64_t>(offset), kDrawsOfCall), 0};
}

// For operators that are tagged as random but receive the state to repeat the numbers of another operator.
Draws drawsNothing(const Call& /*call*/) {
  return PhiloxDraws{};
}

const OperatorTable<Rule> ruleOf{
    "advance the CUDA generator by a known offset",
    {{drawsOfFloats,
      {"aten::normal_", "aten::uniform_", "aten::log_normal_", "aten::cauchy_", "aten::exponential_",
       "aten::geometric_"}},
     {drawsOfIntegers, {"aten::random_"}},
     {drawsOfPermutation, {"aten::randperm"}},
     {drawsOfBernoulli, {"aten::bernoulli", "aten::bernoulli_"}},
     {drawsOfNormal, {"aten::normal"}},
     {drawsOfEach<20>, {"aten::poisson"}},
     {drawsOfEach<10>, {"aten::_standard_gamma", "aten::_sample_dirichlet"}},
     {drawsOfEach<42>, {"aten::binomial"}},
     {drawsOfDropout, {"aten::native_dropout", "aten::_fused_dropout"}},
     {drawsOfRrelu, {"aten::rrelu_with_noise", "aten::rrelu_with_noise_"}},
     {drawsOfMultinomial, {"aten::multinomial"}},
     {drawsOfAttention</*kIsFlash=*/true>,
      {"aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward"}},
     {drawsOfAttention</*kIsFlash=*/false>,
      {"aten::_scaled_dot_product_efficient_attention", "aten::_efficient_attention_forward"}},
     {drawsNothing,
      {"aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward",
       "aten::_cudnn_attention_backward", "aten::_cudnn_rnn", "aten::_cudnn_init_dropout_state",
       "aten::_fill_mem_eff_dropout_mask_", "aten::_fused_sdp_choice"}}}};

// The CUDA runtime's numbers of device attributes, which are stable across CUDA releases.
constexpr int kMultiprocessorCount = 16;
constexpr int kMaxThreadsPerMultiprocessor = 39;

int attributeOf(c10::Device device, int attribute) {
  using GetAttribute = int (*)(int* value, int attribute, int device);
  // PyTorch has loaded the library, if it exists.
  static const auto get = reinterpret_cast<GetAttribute>(dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"));
  int value = 0;
  return get != nullptr && get(&value, attribute, device.index()) == 0 ? value : 0;
}

}  // namespace

std::optional<c10::Device> cudaDeviceOf(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> device;
  forEachTensor(arguments, [&device](const Tensor& tensor) {
    if (!device && tensor.is_cuda()) {
      device = tensor.device();
    }
  });
  return device;
}

std::int64_t PhiloxGpu::wave() const noexcept {
  return std::int64_t{multiprocessors} * (threads_per_multiprocessor / kBlock) * kBlock;
}

PhiloxGpu philoxGpuOf(c10::Device device) {
  if (!hasRealCuda()) {
    const GpuDescription& gpu = fakeGpu();
    return {gpu.multiprocessors, gpu.max_threads_per_multiprocessor};
  }
  return {attributeOf(device, kMultiprocessorCount), attributeOf(device, kMaxThreadsPerMultiprocessor)};
}

std::optional<PhiloxDraws> philoxDrawsOf(const c10::OperatorHandle& op, const Stack& stack, const PhiloxGpu& gpu) {
  const Rule rule = ruleOf(op);
  const auto arguments = argumentsOf(op, stack);
  const bool is_known = rule != nullptr && gpu.wave() > 0 && !hasTensor(arguments, [](const Tensor& tensor) {
                          return tensor.layout() != c10::kStrided || tensor.is_nested();
                        });
  return is_known ? rule({op.schema(), arguments, gpu}) : std::nullopt;
}

namespace {

// The layout of `get_state()` of a CUDA generator (CUDAGeneratorImpl.cpp): the seed, then the offset.
struct State {
  std::uint64_t seed = c10::default_rng_seed_val;
  std::int64_t offset = 0;
};

class FakeCudaGenerator final : public c10::GeneratorImpl {
 public:
  FakeCudaGenerator(c10::DeviceIndex device, std::shared_ptr<State> state)
      : GeneratorImpl{c10::Device{c10::kCUDA, device}, c10::DispatchKeySet{c10::DispatchKey::CUDA}},
        state_{std::move(state)} {}

  void set_current_seed(std::uint64_t seed) override {
    *state_ = {seed, 0};
  }

  void set_offset(std::uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    state_->offset = static_cast<std::int64_t>(offset);  // wraps around, as the kernels do
  }

  std::uint64_t get_offset() const override {
    return static_cast<std::uint64_t>(state_->offset);
  }

  std::uint64_t current_seed() const override {
    return state_->seed;
  }

  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(/*is_cuda=*/true));
    return state_->seed;
  }

  void set_state(const c10::TensorImpl& new_state) override {
    at::detail::check_rng_state(new_state);
    const auto size = toSize(new_state.numel());
    TORCH_CHECK(size == sizeof(State) || size == sizeof(State::seed), "RNG state is wrong size");
    State state{0, 0};
    std::memcpy(&state, new_state.data_dtype_initialized<std::uint8_t>(), size);
    *state_ = state;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::detail::empty_cpu({toSigned(sizeof(State))}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), state_.get(), sizeof(State));
    return state.getIntrusivePtr();
  }

  // Shares the state.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<FakeCudaGenerator>(device().index(), state_);
  }

  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& new_state) override {
    const auto* other = dynamic_cast<const FakeCudaGenerator*>(new_state.get());
    TORCH_CHECK(other != nullptr, "graphsafe_set_state() expected a generator of a fake CUDA device.");
    state_ = other->state_;
  }

  FakeCudaGenerator* clone_impl() const override {
    return new FakeCudaGenerator{device().index(), std::make_shared<State>(*state_)};
  }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

at::Generator newFakeCudaGenerator(c10::DeviceIndex device) {
  return at::make_generator<FakeCudaGenerator>(device, std::make_shared<State>());
}

const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kMaxFakeCudaDevices>;  // leaked: fakes may outlive statics
  const Locked lock{LockRank::kGenerators};
  at::Generator& generator = generators->at(toSize(device));
  if (!generator.defined()) {
    generator = newFakeCudaGenerator(device);
  }
  return generator;
}

namespace {

// The offset by which a call advances the generator of a fake CUDA device: NOTE [Moves of CUDA generators].
class DrawingCall final : public CallFollower {
 public:
  DrawingCall(at::Generator generator, std::uint64_t offset) : generator_{std::move(generator)}, offset_{offset} {}

  void finish(const torch::jit::Stack& /*stack*/) override {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_offset(generator_.get_offset() + offset_);
  }

 private:
  at::Generator generator_;
  const std::uint64_t offset_;
};

}  // namespace

// The recorder of deferred_init moves generators itself.
std::unique_ptr<CallFollower> followFakeCudaDraws(const c10::OperatorHandle& op,
                                                  const torch::jit::Stack& stack,
                                                  c10::function_ref<bool()> /*decomposes*/) {
  if (fakeCudaDeviceCount() == 0 || isRecording() || isInFakeImplementation() || !drawsNumbers(op)) {
    return nullptr;
  }
  const auto arguments = argumentsOf(op, stack);
  const auto device = cudaDeviceOf(arguments);
  const auto draws = device ? philoxDrawsOf(op, stack, philoxGpuOf(*device)) : std::nullopt;
  if (!draws || draws->offset == 0) {
    return nullptr;
  }
  const int place = generatorArgument(op.schema());
  const bool is_given = place >= 0 && arguments[toSize(place)].isGenerator();
  at::Generator generator =
      is_given ? arguments[toSize(place)].toGenerator() : defaultFakeCudaGenerator(device->index());
  return generator.device().is_cuda() ? std::make_unique<DrawingCall>(std::move(generator), draws->offset) : nullptr;
}

}  // namespace torchext
