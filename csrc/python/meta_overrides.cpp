#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
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

// The functions of torchext/fake/meta_overrides.py, by operator, and whether each replaces the Meta kernel, which may
// be missing. Set before there are fakes, never changed, and leaked: threads may run operators until the process ends.
struct Overrides {
  using Function = std::pair<py::object, bool>;
  py::object call;  // the class of the argument of the functions
  std::unordered_map<c10::OperatorName, Function> functions;
};

Overrides& overrides() {
  static auto* const all = new Overrides;
  return *all;
}

const Overrides::Function* find(const OperatorHandle& op) {
  const auto found = overrides().functions.find(op.operator_name());
  return found == overrides().functions.end() ? nullptr : &found->second;
}

bool replaces(const OperatorHandle& op) {
  const auto* const found = find(op);
  return found != nullptr && found->second;
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

// Calls the Meta kernel for a function of Python, until `end()`: Python may keep it, in the frames of a traceback.
class Runner {
 public:
  Runner(const OperatorHandle& op, const Stack& stack, CallOnStack call)
      : op_{op}, arguments_(topOf(stack, op.schema().arguments().size()).vec()), call_{call} {}

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
    return takeAll(stack);
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
    return function(overrides().call(deviceOfMetaCall().value(), asDict(op, stack), run));
  } catch (const py::error_already_set&) {
    runner->rethrow();
    throw;
  }
}

// On the meta device, real tensors are also described by Meta kernels.
void callMeta(const OperatorHandle& op, Stack& stack, CallOnStack call) {
  const auto* const found = find(op);
  if (found == nullptr || (!found->second && deviceOfMetaCall()->is_meta())) {
    call(stack);
    return;
  }
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  const py::tuple results = callOverride(found->first, op, stack, call);
  torch::jit::drop(stack, op.schema().arguments().size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    torch::jit::push(stack, torch::jit::toIValue(results[i], op.schema().returns()[i].type()));
  }
}

void setMetaOverrides(py::object call, const std::unordered_map<std::string, std::pair<py::object, bool>>& functions) {
  overrides().call = std::move(call);
  for (const auto& [name, function] : functions) {
    const std::size_t dot = std::min(name.find('.'), name.size());
    overrides().functions[{name.substr(0, dot), name.substr(std::min(dot + 1, name.size()))}] = function;
  }
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
