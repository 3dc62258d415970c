#pragma once

// What the handlers of fakes and of deferred_init have to know about an operator beyond its schema.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../../support/operator_table.h"

namespace torchext {

// The operator that `torch.tensor()` calls last, with the constant that it has made. While `torch.tensor()` fills in
// the values, it excludes `Fake` and `DeferredInit` (tensor_new.cpp), so this is where the constant becomes visible to
// them.
extern const OperatorSet isLiftFresh;

// The operator behind `Tensor.pin_memory()`, whose Meta kernel refuses any tensor that is not on the CPU.
extern const OperatorSet isPinMemory;

// Returns the key of the operator's composite kernel, if it has one: the operators that this kernel calls are faked and
// recorded instead. Random operators like `randn` are composite below autograd (`CompositeExplicitAutograd`); they are
// decomposed so that the draw itself is seen.
std::optional<c10::DispatchKey> compositeKernelOf(const c10::OperatorHandle& op);

// Returns true for an operator that makes new tensors from metadata alone: one without tensor arguments, or one like
// `zeros_like` and `new_empty`, which does not read its argument's values.
bool isFactory(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if what the call makes on the CPU is in pinned memory: it was asked for, or tensors are copied from
// another device without waiting (`_to_copy()` of ATen).
bool makesPinned(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true for an operator that takes `dtype`, `layout`, `device` and `pin_memory`, one after another.
bool takesTensorOptions(const c10::FunctionSchema& schema);

// Returns true for an operator whose results are all views of arguments, and that writes to none.
bool onlyMakesViews(const c10::OperatorHandle& op);

// Returns true for an operator of PyTorch's that declares that its results share nothing with its arguments.
bool declaresNoSharing(const c10::OperatorHandle& op);

// Returns true for a call whose tensor arguments are all wrapped numbers, like `torch.add(3, 2)`, which makes a tensor
// of them.
bool isAboutNumbers(c10::ArrayRef<c10::IValue> arguments);

// Returns true for an operator with an argument that it resizes to its result: `out`.
bool hasOut(const c10::OperatorHandle& op);

// Returns true for an argument that is a random generator.
bool isGenerator(const c10::Argument& argument);

// Position in the schema of the argument that takes the random generator to draw from, or -1.
int generatorArgument(const c10::FunctionSchema& schema);

// Returns true for an operator that is told which random generator to draw from.
bool takesGenerator(const c10::OperatorHandle& op);

// Returns true for an operator that draws from a generator by itself, not through other operators.
bool drawsNumbers(const c10::OperatorHandle& op);

// Returns true if the result, or its shape, cannot be told without the values of the arguments.
bool needsValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true for an operator that indexes with at least one mask, and so is one of them.
bool isMaskedIndexing(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true if values are needed and no other argument tells it instead, as `repeat_interleave(output_size=)` does.
bool lacksValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true for `_foreach_add_` and its kin, which write to the tensors in their first argument, a list.
bool writesForeach(const c10::OperatorHandle& op);

// Returns true if the call writes to its argument at `position`: because the schema declares it, or because the
// argument is one of the running statistics of batch normalization, which kernels update without declaring it.
bool writesArgument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::size_t position);

// Operators like `empty`.
extern const OperatorSet onlyAllocates;

// Returns true if the call writes every element of its argument at `position`, and does so without reading any: the
// other arguments alone tell the new values.
bool overwritesArgument(const c10::OperatorHandle& op, std::size_t position);

// Returns true if the call may read or write bytes of its arguments' storages that are none of their elements'. What
// operators of others do is not known.
bool reachesBeyondElements(const c10::OperatorHandle& op);

}  // namespace torchext
