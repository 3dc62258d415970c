#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "demands.h"
#include "elementwise_steps.h"
#include "liveness.h"
#include "op_graph.h"
#include "value_parts.h"

namespace torchext {

// Called when a value has been computed, with its size, by those who want to know.
using Progress = c10::function_ref<void(std::size_t nbytes)>;
inline void nobodyAsks(std::size_t /*nbytes*/) {}

// What a replay does with values that other replays need, too: NOTE [Computed values].
enum class Memory : std::uint8_t {
  kNone,      // runs all operators
  kUses,      // begins with values that are remembered
  kRemembers  // and remembers those that it computes
};

// Computes recorded values: NOTE [The graph of recorded operators]. One instance computes one set of values, once.
//
// Nothing outside changes while it runs: not the graph, not a fake tensor, not a generator of the CPU. (A generator of
// another device is drawn from as it stands: NOTE [The tape of a generator].) An error leaves everything as it was. A
// buffer is freed after the last operator that needs it, and operators that have nothing to do with each other do not
// come in between, so that memory holds the wanted values and what the operators at hand work on.
class Replay {
 public:
  // Calls `on_value` once for each wanted value that has been computed.
  explicit Replay(const std::vector<StorageValuePtr>& wanted,
                  Progress on_value = nobodyAsks,
                  Memory memory = Memory::kNone);

  // Raises what `run()` would raise, as far as that can be told without computing anything.
  void check() const;

  // Returns the storages with the wanted values, in order. Nothing else refers to them. No value may be wanted twice.
  std::vector<c10::Storage> run();

  // Computes what `run()` computes and keeps none of it, so that memory holds only what the operators at hand work on.
  // Calls `on_operator` for each operator, with the seconds that it took.
  void runAndDrop(c10::function_ref<void(const LiveOperator& live, double seconds)> on_operator);

  const LiveGraph& graph() const noexcept {
    return graph_;
  }

 private:
  // What there is of one value, while somebody needs it: those parts that somebody asks for (NOTE [Demand by parts]).
  struct Buffer {
    Parts parts;
    // Arguments of planned operators that have yet to read it, plus one if it is wanted.
    std::size_t pending_reads = 0;
    bool is_wanted = false;
    // The bytes that are not alive have arbitrary contents, if there are any: NOTE [Dead writes].
    bool is_whole = false;
    // The place of the last of these operators: the only one, where `pending_reads` is 1 and it is not wanted.
    std::optional<std::size_t> reader;
    // Set if it is to be remembered.
    const StorageValue* remembered = nullptr;
  };

  // An operator of the plan that is run on each stretch of a fill, and its place.
  struct Fused {
    std::size_t place;
    ElementwiseStep step;
    c10::Storage source;
    c10::Storage result;
  };

  void runAll(c10::function_ref<void(std::size_t place)> run_one);
  void begin(const std::vector<std::size_t>& places);
  Buffer& bufferOf(const StorageValue& value);
  Parts partsOf(const StorageValue& value);

  void runNext(std::size_t place);
  std::vector<Fused> stepsAfter(std::size_t place);
  void call(const OpNode& node, torch::jit::Stack& stack);
  bool fillWithSteps(const OpNode& fill, torch::jit::Stack& stack, std::vector<Fused>& fused);
  void keepFused(const std::vector<Fused>& fused);
  void runOnce(std::size_t place);
  bool takesOver(const LiveOperator& live);
  bool readsParts(const LiveOperator& live);
  void runForParts(const LiveOperator& live);
  void computePartOf(const LiveOperator& live, const Part& part);

  std::vector<at::Tensor> makeArguments(const LiveOperator& live, const std::vector<Parts>& writable);
  at::Tensor makeArgument(const LiveOperator& live,
                          std::size_t index,
                          const IndexRanges* ranges,
                          const std::vector<Parts>& writable);
  at::Tensor seenBy(const OpNode& reader,
                    const Parts& parts,
                    const TensorArgument& argument,
                    const Geometry& geometry,
                    bool is_written) const;

  // For each storage that an operator writes, what its next value is written into.
  std::vector<Parts> writableParts(const LiveOperator& live);
  Parts writablePartsOf(const LiveOperator& live, std::size_t output);
  Parts freshParts(const OpNode& node, std::size_t output) const;

  void keepWritten(const OpNode& node,
                   const std::vector<at::Tensor>& arguments,
                   const torch::jit::Stack& results,
                   const std::vector<Parts>& writable);
  void finishReads(const LiveOperator& live);

  bool isToBeRemembered(const StorageValue& value) const;
  void rememberWanted(const std::vector<c10::Storage>& storages) const;
  static void rememberRead(const Buffer& buffer);

  void reportWanted(const OpNode* node);
  void dropWanted(const LiveOperator& live);

  // Keep the graph alive.
  std::vector<StorageValuePtr> wanted_;
  LiveGraph graph_;
  Demands demands_;
  Progress on_value_;
  const Memory memory_;
  // The wanted values that an operator of the plan writes, and constants for null.
  std::unordered_map<const OpNode*, std::vector<const StorageValue*>> wanted_of_node_;
  // For which of them `on_value_` has been called.
  std::unordered_set<const OpNode*> reported_;
  // Which operators of the plan have been run together with one before.
  std::vector<bool> is_done_;
  // For each operator of the plan, what it writes.
  std::unordered_map<const OpNode*, std::vector<Buffer>> buffers_;
  TapeReader tape_;
};

}  // namespace torchext
