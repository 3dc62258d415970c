#include "../core/fake/fake.h"
#include "../extensions/digests/digest.h"
#include "../extensions/placement/placed.h"
#include "../extensions/tapes/draws.h"
#include "../libraries/support/interpreter.h"
#include "../libraries/support/large_memory.h"
#include "../libraries/support/leases.h"
#include "../libraries/support/locks.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torchext/deferred_init.h>

#include "../core/fake/calls/errors.h"
#include "../libraries/support/sizes.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

using Tensors = std::vector<at::Tensor>;

// The arguments of torchext.deferred_init.materialize_module(), unpacked. `on_done` is called once per storage, with
// its size.
void materializeTensors(const Tensors& placed,
                        const Tensors& others,
                        const std::optional<at::Device>& device,
                        const std::optional<at::ScalarType>& dtype,
                        bool retain,
                        const std::optional<pybind11::function>& on_done) {
  const auto report = [&on_done](std::size_t nbytes) {
    if (on_done) {
      const pybind11::gil_scoped_acquire gil;
      (*on_done)(nbytes);
    }
  };
  const pybind11::gil_scoped_release no_gil;
  translatingFailures([&] { materialize(placed, others, {{device, dtype}, retain, report}); });
}

// Returns the fakes in `container`, and in the dictionaries, lists and tuples in it, if no other fake storage is alive
// and no block that makes fakes is open. Otherwise returns None: fakes may be anywhere, for example in custom objects.
// Runs no Python code.
pybind11::object allFakesIfIn(const pybind11::object& container) {
  pybind11::list fakes;
  bool is_complete = true;
  std::unordered_set<const c10::StorageImpl*> storages;
  std::unordered_set<PyObject*> seen{container.ptr()};
  std::vector<PyObject*> pending{container.ptr()};
  const auto visit = [&](PyObject* value) {
    if (isTensor(value)) {
      if (const at::Tensor& tensor = THPVariable_Unpack(value); isFake(tensor)) {
        is_complete = is_complete && tensor.has_storage();
        storages.insert(is_complete ? tensor.storage().unsafeGetStorageImpl() : nullptr);
        fakes.append(pybind11::handle(value));
      }
    } else if ((PyDict_CheckExact(value) || PyList_CheckExact(value) || PyTuple_CheckExact(value)) &&
               seen.insert(value).second) {
      pending.push_back(value);
    }
  };
  while (!pending.empty()) {
    PyObject* const current = pending.back();
    pending.pop_back();
    if (PyDict_CheckExact(current)) {
      PyObject* value = nullptr;
      for (Py_ssize_t i = 0; PyDict_Next(current, &i, nullptr, &value) != 0;) {
        visit(value);
      }
    } else {
      PyObject* const* const items = PySequence_Fast_ITEMS(current);
      std::for_each(items, items + PySequence_Fast_GET_SIZE(current), visit);
    }
  }
  // Only fake storages and open blocks hold this lease.
  is_complete = is_complete && leaseOfFakes().holders() == toSigned(storages.size());
  return is_complete ? pybind11::object{std::move(fakes)} : pybind11::none();
}

at::Tensor evaluateTensor(const at::Tensor& deferred) {
  return translatingFailures([&] { return evaluate(deferred); });
}

at::Tensor evaluateIn(const at::Tensor& deferred, const std::shared_ptr<RecycledMemory>& memory) {
  at::Tensor values;
  memory->serve([&] { values = evaluateTensor(deferred); });
  memory->trim();
  return values;
}

}  // namespace

void bindDeferredInit(pybind11::module_& module) {
  bindBlock<DeferredInitGuard>(module, "enter_deferred_init", "leave_deferred_init", "deferred_init()");
  module.def("all_fakes_if_in", &allFakesIfIn);
  bindPredicate<&isDeferred>(module, "is_deferred", "is_deferred(tensor: torch.Tensor) -> bool");
  module.def("materialize", torch::wrap_pybind_function(materializeTensors), pybind11::arg("placed"),
             pybind11::arg("others") = Tensors{}, pybind11::arg("device") = pybind11::none(),
             pybind11::arg("dtype") = pybind11::none(), pybind11::arg("retain") = false,
             pybind11::arg("on_done") = pybind11::none());
  bind(module, "defer_again", [](const Tensors& tensors) { translatingFailures([&] { deferAgain(tensors); }); });
  bind(module, "is_retained", isRetained);
  bind(module, "evaluate", evaluateTensor);
  pybind11::class_<RecycledMemory, std::shared_ptr<RecycledMemory>>(module, "RecycledMemory")
      .def(pybind11::init(&RecycledMemory::make), pybind11::arg("slack"))
      .def("trim", &RecycledMemory::trim);
  bind(module, "evaluate_in", evaluateIn);
  bind(module, "needs_of_evaluating", needsOf);
  bind(module, "adopt", adopt);
  bind(module, "show_data", showData);
  pybind11::class_<RecordedValue>(module, "RecordedValue")
      .def(pybind11::init([](const at::Tensor& tensor) { return RecordedValue{tensor}; }))
      .def("is_of", torch::wrap_pybind_function_no_gil(&RecordedValue::isOf))
      .def("put_back", torch::wrap_pybind_function_no_gil(&RecordedValue::putBack))
      .def("keep_apart", torch::wrap_pybind_function_no_gil(&RecordedValue::keepApart));
  bind(module, "digest_of", digestOf);
  bind(module, "skip_fill", skipFill);
  bind(module, "materialize_as_fakes", materializeAsFakes);
  bind(module, "materializes_as_fakes", materializesAsFakes);
  bind(module, "digests_of_recordings", [](const Tensors& tensors) { return digestsOfRecordings(tensors); });
  bind(module, "sources_of", [](const Tensors& tensors) { return sourcesOf(tensors); });
  bindBlock<TracingGuard>(module, "enter_tracing", "leave_tracing", "tracing()");
}

}  // namespace torchext::python
