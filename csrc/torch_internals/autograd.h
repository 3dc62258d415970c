#pragma once

#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

// What `torch/csrc/autograd` tells and does. Its headers take the compiler eight seconds in each file, so one file
// includes them for all.
namespace torchext {

// What makes `alias` an output of the node that `tensor` is one of, or the same leaf.
std::unique_ptr<c10::AutogradMetaInterface> autogradMetaOfAlias(c10::TensorImpl* alias, const at::Tensor& tensor);

// How the view `tensor` was made, by the name of the `CreationMeta`; nothing for what is no view to autograd.
std::optional<std::string> creationMetadataOf(const at::Tensor& tensor);

// Whether this thread runs a part of a backward pass, and whether what it runs is a node of PyTorch's own. The backward
// of a function that a user has written is not.
bool isRunningBackward();
bool isRunningPyTorchsNode();

// Drops what a backward pass on this thread that has raised an error has left in the queue of the thread: nodes that
// were ready, with their gradients and what they have saved. PyTorch's next backward pass would come to them. Not to be
// called in a backward pass, whose own nodes are in that queue.
void dropUnfinishedBackward();

}  // namespace torchext
