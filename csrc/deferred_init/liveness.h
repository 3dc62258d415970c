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
// since. And it draws nothing, which the others do not notice, because each starts at its own place of the tape. A
// generator of another device has no tape: what draws from one runs as long as a later value of its storage is alive.

#include <unordered_map>
#include <vector>

#include "op_graph.h"

namespace torchext {

// What an operator that is run takes of one of its tensor arguments.
struct LiveArgument {
  // Null if nobody reads what was recorded there, or nothing was.
  const StorageValue* value = nullptr;
};

struct LiveOperator {
  const OpNode* node = nullptr;
  // One for each tensor argument.
  std::vector<LiveArgument> arguments;
  // One for each written storage: true if all of its bytes are alive. The others may have arbitrary contents.
  std::vector<bool> is_whole;
};

struct LiveGraph {
  // In the order of their recording.
  std::vector<LiveOperator> operators;
  // The values that were asked for, or earlier ones of the same storages with the same bytes.
  std::vector<const StorageValue*> wanted;
  // Constants in place of values that have been computed before.
  std::vector<StorageValuePtr> computed;
};

// Returns what has to run for `wanted`: from the beginning, or from values that have been computed before.
LiveGraph liveGraph(const std::vector<StorageValuePtr>& wanted, bool uses_computed = false);

// Returns true if both are the same output of the same operator, or the same constant.
bool isSameValue(const StorageValue& a, const StorageValue& b);

}  // namespace torchext
