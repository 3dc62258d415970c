#pragma once

#include <vector>

#include "../graph/op_graph.h"
#include "byte_set.h"

namespace torchext {

// What a call does to the bytes of the storage that one of its tensor arguments shows. Where that is not known exactly,
// each of the three errs so that nobody relies on a byte that is not there.
struct Footprint {
  // At least those that the call reads.
  ByteSet reads;
  // At least those that it may change.
  ByteSet writes;
  // At most those that it writes whatever was there before.
  ByteSet overwrites;
};

// Returns one for each of `node.tensors()`; of those that show no recorded value, an empty one.
std::vector<Footprint> footprintsOf(const OpNode& node);

// All bytes of a value. Not empty, so that storages without bytes are alive, too.
ByteSet wholeOf(const StorageValue& value);

}  // namespace torchext
