#pragma once

#include <optional>
#include <vector>

#include "grid.h"
#include "liveness.h"
#include "part_rules.h"

namespace torchext {

// NOTE [Demand by parts]
//
// Determines the needed parts of each value: NOTE [Parts of storages]. A shard is a tensor that reads a part of another
// one, as in `weight[:n].clone()`, so the operators themselves express the demand: all of the shard.
//
// `DemandPass` visits readers before writers. An operator that can run for a part demands only the elements that it
// reads for that part. Any other operator demands all that it reads, plus enough around it that the tensors keep their
// strides. An operator that writes into a storage demands the rest of the part from the value before. So consecutive
// values of a storage have the same parts, or larger ones.
//
// Parts that are close to each other are merged; distant ones are computed separately. If most of a value is needed,
// all of it is computed.
//
// Liveness works on bytes and demands on boxes, because the requirements differ. Whether a write is dead must be exact
// for any tensor: with one byte too many, an operator might run that has no generator to draw from. The computed part
// may be larger than the demand, but it must be memory that kernels can take.

// The needed parts of a value, if that is not all of it.
struct RequestedParts {
  std::vector<Box> boxes;
  // The device of the storage when it was recorded.
  c10::Device device;
};

// The demand on one operator.
struct Demand {
  // How the operator can be run for a part.
  PartRule rule = PartRule::kNone;
  // For each value that it writes: the needed parts, which may be none, or nothing if all of it is needed.
  std::vector<std::optional<RequestedParts>> outputs;

  // Returns true if no part is needed.
  bool isNothing() const;
};

// Returns one demand for each operator of `graph`. The wanted values are needed completely. Takes time linear in the
// number of operators, and in the number of boxes of each. The caller holds the lock `kReplay`.
std::vector<Demand> demandsOf(const LiveGraph& graph);

}  // namespace torchext
