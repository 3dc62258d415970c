// The tape of Philox, the generator of CUDA: a seed and an offset, which moves by addition. It works on generators of
// real and fake devices, through the interface of `c10::GeneratorImpl`: NOTE [Moves of CUDA generators].
//
// A large tensor gets other values on a device with more or fewer threads. A recording is replayed on the device that
// it was made for, but processes may have different devices. So the identity of a position includes the thread counts
// of its device where they matter.

#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "../../core/deferred_init/random/tape.h"
#include "../../libraries/support/device_index.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../cuda/philox.h"
#include "../support/registrations.h"

namespace torchext {

using at::Generator;

namespace {

// Returns another generator with the same state. Moving it does not affect the other fields of the user's generator,
// such as whether cuDNN's dropout state must be rebuilt (`CUDAGeneratorImpl::set_offset()`). The caller holds the
// generator's mutex.
Generator withSameState(const Generator& generator) {
  return generator.graphsafe_get_state();
}

const Tape& philoxTape();

class PhiloxPosition final : public TapePosition {
 public:
  // The position of `generator`, for draws on `device`. The caller holds its mutex. `elements` is as in PhiloxDraws.
  PhiloxPosition(const Generator& generator, c10::Device device, std::int64_t elements)
      : TapePosition{philoxTape(), device},
        seed_{generator.current_seed()},
        offset_{generator.get_offset()},
        gpu_{philoxGpuOf(device)},
        elements_{elements} {}

  std::uint64_t draws() const noexcept override {
    return offset_;
  }

  void place(Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    Generator same = withSameState(generator);
    same.set_current_seed(seed_);
    same.set_offset(offset_);
  }

  std::string identity(TapeReader& /*reader*/) const override {
    const bool depends_on_gpu = elements_ > gpu_.wave();
    const auto ifDependent = [depends_on_gpu](int number) {
      return depends_on_gpu ? static_cast<std::uint64_t>(number) : 0;
    };
    const std::array<std::uint64_t, 4> numbers{seed_, offset_, ifDependent(gpu_.multiprocessors),
                                               ifDependent(gpu_.threads_per_multiprocessor)};
    std::string bytes(sizeof(numbers), '\0');
    std::memcpy(bytes.data(), numbers.data(), sizeof(numbers));
    return bytes;
  }

  void noteEnd(Generator generator) override {
    const std::lock_guard lock(generator.mutex());
    if (generator.current_seed() == seed_) {
      setLength(generator.get_offset() - offset_);
    }
  }

  void checkEnd(const OperatorHandle& op, Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    const std::uint64_t moved = generator.get_offset() - offset_;
    TORCH_CHECK(
        !length() || *length() == moved, "`", op.operator_name(), "` was recorded as moving the generator of ",
        device(), " by ", length().value_or(0), ", but moved it by ", moved,
        ", so later recorded operators start elsewhere. Another thread may have drawn from it during the replay. "
        "Otherwise please report this with the versions of PyTorch and torchext, and until it is fixed, construct the "
        "model on the "
        "CPU and let materialize_module() place it.");
  }

 private:
  std::uint64_t seed_;
  std::uint64_t offset_;
  PhiloxGpu gpu_;
  std::int64_t elements_;
};

// One generator per device.
class Philoxes final : public PrivateGenerators {
 public:
  const Generator& moveTo(const TapePosition& position, bool /*draws*/) override {
    Generator& generator = generators_[position.device()];
    if (!generator.defined()) {
      generator = defaultGenerator(position.device()).clone();
    }
    position.place(generator);
    return generator;
  }

 private:
  std::unordered_map<c10::Device, Generator> generators_;
};

class PhiloxTape final : public Tape {
 public:
  // The draws of an unknown operator may depend on the device, so use the largest number of elements.
  std::shared_ptr<TapePosition> positionOf(Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    return std::make_shared<PhiloxPosition>(generator, withIndex(generator.device()),
                                            std::numeric_limits<std::int64_t>::max());
  }

  TapePositionPtr takeDrawsOf(const OperatorHandle& op,
                              const torch::jit::Stack& stack,
                              const Generator& given) const override {
    Generator generator = given;
    const std::lock_guard lock(generator.mutex());
    const auto arguments = argumentsOf(op, stack);
    // `torch.Generator("cuda")` has no index: it draws on the device of the tensor.
    const c10::Device device = cudaDeviceOf(arguments).value_or(withIndex(generator.device()));
    const auto draws = philoxDrawsOf(op, stack, philoxGpuOf(device));
    if (!draws) {
      return nullptr;
    }
    auto position = std::make_shared<PhiloxPosition>(generator, device, draws->elements);
    position->setLength(draws->offset);
    withSameState(generator).set_offset(position->draws() + draws->offset);
    return position;
  }

  std::unique_ptr<PrivateGenerators> makeGenerators() const override {
    return std::make_unique<Philoxes>();
  }
};

const PhiloxTape kPhiloxTape;

const Tape& philoxTape() {
  return kPhiloxTape;
}

}  // namespace

void registerPhiloxTape() {
  setTape(c10::kCUDA, kPhiloxTape);
}

}  // namespace torchext
