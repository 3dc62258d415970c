#pragma once

// NOTE [The plan of a replay]
//
// A plan contains everything that follows from a recording without values: the operators that run (NOTE [Dead writes]),
// their order (liveness.h), their parts (NOTE [Demand by parts]), the memory that they write, the operators that
// run together, and the operator after which each value is dropped. `Replay` runs it; predictions of memory and time
// sum it up.
//
// Some conditions are found only during the run, and cause more work than planned:
//
//   * A kernel keeps a reference to the memory that it returns, or returns more than its Meta kernel promised. Then
//     memory that would have been taken over is copied.
//   * A kernel returns other strides than its Meta kernel, or a result on the memory of an argument. Then the result is
//     copied.
//   * Torchext has no kernel for a random fill on this processor. Then its steps run one after the other.
//   * Parts contain NaNs, whose bits may differ from those of the whole. Then the plan `withoutParts()` runs.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../../hooks/hooks.h"
#include "../graph/op_graph.h"
#include "liveness.h"

namespace torchext {

// Demands for parts of values. The core does not know what a part is: an extension determines the demands, and
// implements the classes below.

// The memory of the computed parts of a value.
class PartsMemory {
 public:
  PartsMemory() = default;
  C10_DISABLE_COPY_AND_ASSIGN(PartsMemory);
  virtual ~PartsMemory() = default;

  // Returns the tensor that `geometry` shows in the storage of the whole value, for a kernel with the rule `reader`. A
  // part must contain it, unless it has no elements. For a kernel without a rule, the tensor has the recorded strides
  // and alignment: it is a copy if necessary. Raises `PartsDiffer` if the kernel would write this copy.
  virtual at::Tensor tensorFor(PartRule reader, const Geometry& geometry, bool is_written) const = 0;

  // Returns the storage of the only part.
  virtual const c10::Storage& only() const = 0;
};

// The memory of a computed value: the whole storage, or parts of it. Neither for a value that is not computed.
struct ValueMemory {
  c10::Storage whole;
  std::shared_ptr<const PartsMemory> parts;

  const c10::Storage& only() const {
    return parts ? parts->only() : whole;
  }
};

// The needed parts of a value, if that is not all of it. Immutable.
class ValueParts {
 public:
  ValueParts() = default;
  C10_DISABLE_COPY_AND_ASSIGN(ValueParts);
  virtual ~ValueParts() = default;

  // Returns true if nothing is needed.
  virtual bool areNone() const noexcept = 0;
  // The bytes that they take in memory.
  virtual std::size_t nbytes() const = 0;
  // Returns true if each of them is one of `others`.
  virtual bool areAmong(const ValueParts& others) const = 0;
  // Returns true if they are one part, in whose memory the tensor `geometry` has the geometry `shown`.
  virtual bool areOnlyPart(const Geometry& geometry, const Geometry& shown) const = 0;

