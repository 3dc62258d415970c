#pragma once

#include <vector>

#include "../../../libraries/support/byte_set.h"
#include "../graph/op_graph.h"

namespace torchext {

// The effect of a call on the bytes of the storage that one of its tensor arguments shows. If the exact set is unknown,
// `reads` and `writes` are too large and `overwrites` is too small, which is safe.
struct Footprint {
  // At least the bytes that the call reads.
  ByteSet reads;
  // At least the bytes that it may change.
  ByteSet writes;
  // At most the bytes that it overwrites, regardless of their previous contents.
  ByteSet overwrites;
};

// Returns one footprint for each of `node.tensors()`, empty for those that show no recorded value.
std::vector<Footprint> footprintsOf(const OpNode& node);

// Returns all bytes of a value. Never empty, so that storages without bytes can be alive.
ByteSet wholeOf(const StorageValue& value);

}  // namespace torchext
