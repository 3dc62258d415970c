#pragma once

// NOTE [Dead writes]
//
// Constructors overwrite each other's values: `Linear` draws its weight, and then the model's `_init_weights` draws it
// again. A value is alive if it is requested or a live operator reads it. An operator is alive if a value that it wrote
// is. Dead operators do not run.
//
// An operator that writes part of a storage in place keeps the rest unchanged. So values are alive byte by byte. Some
// operators (`overwritesArgument()`) read none of the bytes that they write, because their other arguments alone
// determine the new ones: `normal_` is one, `add_` is not. After `weight[:n].normal_()` and `weight[n:].zero_()`, the
// numbers drawn for `weight` before are unreachable. Then the operator gets memory with arbitrary contents.
//
// Dead operators raise no errors: a real tensor that only a dead operator would read may have changed since. They also
// draw no random numbers, which does not affect the others, because each operator starts at its own position of the
// tape.

#include <cstddef>
#include <limits>
#include <vector>

#include "../graph/op_graph.h"

namespace torchext {

// A recorded value, and the place of its writer in the graph.
struct LiveValue {
  static constexpr std::size_t kNowhere = std::numeric_limits<std::size_t>::max();

  // For a tensor argument: null if the recorded contents are not read, or nothing was recorded.
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
  // For each written storage: true if all of its bytes are alive. Dead bytes may have arbitrary contents.
  std::vector<bool> is_whole;
};

struct LiveGraph {
  // In the order in which they run: `keepDerivationsTogether()`.
  std::vector<LiveOperator> operators;
  // The requested values, or earlier values of the same storages with the same bytes.
  std::vector<LiveValue> wanted;
  // Constants that replace values computed before.
  std::vector<StorageValuePtr> computed;
};

// A `T` for each value that the operators of a graph write.
template <typename T>
class PerOutput {
 public:
  explicit PerOutput(const LiveGraph& graph) {
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

// Returns the operators that must run for `wanted`, starting from scratch or from values computed before. Takes time
// linear in the number of operators that lead to them, or more if many operators each overwrite a part of a storage
// (`byte_set.h`). The caller holds the lock `kReplay` for as long as it uses the graph.
LiveGraph liveGraph(const std::vector<StorageValuePtr>& wanted, bool uses_computed = false);

// Returns the places of all operators that are connected by reads with the one at `place`, including it, in order. If
// one of them reads without writing, they are consecutive. Takes time nearly linear in the number of reads.
std::vector<std::size_t> placesConnectedWith(const std::vector<LiveOperator>& operators, std::size_t place);

}  // namespace torchext
