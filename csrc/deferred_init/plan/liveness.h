#pragma once

// NOTE [Dead writes]
//
// A constructor writes what another one writes again: `Linear` draws its weight, and then `_init_weights` of the model
// does. A value is alive where somebody reads it: who asks for it, or an operator that is alive. An operator is alive
// where a value that it wrote is. The others are not run.
//
// Who writes part of a storage in place passes the rest on unchanged. So values are alive byte by byte, and some
// operators (`overwritesArgument()`) read none of the bytes that they write, because their other arguments alone tell
// the new ones: `normal_` does not, `add_` does. After `weight[:n].normal_()` and `weight[n:].zero_()` nobody can see
// what was drawn for `weight` before. The operator is given memory with arbitrary contents then.
//
// What does not run raises no errors, either: a real tensor that only a dead operator would read may have changed
// since. And it draws nothing, which the others do not notice, because each starts at its own place of the tape.

#include <cstddef>
#include <limits>
#include <vector>

#include "../graph/op_graph.h"

namespace torchext {

// A recorded value, and the place of the operator of a graph that writes it.
struct LiveValue {
  static constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();

  // Of a tensor argument, null if nobody reads what was recorded there, or nothing was.
  const StorageValue* value = nullptr;
  // `kNowhere` for a constant.
  std::size_t writer = kNowhere;

  bool hasWriter() const noexcept {
    return writer != kNowhere;
  }
};

// An operator that is run.
struct LiveOperator {
  const OpNode* node = nullptr;
  // Its index among the operators of the graph.
  std::size_t place = 0;
  // One for each tensor argument.
  std::vector<LiveValue> arguments;
  // One for each written storage: true if all of its bytes are alive. The others may have arbitrary contents.
  std::vector<bool> is_whole;
};

struct LiveGraph {
  // In the order in which they run: replay_order.h.
  std::vector<LiveOperator> operators;
  // The values that were asked for, or earlier ones of the same storages with the same bytes.
  std::vector<LiveValue> wanted;
  // Constants in place of values that have been computed before.
  std::vector<StorageValuePtr> computed;
};

// Something for each value that the operators of a graph write.
template <typename T>
class OfOutputs {
 public:
  explicit OfOutputs(const LiveGraph& graph) {
    all_.reserve(graph.operators.size());
    for (const LiveOperator& live : graph.operators) {
      all_.emplace_back(live.node->written().size());
    }
  }

  std::vector<T>& of(std::size_t place) {
    return all_[place];
  }
  const std::vector<T>& of(std::size_t place) const {
    return all_[place];
  }
  T& of(const LiveValue& value) {
    return all_[value.writer][value.value->output()];
  }
  const T& of(const LiveValue& value) const {
    return all_[value.writer][value.value->output()];
  }

 private:
  std::vector<std::vector<T>> all_;
};

// Returns what has to run for `wanted`: from the beginning, or from values that have been computed before. Takes a time
// of the order of the number of operators that lead to them, but more where many operators each overwrite a part of a
// storage (`byte_set.h`). The caller holds the lock `kReplay` for as long as it uses the graph.
LiveGraph liveGraph(const std::vector<StorageValuePtr>& wanted, bool uses_computed = false);

}  // namespace torchext