  // Returns memory for them: new memory, or the memory of the value `before`, or a copy of it.
  virtual std::shared_ptr<const PartsMemory> makeMemory() const = 0;
  virtual std::shared_ptr<const PartsMemory> inPlace(const ValueMemory& before) const = 0;
  virtual std::shared_ptr<const PartsMemory> copyOf(const ValueMemory& before) const = 0;
};

// Null for the whole value.
using NeededParts = std::shared_ptr<const ValueParts>;

// The demand on one operator.
struct Demand {
  // How the operator can be run for a part.
  PartRule rule = PartRule::kNone;
  // For each value that it writes.
  std::vector<NeededParts> outputs;
};

// Returns demands for whole values.
std::vector<Demand> wholeValues(const LiveGraph& graph);

// Returns true if calls with the rule can be run for a part.
constexpr bool isForParts(PartRule rule) {
  return rule != PartRule::kNone && rule != PartRule::kAnyLayout;
}

// Returns the geometry of the tensor that a call with such a rule writes: its only result, or an argument.
inline const Geometry& writtenGeometry(const OpNode& node) {
  return node.written().front().geometry();
}

// Raised if the bits of a part of a result would differ from those in the whole.
class PartsDiffer : public std::exception {};

// How an operator runs.
enum class Way : std::uint8_t {
  kNotAtAll,   // no part of its outputs is needed
  kCall,       // once, as recorded
  kParts,      // for each part that is needed: NOTE [Operators that compute parts]
  kTakesOver,  // a copy of a value without other readers: the copy is the same memory
  kStep,       // on each stretch of a random fill, while that is in the cache: part_calls.cpp
};

// The origin of the memory of a written value.
enum class Origin : std::uint8_t {
  kResult,     // made by the kernel
  kNew,        // new, with arbitrary contents
  kCopy,       // a copy of the argument's memory, which is read again
  kInPlace,    // the argument's memory, which is not read again
  kResized,    // the argument's memory, resized by the kernel
  kTakenOver,  // the memory of the copied argument
};

struct PlannedValue {
  Origin origin = Origin::kResult;
  // The argument that this memory belongs to, or is copied from.
  std::optional<std::size_t> argument;
  // The computed parts, or null if the whole value is computed.
  NeededParts parts;
  // The bytes that it takes in memory.
  std::size_t nbytes = 0;
  // False if its dead bytes have arbitrary contents.
  bool is_whole = true;
  bool is_wanted = false;
  // True if it is kept for other replays: NOTE [Computed values].
  bool is_cached = false;
  // The number of arguments of planned operators that read it.
  std::size_t reads = 0;
  // The last operator that needs it: its last reader, or its writer if it has no reader.
  std::size_t last_use = 0;
  // A recorded value that is equal to it. Null if it is neither read nor wanted.
  const StorageValue* value = nullptr;

  // Returns true if its memory is the unchanged memory of an argument.
  bool isTaken() const noexcept {
    return origin == Origin::kInPlace || origin == Origin::kTakenOver;
  }

  // Returns true if it is needed after all operators have run.
  bool isKept() const noexcept {
    return is_wanted || is_cached;
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
  // For a random fill: the places of the operators that run on each stretch of it, in order.
  std::vector<std::size_t> steps;
  // The values that no later operator needs. Some may be wanted.
  std::vector<LiveValue> last_uses;
};

// How a replay uses values that other replays also need: NOTE [Computed values].
enum class CacheUse : std::uint8_t {
  kNone,           // run all operators
  kReads,          // start from cached values
  kReadsAndWrites  // and cache the values that it computes
};

// Immutable. Keeps the planned graph alive. Make, use and drop it with the lock `kReplay` held.
class ReplayPlan {
 public:
  // Takes the time of `liveGraph()`, and a few hundred nanoseconds for each operator.
  explicit ReplayPlan(std::vector<StorageValuePtr> wanted, CacheUse cache = CacheUse::kNone);

  // The operators in execution order.
  const std::vector<PlannedOperator>& operators() const noexcept {
    return operators_;
  }

  const LiveGraph& graph() const noexcept {
    return graph_;
  }

  // The requested values, in order.
  const std::vector<LiveValue>& wanted() const noexcept {
    return graph_.wanted;
  }

  const PlannedValue& of(const LiveValue& value) const {
    return operators_[value.writer].writes[value.value->output()];
  }

  // Returns the same plan, except that those operators at `places` that run for parts run as recorded.
  ReplayPlan withoutParts(const std::vector<std::size_t>& places) const;

 private:
  void plan();
  void makeOperators();
  void countReads();
  void planWrites(PlannedOperator& planned);
  bool takesOver(const PlannedOperator& planned) const;
  bool canBeWrittenInPlace(const PlannedOperator& planned, const LiveValue& before, const PlannedValue& after) const;

  std::vector<StorageValuePtr> requested_;
  CacheUse cache_;
  LiveGraph graph_;
  // By place: true for operators that must run as recorded.
  std::vector<bool> as_recorded_;
  std::vector<PlannedOperator> operators_;
};

// Returns true if `value` may be read again, because a tensor shows it, and is small enough for the cache.
bool shouldCache(const StorageValue& value);

}  // namespace torchext
