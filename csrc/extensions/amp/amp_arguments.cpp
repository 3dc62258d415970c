#include "amp_arguments.h"

#include <algorithm>

#include <c10/util/irange.h>

#include "../../core/amp/region.h"
#include "../../core/torch_internals/autocast_mode.h"
#include "../../libraries/support/stack_utils.h"
#include "amp_tensor.h"

namespace torchext {

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

}  // namespace torchext
