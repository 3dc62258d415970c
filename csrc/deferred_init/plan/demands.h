#pragma once

#include <optional>
#include <vector>

#include "grid.h"
#include "liveness.h"
#include "part_rules.h"

namespace torchext {

// NOTE [Demand by parts]
//
// Which parts of each value are needed: NOTE [Parts of storages]. A shard is a tensor that reads a part of another one,
// as `weight[:n].clone()` does, so the operators themselves say what is asked for, and of the shard that is everything.
// Readers are asked before writers (`DemandPass`). An operator that can be run for a part asks for what it reads for
// that; any other asks for all that it reads, and for so much around it that the tensors keep their strides. What
// writes into a storage asks for the rest of the part as it was before, so that all values of a storage that follow
// each other have the same parts, or larger ones.
//
// Parts that lie near each other become one, those that lie apart are computed each for itself. Where most of a value
// is asked for, the whole is.
//
// Liveness knows bytes, and demands know boxes, because they answer different questions. Whether a write is dead has to
// be told exactly, for any tensor; a byte too many would run what draws from nowhere. What is computed may be more than
// is asked for, but has to be a piece of memory that kernels can take.

// The parts of a value that are needed, where that is not all of it.
struct RequestedParts {
  std::vector<Box> boxes;
  // Where the storage was recorded.
  c10::Device device;
};

// What is asked for of one operator.
struct Demand {
  // How it can be run for a part.
  PartRule rule = PartRule::kNone;
  // Of each value that it writes, nothing if that is all of it. There may be no parts.
  std::vector<std::optional<RequestedParts>> outputs;

  // Returns true if no part is needed.
  bool isNothing() const;
};

// Takes a time of the order of the number of operators, and of the boxes of each. The caller holds the lock `kReplay`.
// Returns one for each operator of `graph`. Of the values that it wants everything is asked for.
std::vector<Demand> demandsOf(const LiveGraph& graph);

}  // namespace torchext
