#include <exception>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "../core/fake/meta/meta_kernel.h"
#include "../core/hooks/hooks.h"
#include "../extensions/kernels/promoted_strides.h"
#include "../libraries/support/stack_utils.h"
#include "bind.h"
#include "interpreter.h"
#include "module.h"

namespace py = pybind11;

namespace torchext::python {

namespace {

// The functions of torchext/fake/meta_overrides.py, by the full names of operators. Set before there are fakes, never
// changed, and leaked: threads may run operators until the process ends.
struct Overrides {
  using Functions = std::unordered_map<std::string, py::object>;
  py::object call;  // the class of their argument
  Functions replacing;
  Functions correcting;
};

Overrides& overrides() {
  static auto* const all = new Overrides;
  return *all;
}

const py::object* find(const Overrides::Functions& functions, const OperatorHandle& op) {
  const auto found = functions.find(c10::toString(op.operator_name()));
  return found == functions.end() ? nullptr : &found->second;
}

bool replaces(const OperatorHandle& op) {
  return find(overrides().replacing, op) != nullptr;
}

py::dict asDict(const OperatorHandle& op, const Stack& stack) {
  const auto& declared = op.schema().arguments();
  py::dict arguments;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    arguments[declared[i].name().c_str()] = torch::jit::toPyObject(torch::jit::peek(stack, i, declared.size()));
  }
  return arguments;
}

py::tuple takeAll(Stack& stack) {
  py::tuple values{stack.size()};
  for (std::size_t i = 0; i < stack.size(); ++i) {
    values[i] = torch::jit::toPyObject(std::move(stack[i]));
  }
  return values;
}

// Calls the Meta kernel for a function of Python.
class Runner {
 public:
  Runner(const OperatorHandle& op, const Stack& stack, CallOnStack call)
      : op_{op}, arguments_(topOf(stack, op.schema().arguments().size()).vec()), call_{call} {}

  // Takes arguments that replace those of the call, by name.
  py::tuple run(const py::dict& changed) {
    Stack stack = arguments_;
    for (const auto& [name, value] : changed) {
      const auto position = toSize(op_.schema().argumentIndexWithName(name.cast<std::string>()).value());
      stack[position] = torch::jit::toIValue(value, op_.schema().arguments()[position].type());
    }
    try {
      call_(stack);
    } catch (python_error& error) {
      error.restore();
      throw py::error_already_set();
    } catch (const c10::Error&) {
      error_ = std::current_exception();
      throw;
    }
    return takeAll(stack);
  }

  // Raises the kernel's error in C++, which has lost its class on the way through Python.
  void rethrow() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  const OperatorHandle& op_;
  const Stack arguments_;
  CallOnStack call_;
  std::exception_ptr error_;
};

void callMeta(const OperatorHandle& op, Stack& stack, CallOnStack call) {
  const py::object* function = find(overrides().replacing, op);
  function = function == nullptr ? find(overrides().correcting, op) : function;
  if (function == nullptr) {
    call(stack);
    return;
  }
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  Runner runner{op, stack, call};
  const py::cpp_function run{[&runner](const py::dict& changed) { return runner.run(changed); }};
  py::tuple results;
  try {
    results = (*function)(overrides().call(deviceOfMetaCall().value(), asDict(op, stack), run));
  } catch (const py::error_already_set&) {
    runner.rethrow();
    throw;
  }
  torch::jit::drop(stack, op.schema().arguments().size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    torch::jit::push(stack, torch::jit::toIValue(results[i], op.schema().returns()[i].type()));
  }
}

void setMetaOverrides(py::object call, Overrides::Functions replacing, Overrides::Functions correcting) {
  overrides() = {std::move(call), std::move(replacing), std::move(correcting)};
  hooks().kernels.replaces = &replaces;
  hooks().kernels.callMeta = &callMeta;
}

}  // namespace

void bindMetaOverrides(py::module_& module) {
  module.def("set_meta_overrides", &setMetaOverrides);
  bind(module, "result_of_iterator",
       [](const std::vector<at::Tensor>& tensors, at::ScalarType dtype) { return resultOfIterator(tensors, dtype); });
}

}  // namespace torchext::python
