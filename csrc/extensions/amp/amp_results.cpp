#include "amp_results.h"

#include <algorithm>

#include "../../core/amp/region.h"
#include "../../libraries/support/stack_utils.h"
#include "amp_tensor.h"

namespace torchext {

namespace {

void forEachResult(const OperatorHandle& op, const Stack& stack, TensorVisitor visit) {
  forEachTensor(stack, op.schema().returns().size(), visit);
}

// Operators without any work return an argument itself, for example `broadcast_tensors` (called by losses) for tensors
// of equal shape.
bool isArgument(const AmpArguments& arguments, const Tensor& result) {
  return std::any_of(arguments.all.begin(), arguments.all.end(),
                     [&result](const Tensor& argument) { return argument.is_same(result); });
}

bool isOfArgumentsStorage(const AmpArguments& arguments, const Tensor& result) {
  return std::any_of(arguments.all.begin(), arguments.all.end(), [&result](const Tensor& argument) {
    return argument.has_storage() && result.has_storage() &&
           argument.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl();
  });
}

bool isNew(const AmpArguments& arguments, const Tensor& result) {
  return !isArgument(arguments, result) && !isOfArgumentsStorage(arguments, result);
}

// View kernels copy the key of marks, but not the mark. A result with the key is not always such a view: a view of a
// tensor with an origin need not be an AmpTensor (`traced.view_as(to_be_cleaned)`).
bool isViewOfToBeCleaned(const AmpArguments& arguments, const Tensor& result) {
  const auto& storages = arguments.to_be_cleaned;
  return result.key_set().has(kMarksKey) && result.has_storage() &&
         std::find(storages.begin(), storages.end(), result.storage().unsafeGetStorageImpl()) != storages.end();
}

// For an operator on lists, considers only the arguments of the given element.
bool meetsWrapped(const AmpArguments& arguments, std::size_t element) {
  const auto& elements = arguments.has_wrapped_at;
  return elements.empty() ? arguments.has_wrapped : elements[element % elements.size()];
}

void markResult(const AmpArguments& arguments, const Tensor& result, std::size_t element) {
  if (isArgument(arguments, result)) {
    return;
  }
  if (!canBeAmp(result)) {
    makeOrdinary(result);  // a view of an AmpTensor in another dtype
  } else if (meetsWrapped(arguments, element)) {
    makeAmp(result);
  } else if (isViewOfToBeCleaned(arguments, result)) {
    markToBeCleaned(result);
  }
}

// A written tensor that is not wrapped stays ordinary. So an unwrapped model stays unwrapped when an optimizer writes
// state made from wrapped parameters into it, when it averages wrapped models, or when it loads their state.
// Collectives are different: they move whole tensors into memory that replaces them, and FSDP makes the parameters of a
// module from it.
bool isMovingTensors(const OperatorHandle& op) {
  const std::string_view name_space = namespaceOf(op.operator_name());
  return name_space == "c10d" || name_space == "_c10d_functional" || name_space == "fsdp";
}

void markMoved(const AmpArguments& arguments, const Tensor& written, std::size_t element) {
  if (meetsWrapped(arguments, element) && canBeAmp(written)) {
    makeAmp(written);
  }
}

// Excludes views of existing memory and written arguments, which keep their mark.
void markMadeInside(const AmpArguments& arguments, const Tensor& result) {
  if (canBeAmp(result) && isAutocastingFor(result) && isNew(arguments, result)) {
    markToBeCleaned(result);
  }
}

// If a view operator copies, its result will be cleaned like its argument, unless the caller requested another dtype.
// Views of other arguments keep the state of these (`ordinary.view_as(to_be_cleaned)`).
void markLikeUnclean(const AmpArguments& arguments, const Tensor& result) {
  if (!isAmp(result) && result.scalar_type() == arguments.unclean && isNew(arguments, result)) {
    markToBeCleaned(result);
  }
}

}  // namespace

void markResults(const OperatorHandle& op, const Stack& stack, const AmpArguments& arguments) {
  std::size_t element = 0;
  forEachResult(op, stack, [&](const Tensor& result) { markResult(arguments, result, element++); });
  if (isMovingTensors(op)) {
    element = 0;
    for (const Tensor& written : arguments.written) {
      markMoved(arguments, written, element++);
    }
  }
}

void markResultsOfOthers(const OperatorHandle& op, const Stack& stack, const AmpArguments& arguments) {
  markResults(op, stack, arguments);
  if (arguments.has_wrapped) {
    return;
  }
  const bool is_inside = isInSelfCleaningRegion();
  forEachResult(op, stack, [&](const Tensor& result) {
    if (is_inside) {
      markMadeInside(arguments, result);
    }
    if (arguments.unclean != at::ScalarType::Undefined) {
      markLikeUnclean(arguments, result);
    }
  });
}

}  // namespace torchext
