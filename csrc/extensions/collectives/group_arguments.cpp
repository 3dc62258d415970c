#include <algorithm>

#include <ATen/core/jit_type.h>

#include "../../libraries/support/sizes.h"
#include "process_groups.h"

namespace torchext {

using c10::IValue;
using c10::OperatorHandle;

namespace {

// Set while the library is loaded, and only read after that.
BackendOfGroup backend_of_group = nullptr;
NameOfReduction name_of_reduction = nullptr;

}  // namespace

bool setBackendOfGroup(BackendOfGroup function) noexcept {
  backend_of_group = function;
  return true;
}

bool setNameOfReduction(NameOfReduction function) noexcept {
  name_of_reduction = function;
  return true;
}

std::string nameOfReduction(const IValue& value) {
  return name_of_reduction == nullptr ? std::string{} : name_of_reduction(value);
}

bool isProcessGroup(const c10::Type& type) {
  const auto* named = dynamic_cast<const c10::NamedType*>(&type);
  return named != nullptr && named->name() &&
         named->name()->qualifiedName() == "__torch__.torch.classes.c10d.ProcessGroup";
}

bool namesProcessGroup(const c10::Argument& argument) {
  return argument.name() == "group_name" || isProcessGroup(*argument.type());
}

std::optional<std::string> communicationBackend(const OperatorHandle& op,
                                                c10::ArrayRef<IValue> arguments,
                                                c10::Device device) {
  const auto& declared = op.schema().arguments();
  const auto group = std::find_if(declared.begin(), declared.end(), namesProcessGroup);
  return group == declared.end() || backend_of_group == nullptr
             ? std::nullopt
             : backend_of_group(arguments[toSize(group - declared.begin())], device);
}

}  // namespace torchext
