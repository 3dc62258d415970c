#include "backward.h"

#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "region.h"

namespace torchext {

namespace {

// What lives around this moment on a thread: a backward pass, or what it computes again.
struct Surroundings {
  bool is_recomputation;
  bool has_region_decided;
  // The regions that are open around it.
  int depth;
};

// The innermost last. A thread of the autograd engine has none around its part of a pass.
std::vector<Surroundings>& surroundings() {
  thread_local std::vector<Surroundings> all;
  return all;
}

}  // namespace

BackwardGuard::BackwardGuard() noexcept {
  surroundings().push_back({false, false, regionDepth()});
}

BackwardGuard::~BackwardGuard() {
  surroundings().pop_back();
}

RecomputationGuard::RecomputationGuard(bool has_region_decided) noexcept {
  surroundings().push_back({true, has_region_decided, regionDepth()});
}

RecomputationGuard::~RecomputationGuard() {
  surroundings().pop_back();
}

bool isInBackward() noexcept {
  const auto& all = surroundings();
  return torch::autograd::get_current_graph_task_id() != -1 && (all.empty() || !all.back().is_recomputation);
}

// All formulas of derivatives.yaml are TraceableFunctions.
bool isInUsersBackward() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr;
}

bool isRegionDeciding() noexcept {
  const auto& all = surroundings();
  return all.empty() ? regionDepth() > 0 : all.back().has_region_decided || regionDepth() > all.back().depth;
}

}  // namespace torchext
