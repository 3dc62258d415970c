#pragma once

// NOTE [AmpTensors in a backward pass]
//
// The operators of a backward pass run in the dtypes of the forward pass, so AmpTensors are neither autocast nor
// cleaned there. Two kinds of code in a backward pass are not formulas. Recomputation is a forward pass: for
// torch.utils.checkpoint, Python enters a guard, because PyTorch does not report it; others recompute in their own
// autograd function, where they must enable grad mode. User code uses the tensors of the program in any dtype: it is
// identified by its node in the graph.

#include <optional>

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

namespace torchext {

// The backward pass or recomputation that is active on a thread.
struct BackwardState {
  bool is_recomputation;
  bool has_region_decided;
  bool creates_graph;
  // The number of regions that are open around it.
  int depth;
};

// Active during a backward pass.
class TORCHEXT_API BackwardGuard {
 public:
  // `creates_graph`: the pass is recorded, so that it can be differentiated.
  explicit BackwardGuard(bool creates_graph) : BackwardGuard{false, false, creates_graph} {}
  C10_DISABLE_COPY_AND_ASSIGN(BackwardGuard);
  ~BackwardGuard();

 protected:
  BackwardGuard(bool is_recomputation, bool has_region_decided, bool creates_graph);

 private:
  std::optional<BackwardState> previous_;
};

// Active during a recomputation, inside the regions that repeat the state of the forward pass.
class RecomputationGuard final : public BackwardGuard {
 public:
  // `has_region_decided`: the value of isRegionDeciding() in the forward pass.
  explicit RecomputationGuard(bool has_region_decided) : BackwardGuard{true, has_region_decided, false} {}
};

// Returns true if this thread runs a backward pass, and not a recomputation.
bool isInBackward();

// Returns true if the running code is not a formula of derivatives.yaml. Call it only in a backward pass. Hooks belong
// to the function that they precede or follow.
bool isInUsersBackward();

// Returns true if an open region of this thread, of torchext or `torch.autocast`, enabled or not, decides about
// autocast instead of the marks of AmpTensors. Regions around a running backward pass do not decide.
TORCHEXT_API bool isRegionDeciding() noexcept;

}  // namespace torchext
