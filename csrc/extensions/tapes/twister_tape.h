#pragma once

// The tape of MT19937, the generator of the CPU: a sequence of 32-bit draws. The engine can be moved along it without
// drawing (libraries/fills/mt19937.h).

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "../../core/deferred_init/random/tape.h"

namespace torchext {

// The second values of Box-Muller pairs, which `at::normal_distribution` keeps in a generator for its next call.
struct KeptNormals {
  std::optional<float> of_float;
  std::optional<double> of_double;
};

// Puts the engine of a generator into a state. The caller holds the generator's mutex.
void setEngine(at::CPUGeneratorImpl& impl, const at::mt19937_data_pod& data);

// A place to start from, `draws` 32-bit draws after the beginning of a tape. Every few marks keep the generator's
// state, which takes 2.5 KB. From there the others are reached over the distances between them. advance()
// has computed most of these before.
class TapeMark {
 public:
  // The beginning of a new tape.
  explicit TapeMark(const at::mt19937_data_pod& engine);
  TapeMark(std::shared_ptr<const TapeMark> before, std::uint64_t draws, const at::mt19937_data_pod& engine);

  // The number of the tape, from 1.
  std::uint64_t tape() const noexcept {
    return tape_;
  }
  std::uint64_t draws() const noexcept {
    return draws_;
  }

  at::mt19937_data_pod engine() const;

  // Returns the state that was kept last.
  const at::mt19937_data_pod& keptEngine() const noexcept {
    return engine_ != nullptr ? *engine_ : before_->keptEngine();
  }

 private:
  std::uint64_t tape_;
  std::uint64_t draws_;
  std::uint32_t number_ = 0;
  // One of these is set.
  std::unique_ptr<const at::mt19937_data_pod> engine_;
  std::shared_ptr<const TapeMark> before_;
};

// The position `draws()` 32-bit draws after the beginning of a tape, with `kept()` in the generator.
class TwisterPosition final : public TapePosition {
 public:
  TwisterPosition(std::shared_ptr<const TapeMark> mark, std::uint64_t draws, const KeptNormals& kept);

  // The last mark before the position. Nearby positions share one.
  const TapeMark& mark() const noexcept {
    return *mark_;
  }

  const KeptNormals& kept() const noexcept {
    return kept_;
  }

  std::uint64_t draws() const noexcept override {
    return draws_;
  }

  void place(at::Generator generator) const override;
  std::string identity(TapeReader& reader) const override;

 private:
  std::shared_ptr<const TapeMark> mark_;
  std::uint64_t draws_;
  KeptNormals kept_;
};

// Returns `position` as a position of MT19937, or null if it is on another tape.
const TwisterPosition* asTwister(const TapePositionPtr& position);

// Moves `generator`, a CPU generator, as `draws` calls of `random()` would. Returns its previous position.
TapePositionPtr takeDraws(at::Generator generator, std::uint64_t draws);

// Moves `generator` as `count` calls of `at::normal_distribution<double>` would, including the value that it keeps.
// Returns its previous position.
TapePositionPtr takeNormals(at::Generator generator, std::uint64_t count);

const Tape& twisterTape();

}  // namespace torchext
