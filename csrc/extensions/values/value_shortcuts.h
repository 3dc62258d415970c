#pragma once

#include <torch/library.h>

namespace torchext {

// NOTE [Shortcuts that read values]
//
// Some kernels and gradient formulas read values to find a shortcut.
//
// The formulas of `prod`, `cumprod`, `max`, `min` and `median` check for zeros or NaNs. For fakes the check returns
// false, as in most real runs. So gradients have the strides of these runs, and the formula needs as much memory.
//
// Other kernels and formulas do not read if `isTensorSubclassLike()` (TensorSubclassLikeUtils.h) returns true, which
// means that a tensor may have no memory. This is decided by dispatch keys, and fakes carry those of a real tensor. If
// fakes always carried such a key, all other callers of that function would take another path than for real tensors,
// and leave other nodes in the graph (`reshape` would). So only aliases carry one: the fake arguments of the operators
// in the table of value_shortcuts.cpp are replaced by aliases that also carry the backend bit of the meta device. A
// formula saves the alias, and finds the bit when it runs. The operator's results do not carry it.
//
// Deferred tensors have values, and take the path of real tensors.

// Registers kernels for these operators, on the key of NOTE [Composites that read memory].
void registerValueShortcuts(torch::Library& library);

// Returns true if the node of autograd that this thread runs reads values only to find zeros or NaNs.
bool runsNodeForSpecialValues();

}  // namespace torchext
