// Other ways to read the CPU generator. test/deferred_init/random/test_tapes.py compiles this file.

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "core/deferred_init/random/tape.h"

namespace {

using torchext::PrivateGenerators;
using torchext::Tape;
using torchext::TapePosition;
using torchext::TapePositionPtr;
using torchext::TapeReader;

// A kind of generators that this file adds to torchext: its positions hold the whole state. Operators are run to
// advance it.
class StateTape final : public Tape {
 public:
  std::shared_ptr<TapePosition> positionOf(at::Generator generator) const override;

  TapePositionPtr takeDrawsOf(const c10::OperatorHandle& /*op*/,
                              const torch::jit::Stack& /*stack*/,
                              const at::Generator& /*generator*/) const override {
    return nullptr;
  }

  std::unique_ptr<PrivateGenerators> makeGenerators() const override;
};

const StateTape kStateTape;
int positions = 0;

class StatePosition final : public TapePosition {
 public:
  explicit StatePosition(at::Generator generator)
      : TapePosition{kStateTape, generator.device()}, state_{generator.get_state()}, number_{positions++} {}

  std::uint64_t draws() const noexcept override {
    return static_cast<std::uint64_t>(number_);
  }

  void place(at::Generator generator) const override {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state_);
  }

  std::string identity(TapeReader& /*reader*/) const override {
    return {static_cast<const char*>(state_.const_data_ptr()), state_.nbytes()};
  }

 private:
  at::Tensor state_;
  int number_;
};

class OneGenerator final : public PrivateGenerators {
 public:
  const at::Generator& moveTo(const TapePosition& position, bool /*draws*/) override {
    if (!generator_.defined()) {
      generator_ = torchext::defaultGenerator(position.device()).clone();
    }
    position.place(generator_);
    return generator_;
  }

 private:
  at::Generator generator_;
};

std::shared_ptr<TapePosition> StateTape::positionOf(at::Generator generator) const {
  const std::lock_guard lock(generator.mutex());
  return std::make_shared<StatePosition>(std::move(generator));
}

std::unique_ptr<PrivateGenerators> StateTape::makeGenerators() const {
  return std::make_unique<OneGenerator>();
}

const Tape& ownTape() {
  static const Tape& tape = torchext::tapeOf(c10::kCPU);
  return tape;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void read_as_usual() {
  torchext::setTape(c10::kCPU, ownTape());
}

EXPORTED void read_copies() {
  ownTape();
  torchext::setTape(c10::kCPU, torchext::copiedTape());
}

EXPORTED void read_states() {
  ownTape();
  torchext::setTape(c10::kCPU, kStateTape);
}

EXPORTED int positions_noted() {
  return positions;
}
