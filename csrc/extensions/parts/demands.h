#pragma once

#include <vector>

#include "../../core/deferred_init/plan/liveness.h"
#include "../../core/deferred_init/plan/replay_plan.h"

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

// Returns one demand for each operator of `graph`. The wanted values are needed completely. Takes time linear in the
// number of operators, and in the number of boxes of each. The caller holds the lock `kReplay`.
std::vector<Demand> demandsByParts(const LiveGraph& graph);

}  // namespace torchext
