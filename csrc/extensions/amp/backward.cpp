#include "backward.h"

#include <atomic>
#include <optional>
#include <utility>

#include <c10/core/GradMode.h>

#include "../../core/amp/region.h"
#include "../support/autograd.h"

namespace torchext {

namespace {

// Process-wide, for threads of the autograd engine, which have no reference to their pass.
std::atomic<int> passes_that_create_graphs{0};

// The innermost state. A thread of the autograd engine has none for its part of a pass.
thread_local std::optional<BackwardState> current;

// The engine enables grad mode only for a pass that creates a graph.
bool isRecomputingByHand() {
  const bool creates_graph = current ? current->creates_graph : passes_that_create_graphs > 0;
  return c10::GradMode::is_enabled() && !creates_graph && isInUsersBackward();
}

}  // namespace

BackwardGuard::BackwardGuard(bool is_recomputation, bool has_region_decided, bool creates_graph)
    : previous_{
          std::exchange(current, BackwardState{is_recomputation, has_region_decided, creates_graph, regionDepth()})} {
  passes_that_create_graphs += creates_graph ? 1 : 0;
}

BackwardGuard::~BackwardGuard() {
  passes_that_create_graphs -= current->creates_graph ? 1 : 0;
  current = previous_;
}

bool isInBackward() {
  return isRunningBackward() && !(current && current->is_recomputation) && !isRecomputingByHand();
}

bool isInUsersBackward() {
  return !isRunningPyTorchsNode();
}

bool isRegionDeciding() noexcept {
  return current ? current->has_region_decided || regionDepth() > current->depth : regionDepth() > 0;
}

}  // namespace torchext
