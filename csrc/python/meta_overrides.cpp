#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../core/fake/meta/meta_kernel.h"
#include "../core/hooks/hooks.h"
#include "../extensions/kernels/device_kernels.h"
#include "../libraries/support/plain_tensors.h"
#include "../libraries/support/stack_utils.h"
#include "bind.h"
#include "module.h"

namespace py = pybind11;

namespace torchext::python {

namespace {

using FunctionsByName = std::unordered_map<std::string, py::object>;
using Functions = std::unordered_map<c10::OperatorName, py::object>;

// The functions of torchext/fake/meta_overrides.py, by operator. Set before there are fakes, never changed, and leaked:
// threads may run operators until the process ends.
struct Overrides {
  py::object call;  // the class of the first argument of the functions
  Functions replacing;
  Functions wrapping;
  Functions completing;
};

Overrides& overrides() {
  static auto* const all = new Overrides;
  return *all;
}

// Returns the function for `op`, or null.
const py::object* find(const Functions& functions, const OperatorHandle& op) {
  const auto found = functions.find(op.operator_name());
  return found == functions.end() ? nullptr : &found->second;
}

bool replaces(const OperatorHandle& op) {
  return find(overrides().replacing, op) != nullptr;
}

py::dict asDict(const OperatorHandle& op, Arguments arguments) {
  py::dict named;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    named[op.schema().arguments()[i].name().c_str()] = torch::jit::toPyObject(arguments[i]);
  }
  return named;
}

Stack asStack(const OperatorHandle& op, const py::tuple& values) {
  Stack results;
  for (std::size_t i = 0; i < values.size(); ++i) {
    results.push_back(torch::jit::toIValue(values[i], op.schema().returns()[i].type()));
  }
  return results;
}

// Calls the Meta kernel for a function of Python, until `end()`: Python may keep it, in the frames of a traceback.
class Runner {
 public:
  Runner(const OperatorHandle& op, const Stack& stack, CallOnStack call)
      : op_{op}, arguments_(argumentsOf(op, stack).vec()), call_{call} {}

  // Takes arguments that replace those of the call, by name.
  py::tuple run(const py::dict& changed) {
    TORCH_CHECK(call_, "The call of `", op_.operator_name(), "` has ended.");
    Stack stack = arguments_;
    for (const auto& [name, value] : changed) {
      const auto position = toSize(op_.schema().argumentIndexWithName(name.cast<std::string>()).value());
      stack[position] = torch::jit::toIValue(value, op_.schema().arguments()[position].type());
    }
    try {
      (*call_)(stack);
    } catch (python_error& error) {
      error.restore();
      throw py::error_already_set();
    } catch (const c10::Error&) {
      error_ = std::current_exception();
      throw;
    }
    return asTuple(stack, torch::jit::toPyObject);
  }

  // Raises the kernel's error in C++, which has lost its class on the way through Python.
  void rethrow() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

  void end() noexcept {
    call_.reset();
    arguments_.clear();
  }

 private:
  const OperatorHandle op_;
  Stack arguments_;
  std::optional<CallOnStack> call_;
  std::exception_ptr error_;
};

py::tuple callOverride(const py::object& function, const OperatorHandle& op, const Stack& stack, CallOnStack call) {
  const auto runner = std::make_shared<Runner>(op, stack, call);
  const auto end = c10::make_scope_exit([&runner] { runner->end(); });
  const py::cpp_function run{[runner](const py::dict& changed) { return runner->run(changed); }};
  try {
    return function(overrides().call(deviceOfMetaCall().value(), asDict(op, argumentsOf(op, stack)), run));
  } catch (const py::error_already_set&) {
    runner->rethrow();
    throw;
  }
}

// Only Meta kernels describe real tensors on the meta device.
void callMeta(const OperatorHandle& op, Stack& stack, CallOnStack call) {
  const py::object* function = find(overrides().replacing, op);
  if (function == nullptr && !deviceOfMetaCall()->is_meta()) {
    function = find(overrides().wrapping, op);
  }
  if (function == nullptr) {
    call(stack);
    return;
  }
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  Stack results = asStack(op, callOverride(*function, op, stack, call));
  replaceTop(stack, op.schema().arguments().size(), std::move(results));
}

void complete(const OperatorHandle& op, Arguments arguments, c10::Device device, Stack& results) {
  const py::object* const function = device.is_meta() ? nullptr : find(overrides().completing, op);
  if (function == nullptr) {
    return;
  }
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  Stack on_meta = arguments.vec();  // the program's tensors may be of subclasses with other properties
  mapTensors(on_meta, on_meta.size(), emptyOnMeta);
  const py::object call = overrides().call(device, asDict(op, on_meta));
  results = asStack(op, (*function)(call, *asTuple(results, torch::jit::toPyObject)));
}

Functions byOperator(const FunctionsByName& functions) {
  Functions parsed;
  for (const auto& [name, function] : functions) {
    parsed.emplace(torch::jit::parseName(name), function);
  }
  return parsed;
}

void setMetaOverrides(py::object call,
                      const FunctionsByName& replacing,
                      const FunctionsByName& wrapping,
                      const FunctionsByName& completing) {
  overrides() = {std::move(call), byOperator(replacing), byOperator(wrapping), byOperator(completing)};
  hooks().kernels.replaces = &replaces;
  hooks().kernels.callMeta = &callMeta;
  hooks().kernels.complete = &complete;
}

}  // namespace

void bindMetaOverrides(py::module_& module) {
  module.def("set_meta_overrides", &setMetaOverrides);
  bind(module, "result_of_iterator",
       [](const std::vector<at::Tensor>& tensors, at::ScalarType dtype) { return resultOfIterator(tensors, dtype); });
  bind(module, "read_only_zeros_like", &readOnlyZerosLike);
}

}  // namespace torchext::python
