#include "amp_tensor.h"

#include <algorithm>
#include <typeinfo>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <c10/util/irange.h>

#include "../../core/amp/region.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/stack_utils.h"
#include "../marks/marks_key.h"

namespace torchext {

void wrap(const at::TensorBase& tensor) {
  checkCanBeWrapped(tensor);
  makeAmp(tensor);
}

void checkCanBeWrapped(const at::TensorBase& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (canBeMarked(impl)) {
    return;
  }
  const c10::BackendMeta& metadata = *impl.get_backend_meta();
  TORCH_CHECK(false, "wrap() cannot mark a tensor of shape ", tensor.sizes(), " on the device ", tensor.device(),
              ": its backend metadata (`c10::BackendMeta`) is already a `", c10::demangle(typeid(metadata).name()),
              "`. Wrap a copy without such metadata, or use `torchext.amp.autocast()`, which does not mark tensors.");
}

namespace {

// Autocast never casts double, and float32 is clean.
bool isLower(const Tensor& tensor) {
  return tensor.is_floating_point() && tensor.scalar_type() != at::kDouble && tensor.scalar_type() != at::kFloat;
}

bool isWrapped(const Tensor& tensor) {
  return isAmp(tensor) && !isToBeCleaned(tensor);
}

// Returns true if `op` applies one operator to each element of its lists, which have the same length.
bool isElementwise(const OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  const auto& arguments = op.schema().arguments();
  const auto is_named = [&name](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  const auto is_list = [](const c10::Argument& argument) {
    return argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  return (is_named("aten::_foreach_") || is_named("aten::_fused_") || is_named("aten::_amp_foreach_")) &&
         std::any_of(arguments.begin(), arguments.end(), is_list);
}

// By element. A tensor outside of lists belongs to all elements.
std::vector<bool> wrappedElements(c10::ArrayRef<IValue> arguments) {
  const auto* const list =
      std::find_if(arguments.begin(), arguments.end(), [](const IValue& argument) { return argument.isTensorList(); });
  std::vector<bool> elements(list->toListRef().size());
  for (const IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && isWrapped(argument.toTensor())) {
      return std::vector<bool>(elements.size(), true);
    }
    std::size_t i = 0;
    if (argument.isTensorList()) {
      forEachTensor(argument, [&](const Tensor& tensor) {
        if (i < elements.size()) {
          elements[i] = elements[i] || isWrapped(tensor);
        }
        ++i;
      });
    }
  }
  return elements;
}

}  // namespace

AmpArguments::AmpArguments(const OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema().arguments();
  const bool is_elementwise = isElementwise(op);
  for (const auto i : c10::irange(schema.size())) {
    const bool is_written = isWritten(schema[i]);
    const IValue& argument = torch::jit::peek(stack, i, schema.size());
    forEachTensor(argument, [&](const Tensor& tensor) {
      inspectTensor(tensor);
      all.push_back(tensor);
      // Written tensors outside of the lists concern all elements, for example GradScaler's flag for infinities.
      if (is_written && !(is_elementwise && argument.isTensor())) {
        written.push_back(tensor);
      }
    });
  }
  if (has_wrapped && is_elementwise) {
    has_wrapped_at = wrappedElements(topOf(stack, schema.size()));
  }
}

void AmpArguments::inspectTensor(const Tensor& tensor) {
  const auto is_castable = [](const Tensor& x) { return isLower(x) || x.scalar_type() == at::kFloat; };
  const auto* const other = std::find_if(all.begin(), all.end(), is_castable);
  is_mixture =
      is_mixture || (is_castable(tensor) && other != all.end() && other->scalar_type() != tensor.scalar_type());
  if (isWrapped(tensor)) {
    has_wrapped = true;
    if (autocast::is_autocast_available(tensor.device().type())) {
      autocast_keys = autocast_keys.add(autocast::get_autocast_dispatch_key_from_device_type(tensor.device().type()));
    }
  }
  if (isToBeCleaned(tensor) && tensor.has_storage()) {
    to_be_cleaned.push_back(tensor.storage().unsafeGetStorageImpl());
  }
  if (isUnclean(tensor)) {
    unclean = tensor.scalar_type();
  }
}

bool isAutocastingFor(const Tensor& tensor) {
  const c10::DeviceType device_type = tensor.device().type();
  return autocast::is_autocast_available(device_type) &&
         (autocast::is_autocast_enabled(device_type) || isAutocastingAroundCompiledCode(device_type));
}

bool isUnclean(const Tensor& tensor) {
  return isToBeCleaned(tensor) && isLower(tensor) && !isAutocastingFor(tensor);
}

namespace {

void forEachResult(const OperatorHandle& op, const Stack& stack, TensorVisitor visit) {
  forEachTensor(topOf(stack, op.schema().returns().size()), visit);
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
