#pragma once

// NOTE [The tape of a generator]
//
// Eager construction draws from a generator as it goes. Deferred construction draws nothing, yet each tensor must later
// get the bits that it would have got, in whatever order it is asked for, and the generator must be where eager
// construction would have left it. So a generator is read as a tape. Recording a random operator notes the position
// where it starts, and moves the generator past the draws that it would take; replaying it runs the operator with a
// private generator placed at that position. Nothing that looks at the generator meanwhile, be it
// `torch.get_rng_state()`, `fork_rng()` or `manual_seed()`, can tell the difference from eager construction.
//
// How a position is noted depends on the kind of generator, and each kind has a file:
//
//   * `twister_tape.h`: MT19937, the generator of the CPU;
//   * `philox_tape.h`: Philox, the generator of CUDA;
//   * `copied_tape.h`: any other. A position is a copy of the generator, and to move it, operators are run.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

#include "../../support/locks.h"

namespace torchext {

class Tape;
class TapeReader;

// A place on a tape, where an operator starts to draw. Immutable once it is shared.
class TapePosition {
 public:
  TapePosition(const Tape& tape, c10::Device device) : tape_{tape}, device_{device} {}
  C10_DISABLE_COPY_AND_ASSIGN(TapePosition);
  virtual ~TapePosition() = default;

  const Tape& tape() const noexcept {
    return tape_;
  }

  // That of the generator.
  c10::Device device() const noexcept {
    return device_;
  }

  // How far the operator that starts here moves the generator, if that is known.
  const std::optional<std::uint64_t>& length() const noexcept {
    return length_;
  }
  void setLength(std::uint64_t length) noexcept {
    length_ = length;
  }

  // How far it is from where the kind of generator counts from, to be shown.
  virtual std::uint64_t draws() const noexcept = 0;

  // Moves `generator`, which is of the same kind, here.
  virtual void place(at::Generator generator) const = 0;

  // Bytes that are equal, in any process, for positions from which the same numbers are drawn.
  virtual std::string identity(TapeReader& reader) const = 0;

  // Notes how far an operator that started here has moved `generator`, if that can be told from it.
  virtual void noteEnd(at::Generator /*generator*/) {}

  // Raises an error if `op`, which started here, has moved `generator` otherwise than was recorded.
  virtual void checkEnd(const c10::OperatorHandle& /*op*/, at::Generator /*generator*/) const {}

 private:
  const Tape& tape_;
  c10::Device device_;
  std::optional<std::uint64_t> length_;
};

using TapePositionPtr = std::shared_ptr<const TapePosition>;

// Generators of our own of one kind, to draw from.
class PrivateGenerators {
 public:
  PrivateGenerators() = default;
  C10_DISABLE_COPY_AND_ASSIGN(PrivateGenerators);
  virtual ~PrivateGenerators() = default;

  // Returns one that is placed at `position`, to be used until the next call. `draws` says whether the operator that
  // starts there is going to draw from it.
  virtual const at::Generator& moveTo(const TapePosition& position, bool draws) = 0;
};

// A kind of generators. Stateless: for any thread. Each function takes the mutex of the generator that it is given, and
// the recorder holds the lock `kDraws` while it moves one.
class TORCHEXT_API Tape {
 public:
  Tape() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Tape);
  virtual ~Tape() = default;

  // Where `generator` stands.
  virtual std::shared_ptr<TapePosition> positionOf(at::Generator generator) const = 0;

  // Moves `generator` as `op` would if it ran with the arguments on top of `stack`, among which tensors may be fake.
  // Returns its previous position. Does nothing and returns null where only running the operator tells how far.
  virtual TapePositionPtr takeDrawsOf(const c10::OperatorHandle& op,
                                      const torch::jit::Stack& stack,
                                      const at::Generator& generator) const = 0;

  virtual std::unique_ptr<PrivateGenerators> makeGenerators() const = 0;
};

// The kind of generators of a device: copies, unless another has been set. To be set while the library is loaded.
TORCHEXT_API void setTape(c10::DeviceType device, const Tape& tape);
TORCHEXT_API const Tape& tapeOf(c10::DeviceType device);

// The generator of `device` that is drawn from by default. Undefined where nothing can be drawn: for meta tensors, and
// devices for which PyTorch has not been built.
TORCHEXT_API at::Generator defaultGenerator(c10::Device device);

// Reads tapes of all kinds.
class TORCHEXT_API TapeReader {
 public:
  // Returns a private generator that is placed at `position`, for the operator that starts there, to be used until the
  // next call.
  const at::Generator& moveTo(const TapePosition& position) {
    return generatorsOf(position.tape()).moveTo(position, /*draws=*/true);
  }

  // The same to read where the generator stands, and not to draw.
  const at::Generator& placedAt(const TapePosition& position) {
    return generatorsOf(position.tape()).moveTo(position, /*draws=*/false);
  }

 private:
  PrivateGenerators& generatorsOf(const Tape& tape);

  std::unordered_map<const Tape*, std::unique_ptr<PrivateGenerators>> generators_;
};

// While it lives, the default generator of a position's device stands there, for operators that take no generator.
// Restores the generator. No other thread records draws meanwhile; those that others make for real are lost, which is
// why operators that take a generator are given one of their own instead.
class DefaultGeneratorAt {
 public:
  explicit DefaultGeneratorAt(const TapePosition& position)
      : generator_{defaultGenerator(position.device())}, previous_{position.tape().positionOf(generator_)} {
    position.place(generator_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(DefaultGeneratorAt);
  ~DefaultGeneratorAt() {
    previous_->place(generator_);
  }

  const at::Generator& generator() const noexcept {
    return generator_;
  }

 private:
  Locked lock_{LockRank::kDraws};
  at::Generator generator_;
  TapePositionPtr previous_;
};

}  // namespace torchext
