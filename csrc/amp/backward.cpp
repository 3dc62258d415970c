#include "backward.h"

#include <atomic>
#include <vector>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "region.h"

namespace torchext {

namespace {

// In the whole process: for the threads of the autograd engine, which do not know for whom they work.
std::atomic<int> passes_that_create_graphs{0};

// What lives around this moment on a thread: a backward pass, or what it computes again.
struct Surroundings {
  bool is_recomputation;
  bool has_region_decided;
  bool creates_graph;
  // The regions that are open around it.
  int depth;
};

// The innermost last. A thread of the autograd engine has none around its part of a pass.
std::vector<Surroundings>& surroundings() {
  thread_local std::vector<Surroundings> all;
  return all;
}

// The engine turns grad mode on only for a pass that creates a graph.
bool isRecomputingByHand() {
  const auto& all = surroundings();
  const bool creates_graph = all.empty() ? passes_that_create_graphs > 0 : all.back().creates_graph;
  return c10::GradMode::is_enabled() && !creates_graph && isInUsersBackward();
}

}  // namespace

BackwardGuard::BackwardGuard(bool creates_graph) : creates_graph_{creates_graph} {
  surroundings().push_back({false, false, creates_graph, regionDepth()});
  passes_that_create_graphs += creates_graph_ ? 1 : 0;
}

BackwardGuard::~BackwardGuard() {
  passes_that_create_graphs -= creates_graph_ ? 1 : 0;
  surroundings().pop_back();
}

RecomputationGuard::RecomputationGuard(bool has_region_decided) {
  surroundings().push_back({true, has_region_decided, false, regionDepth()});
}

RecomputationGuard::~RecomputationGuard() {
  surroundings().pop_back();
}

bool isInBackward() {
  if (torch::autograd::get_current_graph_task_id() == -1) {
    return false;
  }
  const auto& all = surroundings();
  const bool is_recomputation = !all.empty() && all.back().is_recomputation;
  return !is_recomputation && !isRecomputingByHand();
}

bool isInUsersBackward() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr;
}

bool isRegionDeciding() noexcept {
  const auto& all = surroundings();
  return all.empty() ? regionDepth() > 0 : all.back().has_region_decided || regionDepth() > all.back().depth;
}

}  // namespace torchext
