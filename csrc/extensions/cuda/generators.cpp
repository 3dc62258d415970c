#include "generators.h"

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "fake_cuda.h"
#include "philox.h"

namespace torchext {

namespace {

constexpr std::size_t kMaxGenerators = 64;

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
  static auto* generators = new std::array<at::Generator, kMaxGenerators>;  // leaked: fakes may outlive statics
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
