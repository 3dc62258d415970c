#include "generators.h"

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include "../../support/locks.h"
#include "../../support/stack_utils.h"
#include "../calls/op_traits.h"
#include "fake_cuda.h"
#include "philox.h"

namespace torchext {

namespace {

constexpr std::size_t kMaxGenerators = 64;

// What `get_state()` of a CUDA generator returns (CUDAGeneratorImpl.cpp): the seed, then the offset.
struct State {
  std::uint64_t seed;
  std::int64_t offset;
};

class FakeCudaGenerator final : public c10::GeneratorImpl {
 public:
  explicit FakeCudaGenerator(c10::DeviceIndex device)
      : GeneratorImpl{c10::Device{c10::kCUDA, device}, c10::DispatchKeySet{c10::DispatchKey::CUDA}} {}

  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  void set_offset(std::uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }

  std::uint64_t get_offset() const override {
    return offset_;
  }

  std::uint64_t current_seed() const override {
    return seed_;
  }

  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(/*is_cuda=*/true));
    return seed_;
  }

  void set_state(const c10::TensorImpl& new_state) override {
    at::detail::check_rng_state(new_state);
    const auto size = static_cast<std::size_t>(new_state.numel());
    TORCH_CHECK(size == sizeof(State) || size == sizeof(State::seed), "RNG state is wrong size");
    State state{};
    std::memcpy(&state, new_state.data_dtype_initialized<std::uint8_t>(), size);
    seed_ = state.seed;
    offset_ = static_cast<std::uint64_t>(state.offset);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::detail::empty_cpu({static_cast<std::int64_t>(sizeof(State))}, at::kByte);
    const State values{seed_, static_cast<std::int64_t>(offset_)};
    std::memcpy(state.mutable_data_ptr(), &values, sizeof(values));
    return state.getIntrusivePtr();
  }

  FakeCudaGenerator* clone_impl() const override {
    auto* copy = new FakeCudaGenerator{device().index()};
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

 private:
  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t offset_ = 0;
};

// That of the first tensor on CUDA.
std::optional<c10::DeviceIndex> firstDevice(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::DeviceIndex> device;
  forEachTensor(arguments, [&device](const at::Tensor& tensor) {
    if (!device && tensor.is_cuda()) {
      device = tensor.device().index();
    }
  });
  return device;
}

}  // namespace

at::Generator newFakeCudaGenerator(c10::DeviceIndex device) {
  return at::make_generator<FakeCudaGenerator>(device);
}

const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kMaxGenerators>;  // leaked: fakes may outlive statics
  const Locked lock{LockRank::kGenerators};
  at::Generator& generator = generators->at(static_cast<std::size_t>(device));
  if (!generator.defined()) {
    generator = newFakeCudaGenerator(device);
  }
  return generator;
}

FakeCudaDraws::FakeCudaDraws(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (fakeCudaDeviceCount() == 0 || !drawsNumbers(op)) {
    return;
  }
  const auto arguments = topOf(stack, op.schema().arguments().size());
  const int place = generatorArgument(op.schema());
  if (place >= 0 && arguments[static_cast<std::size_t>(place)].isGenerator()) {
    generator_ = arguments[static_cast<std::size_t>(place)].toGenerator();
  } else if (const auto device = firstDevice(arguments)) {
    generator_ = defaultFakeCudaGenerator(*device);
  }
  if (!generator_.defined() || !generator_.device().is_cuda()) {
    return;
  }
  if (const auto draws = philoxDrawsOf(op, stack, philoxGpuOf(generator_.device()))) {
    offset_ = draws->offset;
  }
}

void FakeCudaDraws::take() {
  if (offset_ > 0) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_offset(generator_.get_offset() + offset_);
  }
}

}  // namespace torchext
