#pragma once

// NOTE [AmpTensors in a backward pass]
//
// The operators of a backward pass run in the dtypes that those of the forward pass ran in, so that there AmpTensors
// are neither autocast nor cleaned. Two things that run in it are none of its formulas. What is computed again is a
// forward pass: PyTorch does not tell that torch.utils.checkpoint does so, and Python does, by a guard; others do it in
// an autograd function of theirs, where they have to turn grad mode on. And what a user has written takes what the
// program holds, in whatever dtype that is: it is known by its node in the graph.

#include <optional>

#include <torchext/macros.h>

namespace torchext {

// What lives around this moment on a thread: a backward pass, or what it computes again.
struct BackwardState {
  bool is_recomputation;
  bool has_region_decided;
  bool creates_graph;
  // The regions that are open around it.
  int depth;
};

// Lives around a backward pass.
class TORCHEXT_API BackwardGuard {
 public:
  // `creates_graph`: what the pass computes is recorded, so that it can be differentiated in turn.
  explicit BackwardGuard(bool creates_graph);
  C10_DISABLE_COPY_AND_ASSIGN(BackwardGuard);
  ~BackwardGuard();

 private:
  bool creates_graph_;
  std::optional<BackwardState> previous_;
};

// Lives around what is computed again, inside of the regions that repeat the state of the forward pass.
class TORCHEXT_API RecomputationGuard {
 public:
  // `has_region_decided`: what isRegionDeciding() was in the forward pass.
  explicit RecomputationGuard(bool has_region_decided);
  C10_DISABLE_COPY_AND_ASSIGN(RecomputationGuard);
  ~RecomputationGuard();

 private:
  std::optional<BackwardState> previous_;
};

// Is this thread in a backward pass, and not in what is computed again?
bool isInBackward();

// Is what runs now none of the formulas of derivatives.yaml? To be asked in a backward pass. Hooks count to the
// function that they come before or after.
bool isInUsersBackward();

// Is a region open on this thread, ours or `torch.autocast`'s, enabled or not, that decides, and not the marks of
// AmpTensors? Those around a running backward pass do not.
TORCHEXT_API bool isRegionDeciding() noexcept;

}  // namespace torchext
