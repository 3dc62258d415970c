#pragma once

// Properties of operators that schemas do not declare, for the handlers of fakes and of deferred_init.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../../libraries/support/operator_table.h"

namespace torchext {

// The operator that `torch.tensor()` calls last, with the constant that it has made. While `torch.tensor()` fills in
// the values, it excludes `Fake` and `DeferredInit` (tensor_new.cpp), so their handlers first receive the constant
// here.
extern const OperatorSet isLiftFresh;

// The operator behind `Tensor.pin_memory()`. Its Meta kernel refuses tensors that are not on the CPU.
extern const OperatorSet isPinMemory;

// Returns the key of the operator's composite kernel, if it has one. The operators that this kernel calls are faked and
// recorded instead. Random operators like `randn` are composite below autograd (`CompositeExplicitAutograd`). They are
// decomposed so that the handlers receive the draw itself.
std::optional<c10::DispatchKey> compositeKernelOf(const c10::OperatorHandle& op);

// Returns true for an operator that makes new tensors from metadata alone: one without tensor arguments, or one like
// `zeros_like` and `new_empty`, which does not read its argument's values.
bool isFactory(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if the CPU results of the call are in pinned memory: because it was requested, or because tensors are
// copied from another device without waiting (ATen's `_to_copy()`).
bool makesPinned(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true for an operator with consecutive arguments `dtype`, `layout`, `device` and `pin_memory`.
bool takesTensorOptions(const c10::FunctionSchema& schema);

// Returns true for an operator that only returns views of arguments, and writes to no argument.
bool onlyMakesViews(const c10::OperatorHandle& op);

// Returns true for a PyTorch operator that declares that its results do not alias its arguments.
bool declaresNoSharing(const c10::OperatorHandle& op);

// Returns true for a call with several tensor arguments that are all wrapped numbers, like `torch.add(3, 2)`, which
// makes a tensor of them.
bool isAboutNumbers(c10::ArrayRef<c10::IValue> arguments);

// Returns true for an operator with an argument that it resizes to its result: `out`.
bool hasOut(const c10::OperatorHandle& op);

// Returns true for an argument that is a random generator.
bool isGenerator(const c10::Argument& argument);

// Position in the schema of the argument that takes the random generator to draw from, or -1.
int generatorArgument(const c10::FunctionSchema& schema);

// Returns true for an operator that takes a random generator.
TORCHEXT_API bool takesGenerator(const c10::OperatorHandle& op);

// Returns true for an operator that draws from a generator directly, not through other operators.
bool drawsNumbers(const c10::OperatorHandle& op);

// Returns true if the result, or its shape, depends on the values of the arguments.
bool needsValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true for an indexing operator whose indices contain at least one mask.
bool isMaskedIndexing(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true if values are needed and no other argument replaces them, as `repeat_interleave(output_size=)` does.
bool lacksValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns true if the call writes to its argument at `position`: because the schema declares it, or because the
// argument holds running statistics of batch normalization, which kernels update without declaring it.
bool writesArgument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::size_t position);

// Operators like `empty`.
TORCHEXT_API extern const OperatorSet onlyAllocates;

// Returns true if the call writes every element of its argument at `position` without reading any: the other arguments
// alone determine the new values.
bool overwritesArgument(const c10::OperatorHandle& op, std::size_t position);

// Returns true if the call may access bytes of its arguments' storages that belong to none of their elements. This is
// always assumed of operators of other libraries.
bool reachesBeyondElements(const c10::OperatorHandle& op);

}  // namespace torchext
