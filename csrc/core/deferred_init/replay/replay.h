#pragma once

#include <vector>

#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "../graph/op_graph.h"
#include "../plan/replay_plan.h"
#include "../random/tape.h"

namespace torchext {

// A callback that receives the size of each computed value.
using Progress = c10::function_ref<void(std::size_t nbytes)>;
inline void ignoreProgress(std::size_t /*nbytes*/) {}

// Runs a plan: NOTE [The plan of a replay]. One instance computes one set of values, once.
//
// No value and no fake tensor changes while it runs. The default generator moves temporarily for operators that take no
// generator, and computed values may be cached. An error leaves everything unchanged. A buffer is freed after the last
// operator that needs it. Independent operators do not run in between, so memory holds the wanted values and the data
// of the current operators.
class TORCHEXT_API Replay {
 public:
  // Calls `on_value` once for each wanted value, when it has been computed.
  explicit Replay(const std::vector<StorageValuePtr>& wanted,
                  Progress on_value = ignoreProgress,
                  CacheUse cache = CacheUse::kNone);

  // Raises the errors of `run()` that can be detected without computing anything.
  void check() const;

  // Returns the storages with the wanted values, in order. They have no other references. The values must differ.
  std::vector<c10::Storage> run();

  // Computes what `run()` computes and keeps nothing, so memory holds only the data of the current operators. Returns
  // the seconds that each operator took.
  std::vector<double> runAndDrop();

  const ReplayPlan& plan() const noexcept {
    return plan_;
  }

 private:
  void runAll(c10::function_ref<void(std::size_t place)> run_one);
  std::size_t restartWithoutParts(std::size_t place);

  void runNext(const PlannedOperator& planned);
  void call(const OpNode& node, torch::jit::Stack& stack);
  bool fillWithSteps(const PlannedOperator& planned, torch::jit::Stack& stack);
  void runOnce(const PlannedOperator& planned);
  bool takeOver(const PlannedOperator& planned);
  void runForParts(const PlannedOperator& planned);

  std::vector<at::Tensor> makeArguments(const PlannedOperator& planned, const std::vector<ValueMemory>& writable);
  at::Tensor makeArgument(const PlannedOperator& planned, std::size_t index, const std::vector<ValueMemory>& writable);
  at::Tensor readTensor(const PlannedOperator& planned, std::size_t index, const Geometry& geometry) const;

  // Returns the memory for the next value of each storage that an operator writes.
  std::vector<ValueMemory> writableMemory(const PlannedOperator& planned);
  ValueMemory writableMemoryOf(const PlannedOperator& planned, std::size_t output);
  ValueMemory memoryOf(const LiveValue& value) const;

  void storeOutputs(const PlannedOperator& planned,
                    const std::vector<at::Tensor>& arguments,
                    const torch::jit::Stack& results,
                    const std::vector<ValueMemory>& writable);
  void finish(const PlannedOperator& planned);
  void cacheValue(const LiveValue& value);
  void cacheWanted(const std::vector<c10::Storage>& storages) const;
  void reportWanted(std::size_t writer);

  ReplayPlan plan_;
  Progress on_value_;
  const CacheUse cache_;
  // The values that are computed and still needed.
  PerOutput<ValueMemory> memory_;
  // True for operators that have run, maybe together with an earlier one.
  std::vector<bool> is_done_;
  // True for operators whose outputs were reported to `on_value_`.
  std::vector<bool> is_reported_;
  // True if wanted values are dropped as well.
  bool drops_wanted_ = false;
  TapeReader tape_;
};

// Returns true if all devices of `plan` exist, and it reads no fakes without a recorded value.
bool canRun(const ReplayPlan& plan);

// Computes `values` into storages without other references. With `keep_small`, small values are also folded into the
// graph, so that a constructor that reads values repeatedly does not compute them repeatedly. Then the caller must not
// write into the storages.
std::vector<c10::Storage> computeValues(const std::vector<StorageValuePtr>& values,
                                        bool keep_small,
                                        CacheUse cache = CacheUse::kReads);

// Returns a real tensor with the value of `deferred`, computed for a single read.
at::Tensor computeTensor(const at::Tensor& deferred);

}  // namespace torchext
