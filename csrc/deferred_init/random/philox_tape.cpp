#include "philox_tape.h"

#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "../../fake/cuda/fake_cuda.h"
#include "../../fake/cuda/philox.h"
#include "../../support/stack_utils.h"

namespace torchext {

using at::Generator;
using c10::OperatorHandle;

namespace {

// The caller holds the generator's mutex.
void moveTo(Generator& generator, std::uint64_t seed, std::uint64_t offset) {
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

// `torch.Generator("cuda")` has no index: it draws on whichever device the tensor is.
c10::Device withIndex(c10::Device device) {
  return device.has_index() ? device : c10::impl::VirtualGuardImpl{device.type()}.getDevice();
}

// Where a call draws: kernels run on the device of the tensors, whatever that of the generator is.
c10::Device deviceOf(c10::ArrayRef<c10::IValue> arguments, const Generator& generator) {
  std::optional<c10::Device> device;
  forEachTensor(arguments, [&device](const at::Tensor& tensor) {
    if (!device && tensor.is_cuda()) {
      device = tensor.device();
    }
  });
  return device ? *device : withIndex(generator.device());
}

class PhiloxPosition final : public TapePosition {
 public:
  // Where `generator` stands, to draw on `device`. The caller holds its mutex. `elements` is as in PhiloxDraws.
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
    moveTo(generator, seed_, offset_);
  }

  std::string identity(TapeReader& /*reader*/) const override {
    const bool depends_on_gpu = elements_ > gpu_.wave();
    const std::array<std::uint64_t, 3> numbers{seed_, offset_,
                                               depends_on_gpu ? static_cast<std::uint64_t>(gpu_.wave()) : 0};
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
    TORCH_CHECK(!length() || *length() == moved, "`", op.operator_name(), "` was recorded to move the generator of ",
                device(), " by ", length().value_or(0), ", but has moved it by ", moved,
                ", so that what was recorded after it starts elsewhere. Please report "
                "this, with the versions of PyTorch and of torchext; until it is mended, construct the model on the "
                "CPU, and let materialize_module() place it.");
  }

 private:
  std::uint64_t seed_;
  std::uint64_t offset_;
  PhiloxGpu gpu_;
  std::int64_t elements_;
};

// One for each device.
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
  // What is not known before it is run may depend on the device.
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
    const c10::Device device = deviceOf(topOf(stack, op.schema().arguments().size()), generator);
    const auto draws = philoxDrawsOf(op, stack, philoxGpuOf(device));
    if (!draws) {
      return nullptr;
    }
    auto position = std::make_shared<PhiloxPosition>(generator, device, draws->elements);
    position->setLength(draws->offset);
    generator.set_offset(position->draws() + draws->offset);
    return position;
  }

  std::unique_ptr<PrivateGenerators> makeGenerators() const override {
    return std::make_unique<Philoxes>();
  }
};

const PhiloxTape kPhiloxTape;
[[maybe_unused]] const bool kPhiloxTapeIsSet = (setTape(c10::kCUDA, kPhiloxTape), true);

}  // namespace

const Tape& philoxTape() {
  return kPhiloxTape;
}

}  // namespace torchext
