#pragma once

// What the two handlers have to know of an operator beyond its schema.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// True for the operator that `torch.tensor()` calls last, with the constant that it has made. While it fills in the
// values it excludes `Fake` and `DeferredInit` (tensor_new.cpp), so this is where the constant becomes visible to them.
bool isLiftFresh(const c10::OperatorHandle& op);

// True for the operator behind `Tensor.pin_memory()`, whose Meta kernel refuses whatever is not on the CPU.
bool isPinMemory(const c10::OperatorHandle& op);

// The key of the kernel by which an operator is composed of others, if it is: then those are what is faked and
// recorded. Random operators like `randn` are composite below autograd; they are taken apart so that the draw itself is
// seen.
std::optional<c10::DispatchKey> compositeKernelOf(const c10::OperatorHandle& op);

// True for an operator that makes new tensors from nothing but metadata: one without tensor arguments, or one like
// `zeros_like` and `new_empty` that looks at no value of its argument.
bool isFactory(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// True for an operator that takes `dtype`, `layout`, `device` and `pin_memory`, one after another.
bool takesTensorOptions(const c10::FunctionSchema& schema);

// True for an operator whose results are all views of arguments, and that writes into none.
bool onlyMakesViews(const c10::OperatorHandle& op);

// True for a call about Python numbers alone, as `torch.add(3, 2)`, which makes a tensor of them.
bool isAboutNumbers(c10::ArrayRef<c10::IValue> arguments);

// True for an argument that is a random generator.
bool isGenerator(const c10::Argument& argument);

// True for an operator that is told which random generator to draw from.
bool takesGenerator(const c10::OperatorHandle& op);

// True for an operator whose result, or the shape of whose result, cannot be told without the values of its arguments.
bool needsValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// True when that is so and the call does not say what the values would: `repeat_interleave(output_size=)` does.
bool lacksValues(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// True for `_foreach_add_` and its kin, which write into the tensors of the list that is their first argument.
bool writesForeach(const c10::OperatorHandle& op);

// True when the call writes into its argument at `position`: as declared in the schema, or, for the running statistics
// of batch normalization, as the kernels do without saying so.
bool writesArgument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::size_t position);

}  // namespace torchext
