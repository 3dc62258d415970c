#pragma once

// Materializes at another place, for a while, or as fakes.

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

#include "../../core/deferred_init/materialize.h"
#include "place.h"

namespace torchext {

struct MaterializeOptions {
  Placement placement;
  // Keeps the recording, so that the tensors can be deferred again: retained.h.
  bool retain = false;
  // Called once for each completed storage.
  Progress on_done = ignoreProgress;
};

// Like `materialize(tensors)` of the public API, with options. `placed` move to the placement; `others` stay where they
// were recorded, unless they share a storage with one of `placed`.
//
// If all tensors stay where they were recorded, this is one pass over the graph, and an error leaves all of them
// unchanged.
//
// Otherwise, NOTE [Materializing elsewhere], storages are processed one by one, so that memory holds at most one of
// them twice. Common inputs are computed again for each storage. All possible checks run before the first change. After
// a later error, each storage is either complete or unchanged.
TORCHEXT_API void materialize(at::ArrayRef<at::Tensor> placed,
                              at::ArrayRef<at::Tensor> others,
                              const MaterializeOptions& options);

// NOTE [Materializing as fakes]
//
// A dry run computes no values. While `gives_fakes` is set, `materialize()` on threads in fake_mode drops the
// recordings, and the tensors become fakes on new storages at the placement, which count as allocations. Other fakes do
// not change. Nothing is retained. Takes no lock.
TORCHEXT_API void materializeAsFakes(bool gives_fakes);
TORCHEXT_API bool materializesAsFakes() noexcept;

// The predicted cost of `evaluate(deferred)`, without computing anything, in bytes: the peak of host memory, including
// the value itself if it is on the host, and the bytes that all operators write. Raises ValueError if `deferred` is not
// deferred.
struct ReplayNeeds {
  std::size_t peak = 0;
  std::size_t written = 0;
};
TORCHEXT_API ReplayNeeds needsOf(const at::Tensor& deferred);

// Sets the hook of `materialize()`. Call while the library is loaded.
void registerPlacements();

}  // namespace torchext
