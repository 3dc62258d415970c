#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

// The functions of `torch/csrc/autograd` that torchext uses. Their headers cost eight seconds of compile time per file,
// so one file includes them for all.
namespace torchext {

// Returns metadata that make `alias` an output of the same node as `tensor`, or the same leaf.
std::unique_ptr<c10::AutogradMetaInterface> autogradMetaOfAlias(c10::TensorImpl* alias, const at::Tensor& tensor);

// Return whether this thread runs a part of a backward pass, and whether it runs a PyTorch node there. The backward of
// a user-defined function is not a PyTorch node.
bool isRunningBackward();
bool isRunningPyTorchsNode();

// Returns the name of the node that this thread runs, such as "ProdBackward0", or an empty string.
std::string nameOfRunningNode();

// Clears the ready queue of this thread after a backward pass that raised an error: nodes that were ready, with their
// gradients and saved tensors. PyTorch's next backward pass would run them. Do not call it in a backward pass, whose
// nodes are in that queue.
void dropUnfinishedBackward();

}  // namespace torchext
