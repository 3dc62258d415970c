#pragma once

// NOTE [The plan of a replay]
//
// A plan has all that follows from a recording without values: which operators run (NOTE [Dead writes]), in which order
// (replay_order.h), for which parts (NOTE [Demand by parts]), into what memory, which of them are run together, and
// after which operator each value is dropped. `Replay` runs it; predictions of memory and time sum it up.
//
// Three things become known during the run only, and make it do more than is planned:
//
//   * A kernel keeps the memory that it returns, or returns more than its Meta kernel promised. Then what was to be
//     taken over is copied.
//   * A random fill has no kernel of ours for this processor. Then its steps are run one after the other.
//   * Parts contain NaNs, whose bits may differ from those of the whole. Then `withoutParts()` is run.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "demands.h"
#include "liveness.h"

namespace torchext {

// How an operator is run.
enum class Way : std::uint8_t {
  kNotAtAll,   // no part of what it writes is needed
  kCall,       // once, as it was recorded
  kParts,      // for each part that is needed: NOTE [Operators that are run for a part]
  kTakesOver,  // it copies a value that has no other reader, so the copy is that memory
  kStep,       // on each stretch of a random fill, while that is in the cache: elementwise_steps.h
};

// Where the memory comes from that holds a value that an operator writes.
enum class Origin : std::uint8_t {
  kResult,     // the kernel makes it
  kNew,        // it is new, and nothing of it is read
  kCopy,       // it is a copy of what an argument shows, which is read again
  kInPlace,    // it is that of an argument, which is not read again
  kResized,    // the kernel resizes that of an argument
  kTakenOver,  // it is that of the argument that is copied
};

struct PlannedValue {
  Origin origin = Origin::kResult;
  // The argument that this memory is of, or is copied from.
  std::optional<std::size_t> argument;
  // The parts that are computed, or nothing if all is.
  std::optional<RequestedParts> parts;
  // What memory holds of it.
  std::size_t nbytes = 0;
  // False if the bytes that are not alive have arbitrary contents.
  bool is_whole = true;
  bool is_wanted = false;
  // To be kept for other replays: NOTE [Computed values].
  bool is_remembered = false;
  // How many arguments of operators of the plan read it.
  std::size_t reads = 0;
  // The last operator that needs it: which reads it or, if none does, which writes it.
  std::size_t last_use = 0;
  // A recorded value that is this one. Null if it is neither read nor wanted.
  const StorageValue* value = nullptr;

  // Returns true if its memory is that of an argument, as it is.
  bool isTaken() const noexcept {
    return origin == Origin::kInPlace || origin == Origin::kTakenOver;
  }

  // Returns true if it is needed after all operators have run.
  bool isKept() const noexcept {
    return is_wanted || is_remembered;
  }
};

struct PlannedOperator {
  const OpNode* node = nullptr;
  std::size_t place = 0;
  Way way = Way::kCall;
  PartRule rule = PartRule::kNone;
  // One for each tensor argument.
  std::vector<LiveValue> reads;
  // One for each written storage.
  std::vector<PlannedValue> writes;
  // Of a random fill, the places of the operators that are run on each stretch of it, in order.
  std::vector<std::size_t> steps;
  // The values that no operator needs after it. Some may be wanted.
  std::vector<LiveValue> last_uses;

  // How much of what it writes it computes, from 0 to 1.
  double share() const;
};

// What a replay does with values that other replays need, too: NOTE [Computed values].
enum class Memory : std::uint8_t {
  kNone,      // runs all operators
  kUses,      // begins with values that are remembered
  kRemembers  // and remembers those that it computes
};

// Immutable. Keeps what it plans alive. To be made, used and dropped with the lock `kReplay`.
class ReplayPlan {
 public:
  // Takes the time of `liveGraph()`, and a few hundred nanoseconds for each operator.
  explicit ReplayPlan(std::vector<StorageValuePtr> wanted, Memory memory = Memory::kNone);

  // In the order in which they run.
  const std::vector<PlannedOperator>& operators() const noexcept {
    return operators_;
  }

  const LiveGraph& graph() const noexcept {
    return graph_;
  }

  // What was asked for, in order.
  const std::vector<LiveValue>& wanted() const noexcept {
    return graph_.wanted;
  }

  const PlannedValue& of(const LiveValue& value) const {
    return operators_[value.writer].writes[value.value->output()];
  }

  // The operators that are connected with the one at `place` by what they read, itself included, in order.
  std::vector<std::size_t> connectedWith(std::size_t place) const;

  // A plan in which those of them that are run for parts are run as they were recorded. Everything else is the same.
  ReplayPlan withoutParts(std::size_t place) const;

  // The most memory that is held at one time, in bytes, with the wanted values. What an operator allocates inside of
  // its kernel is estimated: see workspaceOf().
  std::size_t peak() const;

  // The same of the host's memory alone.
  std::size_t peakOnCpu() const;

  // What all operators write, in bytes, which is about proportional to the time.
  std::size_t written() const;

 private:
  void plan();
  void makeOperators();
  void countReads();
  void planWrites(PlannedOperator& planned);
  bool takesOver(const PlannedOperator& planned) const;
  bool canBeWrittenInPlace(const PlannedOperator& planned, const LiveValue& before, const PlannedValue& after) const;
  void planSteps(PlannedOperator& planned);
  std::size_t workspaceOf(const PlannedOperator& planned) const;
  template <typename IsCounted>
  std::size_t peakOf(const IsCounted& is_counted) const;

  std::vector<StorageValuePtr> asked_;
  Memory memory_;
  LiveGraph graph_;
  // Those that are run as they were recorded, by place.
  std::vector<bool> as_recorded_;
  std::vector<PlannedOperator> operators_;
};

// Returns true if a tensor shows `value`, so that it may be read once more, and it is not too large to be kept.
bool isToBeRemembered(const StorageValue& value);

// Raises an internal error for a plan that contradicts itself: reads beyond a storage, before a value is written or
// after it is dropped; parts that are read and not computed; memory that two values claim; a value that is dropped
// twice, or never. With the environment variable TORCHEXT_CHECK_PLANS=1, as in our tests, each plan is checked when it
// is made.
void checkPlan(const ReplayPlan& plan);

}  // namespace torchext
