#pragma once

// From recorded values to real ones: for good, or to read them once.

#include <vector>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "deferred_init.h"
#include "graph/op_graph.h"
#include "place.h"
#include "replay/replay.h"

namespace torchext {

struct MaterializeOptions {
  Placement placement;
  // Keep the recording, so that the tensors can be deferred again: retained.h.
  bool retain = false;
  // Called once for each storage that is done.
  Progress on_done = nobodyAsks;
};

// As `materialize(tensors)` of the public API, with options. `placed` go to the placement; `others` stay where they
// were recorded, unless they share a storage with one of `placed`.
//
// If all is to be where it was recorded, that is one pass over the graph, and on an error all tensors are as they were.
//
// Otherwise, NOTE [Becoming real elsewhere], it goes storage by storage, so that memory never holds more than one of
// them twice; what several have in common is computed for each of them. Whatever can be checked beforehand is checked
// before anything changes. On a later error each storage is either done or as it was.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> placed,
                              at::ArrayRef<at::Tensor> others,
                              const MaterializeOptions& options);

// What `evaluate(deferred)` takes, told without computing anything: the most memory of the host that is held at one
// time, with the value itself if it is there, and what all operators write, both in bytes. Raises ValueError if
// `deferred` is not deferred.
struct ReplayNeeds {
  std::size_t peak = 0;
  std::size_t written = 0;
};
TORCHEXT_API ReplayNeeds needsOf(const at::Tensor& deferred);

}  // namespace torchext
