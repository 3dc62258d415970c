#pragma once

#include <torch/library.h>

namespace torchext {

// NOTE [Shortcuts that read values]
//
// Some kernels and formulas of gradients look at values to find a faster way, as that of `prod` does when nothing is
// zero. They leave it out for what `isTensorSubclassLike()` (TensorSubclassLikeUtils.h) takes for a tensor that may
// have no memory. That is decided by dispatch keys, and fakes carry those of a real tensor.
//
// Were fakes to carry such a key for good, everything else that asks would take another way than on real tensors, and
// leave other nodes in the graph (`reshape` would). So it is carried by aliases: of the operators in the table of
// value_shortcuts.cpp, the fake arguments are replaced by aliases that count among the backends of the meta device,
// too. A formula saves the alias, and finds the key when it runs. What the operator returns carries no such key.
//
// Deferred tensors have values, and take the way of real tensors.

// Registers kernels for these operators, on the key of NOTE [Composites that look at memory].
void registerValueShortcuts(torch::Library& library);

}  // namespace torchext
