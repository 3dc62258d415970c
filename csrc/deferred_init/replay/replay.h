#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "../graph/op_graph.h"
#include "../plan/replay_plan.h"
#include "../random/tape.h"
#include "value_parts.h"

namespace torchext {

// Called when a value has been computed, with its size, by those who want to know.
using Progress = c10::function_ref<void(std::size_t nbytes)>;
inline void nobodyAsks(std::size_t /*nbytes*/) {}

// Runs a plan: NOTE [The plan of a replay]. One instance computes one set of values, once.
//
// Nothing outside changes while it runs: not the graph, not a fake tensor, not a generator. An error leaves everything
// as it was. A buffer is freed after the last operator that needs it, and operators that have nothing to do with each
// other do not come in between, so that memory holds the wanted values and what the operators at hand work on.
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
  void runAndDrop(c10::function_ref<void(const PlannedOperator& planned, double seconds)> on_operator);

  const ReplayPlan& plan() const noexcept {
    return plan_;
  }

 private:
  void runAll(c10::function_ref<void(std::size_t place)> run_one);
  std::size_t beginAgainWithoutParts(std::size_t place);

  void runNext(const PlannedOperator& planned);
  void call(const OpNode& node, torch::jit::Stack& stack);
  bool fillWithSteps(const PlannedOperator& planned, torch::jit::Stack& stack);
  void runOnce(const PlannedOperator& planned);
  bool takeOver(const PlannedOperator& planned);
  bool readsParts(const PlannedOperator& planned) const;
  void runForParts(const PlannedOperator& planned);
  void computePartOf(const PlannedOperator& planned, const Part& part);

  std::vector<at::Tensor> makeArguments(const PlannedOperator& planned, const std::vector<Parts>& writable);
  at::Tensor makeArgument(const PlannedOperator& planned,
                          std::size_t index,
                          const IndexRanges* ranges,
                          const std::vector<Parts>& writable);

  // For each storage that an operator writes, what its next value is written into.
  std::vector<Parts> writableParts(const PlannedOperator& planned);
  Parts writablePartsOf(const PlannedOperator& planned, std::size_t output);
  Parts partsOf(const LiveValue& value) const;

  void keepWritten(const PlannedOperator& planned,
                   const std::vector<at::Tensor>& arguments,
                   const torch::jit::Stack& results,
                   const std::vector<Parts>& writable);
  void finish(const PlannedOperator& planned);
  void remember(const LiveValue& value);
  void rememberWanted(const std::vector<c10::Storage>& storages) const;
  void reportWanted(std::size_t writer);

  ReplayPlan plan_;
  Progress on_value_;
  const Memory memory_;
  // The parts of each value that are computed and still needed: NOTE [Demand by parts].
  OfOutputs<Parts> parts_;
  // Which operators have been run, maybe together with one before.
  std::vector<bool> is_done_;
  // Of which operators `on_value_` has been told.
  std::vector<bool> is_reported_;
  // Wanted values are dropped, too.
  bool drops_wanted_ = false;
  TapeReader tape_;
};

// Computes `values` into storages that nobody else refers to. With `keep_small`, what is small is kept in the graph
// too, so that a constructor that reads values again and again does not compute them again and again; then the caller
// must not write into the storages.
std::vector<c10::Storage> computeValues(const std::vector<StorageValuePtr>& values,
                                        bool keep_small,
                                        Memory memory = Memory::kUses);

// A real tensor that shows what `deferred` shows, computed to be read once.
at::Tensor computeTensor(const at::Tensor& deferred);

}  // namespace torchext
