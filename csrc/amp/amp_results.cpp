#include "amp_results.h"

#include <algorithm>

#include "../support/stack_utils.h"
#include "amp_tensor.h"
#include "region.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

void forEachResult(const OperatorHandle& op, const Stack& stack, TensorVisitor visit) {
  forEachTensor(stack, op.schema().returns().size(), visit);
}

// Operators hand an argument back as it is, be it an AmpTensor or not, where there is nothing to do: one of
// `broadcast_tensors`, which losses call, that has the shape already.
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

// The kernels of views copy the key of marks, and not the mark. Not all that show the key are such views: one of a
// tensor with an origin need not be an AmpTensor (`traced.view_as(to_be_cleaned)`).
bool isViewOfToBeCleaned(const AmpArguments& arguments, const Tensor& result) {
  const auto& storages = arguments.to_be_cleaned;
  return result.key_set().has(kMarksKey) && result.has_storage() &&
         std::find(storages.begin(), storages.end(), result.storage().unsafeGetStorageImpl()) != storages.end();
}

// The element of its lists that a call is about, if it is one for each.
bool meetsWrapped(const AmpArguments& arguments, std::size_t element) {
  const auto& elements = arguments.has_wrapped_at;
  return elements.empty() ? arguments.has_wrapped : elements[element % elements.size()];
}

void markResult(const AmpArguments& arguments, const Tensor& result, std::size_t element) {
  if (isArgument(arguments, result)) {
    return;
  }
  if (!canBeAmp(result)) {
    makeOrdinary(result);  // the view of an AmpTensor in another dtype
  } else if (meetsWrapped(arguments, element)) {
    makeAmp(result);
  } else if (isViewOfToBeCleaned(arguments, result)) {
    markToBeCleaned(result);
  }
}

// A write into a tensor that nobody has wrapped leaves it an ordinary one: a model that was unwrapped stays so when an
// optimizer writes its state into it, which was made of wrapped parameters; so does a model that is the average of
// wrapped ones, or has loaded their state. Collectives move whole tensors into memory that stands for them, from which
// FSDP makes the parameters that a module computes with.
bool isMovingTensors(const OperatorHandle& op) {
  const std::string_view name_space = namespaceOf(op.operator_name());
  return name_space == "c10d" || name_space == "_c10d_functional" || name_space == "fsdp";
}

void markMoved(const AmpArguments& arguments, const Tensor& written, std::size_t element) {
  if (meetsWrapped(arguments, element) && canBeAmp(written)) {
    makeAmp(written);
  }
}

// Views of what was there before are as that is, and so is what the call has written.
void markMadeInside(const AmpArguments& arguments, const Tensor& result) {
  if (canBeAmp(result) && isAutocastingFor(result) && isNew(arguments, result)) {
    markToBeCleaned(result);
  }
}

// What a view operator has had to copy is to be cleaned as the argument is, unless it was asked for in another dtype.
// Views of other arguments are as those are (`ordinary.view_as(to_be_cleaned)`).
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
