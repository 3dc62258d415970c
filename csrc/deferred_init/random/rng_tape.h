#pragma once

// NOTE [The tape of a generator]
//
// Eager construction draws from a generator as it goes. Deferred construction draws nothing, yet each tensor must later
// get the bits that it would have got, in whatever order it is asked for, and the generator must be where eager
// construction would have left it. So a generator is read as a tape of 32-bit draws. Recording a random operator notes
// the position where it starts, and moves the generator past the draws that it would take; replaying it runs the
// operator with a private generator placed at that position. Nothing that looks at the generator meanwhile, be it
// `torch.get_rng_state()`, `fork_rng()` or `manual_seed()`, can tell the difference from eager construction.
//
// MT19937, the generator of the CPU, can be moved without drawing: fills/mt19937_jump.h. It is the only one that is
// read so. An operator that draws from another is recorded without a position, and its replay draws from that generator
// as it stands then.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace torchext {

// The second values of Box-Muller pairs, which `at::normal_distribution` leaves in a generator for its next call.
struct KeptNormals {
  std::optional<float> of_float;
  std::optional<double> of_double;
};

// A state that a generator has had, to start from: `draws` 32-bit draws after the beginning of a tape.
struct TapeMark {
  std::uint64_t tape = 0;  // the number of the tape, from 1
  std::uint64_t draws = 0;
  at::mt19937_data_pod engine{};
};

// A place on a tape: `draws` 32-bit draws after its beginning, with `kept` in the generator.
struct TapePosition {
  // The last one before it, which places share that lie near each other.
  std::shared_ptr<const TapeMark> mark;
  std::uint64_t draws = 0;
  KeptNormals kept;
  // How many draws the operator that starts here takes, if that is known without running it.
  std::optional<std::uint64_t> length;
};

// The position of `generator`, a CPU generator.
TapePosition tapePosition(at::Generator generator);

// Moves `generator` as `draws` calls of `random()` would. Returns its previous position.
TapePosition takeDraws(at::Generator generator, std::uint64_t draws);

// Moves `generator` as `count` calls of `at::normal_distribution<double>` would, the value that it keeps included.
// Returns its previous position.
TapePosition takeNormals(at::Generator generator, std::uint64_t count);

// Private generators that read tapes. Going on where an operator ended costs nothing, and there are a few of them,
// because what is drawn for one tensor comes from a few stretches: a constructor draws for each tensor in turn, and
// then `init_weights()` again for each.
class TapeReader {
 public:
  // Returns a generator that is placed at `position`, to be used until the next call.
  const at::Generator& moveTo(const TapePosition& position);

  // The same to read where the engine stands, and not to draw.
  const at::Generator& placedAt(TapePosition position) {
    position.length = 0;
    return moveTo(position);
  }

 private:
  struct Cursor {
    at::Generator generator;  // undefined until it is used
    // Where the engine of the generator stands; the tape is 0 when that is not known.
    std::uint64_t tape = 0;
    std::uint64_t draws = 0;
    std::uint64_t last_use = 0;
  };

  // Of the cursors between the mark of `position` and there the nearest, or null.
  Cursor* nearest(const TapePosition& position);
  Cursor& leastRecentlyUsed();

  std::array<Cursor, 4> cursors_;
  std::uint64_t uses_ = 0;
};

// While it lives, the default CPU generator stands at a position of a tape, for operators that take no generator.
// Restores the generator. Draws that other threads make from it meanwhile are lost, which is why operators that take a
// generator are given one of their own instead.
class DefaultGeneratorAt {
 public:
  explicit DefaultGeneratorAt(const TapePosition& position);
  C10_DISABLE_COPY_AND_ASSIGN(DefaultGeneratorAt);
  ~DefaultGeneratorAt();

 private:
  at::mt19937_data_pod previous_engine_;
  KeptNormals previous_kept_;
};

}  // namespace torchext
