#pragma once

#include <optional>
#include <variant>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "../../libraries/fills/fill.h"
#include "../../libraries/fills/random_fill.h"
#include "../../libraries/fills/truncated_fill.h"

namespace torchext {

// Returns the distribution of the fills `op` that `fillRandomly()` computes, calling `after`; else nothing.
std::optional<Distribution> distributionOf(const c10::OperatorHandle& op);

// Returns true for `torchext::trunc_normal_`, which stands for `torch.nn.init.trunc_normal_` where that may reject
// drawn values: torchext/fake/trunc_normal.py.
bool isTruncNormal(const c10::OperatorHandle& op);

using RequestedFill = std::variant<RandomFill, TruncatedFill>;

// Returns the fill of contiguous memory that a call of `op` on a tensor of `dtype` requests, or nothing if the operator
// must be called. PyTorch's truncated normal function may sample in another way for some bounds or in some release, so
// a few of its elements are compared with ours first.
std::optional<RequestedFill> requestedFillOf(const c10::OperatorHandle& op,
                                             c10::ScalarType dtype,
                                             c10::ArrayRef<c10::IValue> arguments);

// Computes the call of `op` with `stack` if it is a random fill of contiguous CPU memory that can be done faster than
// by PyTorch, with the same bits. `generator` is the one to draw from. Returns false, without an effect, if the caller
// must call the operator. `after` is as in fill.h, and is called for a distribution.
bool replayFill(const c10::OperatorHandle& op,
                torch::jit::Stack& stack,
                const at::Generator& generator,
                AfterStretch after = doNothing);

}  // namespace torchext
