#include "autograd.h"

#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace torchext {

using at::Tensor;

namespace {

// See OpenTensorImpl.
class OpenEngine : public torch::autograd::Engine {
 public:
  static void setQueueOfThread(Engine& engine, std::shared_ptr<torch::autograd::ReadyQueue> queue) {
    (engine.*(&OpenEngine::init_local_ready_queue))(std::move(queue));
  }
};

}  // namespace

std::unique_ptr<c10::AutogradMetaInterface> autogradMetaOfAlias(c10::TensorImpl* alias, const Tensor& tensor) {
  return std::make_unique<torch::autograd::AutogradMeta>(alias, /*requires_grad=*/false,
                                                         torch::autograd::impl::gradient_edge(tensor));
}

bool isRunningBackward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

void dropUnfinishedBackward() {
  OpenEngine::setQueueOfThread(torch::autograd::Engine::get_default_engine(),
                               std::make_shared<torch::autograd::ReadyQueue>());
}

bool isRunningPyTorchsNode() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) != nullptr;
}

std::string nameOfRunningNode() {
  const auto node = torch::autograd::get_current_node();
  return node ? node->name() : std::string{};
}

}  // namespace torchext
