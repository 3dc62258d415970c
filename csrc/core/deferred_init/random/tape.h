#pragma once

// NOTE [The tape of a generator]
//
// Eager construction draws from a generator as it goes. Deferred construction keeps no numbers. Yet each tensor must
// later get the bits that eager construction would have given it, in any order of materialization, and the generator
// must end where eager construction would have left it. So a generator is read as a tape. Recording a random operator
// notes its start position and moves the generator past the draws that it would take. Replaying it runs the operator
// with a private generator placed at that position, or moves the default generator there (`DefaultGeneratorAt`). Code
// that inspects the generator in the meantime (`torch.get_rng_state()`, `fork_rng()`, `manual_seed()`) finds the same
// state as in eager construction.
//
// The representation of a position depends on the kind of generator. By default, it is a copy of the generator, and
// operators must run to move it (`copiedTape()`). An extension has tapes for MT19937, the generator of the CPU, and
// for Philox, that of CUDA.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

#include "../../../libraries/support/locks.h"

namespace torchext {

class Tape;
class TapeReader;

// A position on a tape where an operator starts to draw. Immutable once it is shared.
class TapePosition {
 public:
  TapePosition(const Tape& tape, c10::Device device) : tape_{tape}, device_{device} {}
  C10_DISABLE_COPY_AND_ASSIGN(TapePosition);
  virtual ~TapePosition() = default;

  const Tape& tape() const noexcept {
    return tape_;
  }

  // The generator's device.
  c10::Device device() const noexcept {
    return device_;
  }

  // How far the operator that starts here moves the generator, if known.
  const std::optional<std::uint64_t>& length() const noexcept {
    return length_;
  }
  void setLength(std::uint64_t length) noexcept {
    length_ = length;
  }

  // The distance from the origin of this kind of tape, for display.
  virtual std::uint64_t draws() const noexcept = 0;

  // Moves `generator`, which must be of the same kind, to this position.
  virtual void place(at::Generator generator) const = 0;

  // Returns bytes that are equal, in any process, for positions from which the same numbers are drawn.
  virtual std::string identity(TapeReader& reader) const = 0;

  // Records how far an operator that started here has moved `generator`, if its state shows that.
  virtual void noteEnd(at::Generator /*generator*/) {}

  // Raises an error if `op`, which started here, has moved `generator` by another distance than was recorded.
  virtual void checkEnd(const c10::OperatorHandle& /*op*/, at::Generator /*generator*/) const {}

 private:
  const Tape& tape_;
  c10::Device device_;
  std::optional<std::uint64_t> length_;
};

using TapePositionPtr = std::shared_ptr<const TapePosition>;

// Private generators of one kind, to draw from.
class PrivateGenerators {
 public:
  PrivateGenerators() = default;
  C10_DISABLE_COPY_AND_ASSIGN(PrivateGenerators);
  virtual ~PrivateGenerators() = default;

  // Returns a generator placed at `position`, valid until the next call. `draws` is true if the operator that starts
  // there will draw from it.
  virtual const at::Generator& moveTo(const TapePosition& position, bool draws) = 0;
};

// A kind of generators. Stateless, so any thread may use it. Each function takes the mutex of the generator that it is
// given, and the recorder holds the lock `kDraws` while it moves one.
class TORCHEXT_API Tape {
 public:
  Tape() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Tape);
  virtual ~Tape() = default;

  // Returns the present position of `generator`.
  virtual std::shared_ptr<TapePosition> positionOf(at::Generator generator) const = 0;

  // Moves `generator` as `op` would if it ran with the arguments on top of `stack`, which may include fake tensors.
  // Returns the previous position. Does nothing and returns null if only running the operator shows how far it moves.
  virtual TapePositionPtr takeDrawsOf(const c10::OperatorHandle& op,
                                      const torch::jit::Stack& stack,
                                      const at::Generator& generator) const = 0;

  virtual std::unique_ptr<PrivateGenerators> makeGenerators() const = 0;
};

// The kind of generators of a device: copies, unless another is set. Set it while the library is loaded.
TORCHEXT_API void setTape(c10::DeviceType device, const Tape& tape);
TORCHEXT_API const Tape& tapeOf(c10::DeviceType device);

// The kind of generators of unknown types: its positions are copies of their state. Moving one means running the
// operators.
TORCHEXT_API const Tape& copiedTape();

// Returns the default generator of `device`. Undefined if the device has no generator: the meta device, and devices
// that PyTorch was built without.
TORCHEXT_API at::Generator defaultGenerator(c10::Device device);

// Reads tapes of all kinds.
class TORCHEXT_API TapeReader {
 public:
  // Returns a private generator placed at `position`, for the operator that starts there, valid until the next call.
  const at::Generator& moveTo(const TapePosition& position) {
    return generatorsOf(position.tape()).moveTo(position, /*draws=*/true);
  }

  // The same, for reading the generator's state without drawing.
  const at::Generator& placedAt(const TapePosition& position) {
    return generatorsOf(position.tape()).moveTo(position, /*draws=*/false);
  }

 private:
  PrivateGenerators& generatorsOf(const Tape& tape);

  std::unordered_map<const Tape*, std::unique_ptr<PrivateGenerators>> generators_;
};

// While it lives, the default generator of a position's device stands at this position, for operators that take no
// generator. Restores the generator. No other thread records draws in the meantime. Real draws by other threads are
// lost, so operators that take a generator get a private one instead.
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

// Calls `op` with the arguments on `stack`, with `generator` in place of its generator, or computes the call by the
// hook `replay_fill`.
TORCHEXT_API void callWithGenerator(const c10::OperatorHandle& op,
                                    torch::jit::Stack& stack,
                                    const at::Generator& generator);

}  // namespace torchext
