#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include "../core/support/operator_table.h"
#include "../extensions/inspect/route.h"
#include "../extensions/inspect/tensor_state.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

c10::OperatorHandle findOperator(const std::string& name, const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK_VALUE(op.has_value(), "The dispatcher has no operator `", c10::OperatorName{name, overload},
                    "`. torch.ops also lists operators that only TorchScript calls.");
  return *op;
}

bool hasOperator(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchema({name, overload}).has_value();
}

// Like `_get_operation_for_overload_or_packet()`, which accepts numbers for tensors in some operators.
torch::jit::Stack convertArguments(const c10::FunctionSchema& schema,
                                   const pybind11::tuple& args,
                                   const pybind11::dict& kwargs) {
  const c10::Symbol symbol = c10::Symbol::fromQualString(schema.name());
  const torch::jit::ToIValueAllowNumbersAsTensors allow{
      symbol.is_prims() || symbol.is_nvprims() ||
      (symbol.is_aten() && torch::should_allow_numbers_as_tensors(symbol.toUnqualString()))};
  try {
    return torch::jit::createStackForSchema(schema, torch::jit::tuple_slice{args},
                                            pybind11::reinterpret_borrow<pybind11::kwargs>(kwargs), std::nullopt);
  } catch (const torch::jit::schema_match_error& error) {
    throw pybind11::type_error(error.what());
  }
}

// Returns tuples in the order of the fields of torchext.inspect.RouteStep.
pybind11::list route(const std::string& name,
                     const std::string& overload,
                     const pybind11::tuple& args,
                     const pybind11::dict& kwargs) {
  const c10::OperatorHandle op = findOperator(name, overload);
  const torch::jit::Stack arguments = convertArguments(op.schema(), args, kwargs);
  pybind11::list steps;
  for (const RouteStep& step : routeOf(op, arguments)) {
    steps.append(pybind11::make_tuple(c10::toString(step.key), step.origin, toString(step.turn), step.is_python,
                                      step.source, step.comment));
  }
  return steps;
}

// Returns a tuple in the order of the fields of torchext.inspect.TensorState.
pybind11::tuple tensorState(const at::Tensor& tensor) {
  const TensorState state = stateOf(tensor);
  pybind11::list keys;
  for (const c10::DispatchKey key : state.keys) {
    keys.append(c10::toString(key));
  }
  return pybind11::make_tuple(pybind11::tuple(keys), state.version, state.has_autograd_metadata, state.storage,
                              state.is_fake, state.is_deferred, state.is_inference, state.requires_grad, state.is_leaf,
                              state.is_view, state.creation_metadata);
}

}  // namespace

void bindInspect(pybind11::module_& module) {
  bind(module, "has_operator", hasOperator);
  bind(module, "operator_tables", describeOperatorTables);
  module.def("route", torch::wrap_pybind_function(route));
  module.def("tensor_state", torch::wrap_pybind_function(tensorState));
}

}  // namespace torchext::python
