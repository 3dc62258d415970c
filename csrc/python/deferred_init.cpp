#include "../core/deferred_init/deferred_init.h"
#include "../core/deferred_init/graph/digest.h"
#include "../core/deferred_init/state/kernel_settings.h"
#include "../core/fake/fake.h"
#include "../core/marks/source_lines.h"
#include "../core/support/leases.h"
#include "../core/support/locks.h"
#include "../core/support/recycled_memory.h"
#include "../extensions/explanations/explain.h"
#include "../extensions/explanations/operator_times.h"
#include "../extensions/explanations/recording_digest.h"
#include "../extensions/placement/adopt.h"
#include "../extensions/placement/placed.h"
#include "../extensions/placement/recorded_value.h"
#include "../extensions/placement/retained.h"
#include "../extensions/tapes/draws.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../core/support/sizes.h"
#include "bind.h"
#include "interpreter.h"
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
  raisingOwnClass([&] { materialize(placed, others, {{device, dtype}, retain, report}); });
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

// Returns the plan of an operation that runs, as a tuple in the order of the fields of
// torchext.deferred_init.PlannedOperation, or None.
pybind11::object planned(const ExplainedOperation& operation) {
  if (!operation.place) {
    return pybind11::none();
  }
  std::vector<int> origins;
  for (const Origin origin : operation.origins) {
    origins.push_back(static_cast<int>(origin));
  }
  return pybind11::make_tuple(*operation.place, static_cast<int>(operation.way), operation.steps, origins,
                              operation.nbytes, operation.drops);
}

// Returns three things: the operations, as tuples in the order of the fields of
// torchext.deferred_init.RecordedOperation, ending with the plan; for each tensor the number of its value and the view
// of it; and the peak and the total bytes written by the plan.
pybind11::tuple explainTensors(const Tensors& tensors, bool uses_computed) {
  const Explanation explanation = explain(tensors, uses_computed ? CacheUse::kReads : CacheUse::kNone);
  pybind11::list operations;
  for (const ExplainedOperation& operation : explanation.operations) {
    pybind11::list writes;
    for (const ExplainedValue& value : operation.writes) {
      writes.append(pybind11::make_tuple(value.number, value.shape, value.dtype));
    }
    operations.append(pybind11::make_tuple(operation.name, operation.call, operation.reads, writes,
                                           operation.generator_offset, operation.draws, operation.source,
                                           operation.runs, operation.parts, planned(operation)));
  }
  pybind11::list shown;
  for (const ExplainedTensor& tensor : explanation.tensors) {
    shown.append(pybind11::make_tuple(tensor.value, tensor.text));
  }
  return pybind11::make_tuple(operations, shown, pybind11::make_tuple(explanation.peak, explanation.written));
}

// Returns tuples in the order of the fields of torchext.deferred_init.timing.TimedOperator.
pybind11::list timeOperatorsOf(const Tensors& tensors, bool measures) {
  std::vector<TimedOperator> operators;
  {
    const pybind11::gil_scoped_release no_gil;
    operators = raisingOwnClass([&] { return timeOperators(tensors, measures); });
  }
  pybind11::list timed;
  for (const TimedOperator& one : operators) {
    timed.append(pybind11::make_tuple(one.name, one.tensor, one.nbytes, one.predicted, one.measured));
  }
  return timed;
}

// Returns each digest as two numbers.
std::vector<std::pair<std::uint64_t, std::uint64_t>> digestsOf(const Tensors& tensors) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> numbers;
  for (const Digest& digest : digestsOfRecordings(tensors)) {
    numbers.emplace_back(digest.low, digest.high);
  }
  return numbers;
}

// Returns the digest of a real tensor as two numbers.
std::pair<std::uint64_t, std::uint64_t> digestOfTensor(const at::Tensor& tensor) {
  const Digest digest = digestOf(tensor);
  return {digest.low, digest.high};
}

// Returns the peak memory and the total bytes written.
std::pair<std::size_t, std::size_t> needsOfEvaluating(const at::Tensor& deferred) {
  const ReplayNeeds needs = needsOf(deferred);
  return {needs.peak, needs.written};
}

// Returns the settings that an operator would be recorded with now: NOTE [Settings that kernels read].
std::map<std::string, int> kernelSettings() {
  const auto settings = KernelSettings::current()->list();
  return {settings.begin(), settings.end()};
}

at::Tensor evaluateTensor(const at::Tensor& deferred) {
  return raisingOwnClass([&] { return evaluate(deferred); });
}

at::Tensor evaluateIn(const at::Tensor& deferred, const std::shared_ptr<RecycledMemory>& memory) {
  at::Tensor values;
  {
    const RecyclingGuard guard{*memory};
    values = evaluateTensor(deferred);
  }
  memory->trim();
  return values;
}

// Returns, for each tensor, the text and the digest of each source.
std::vector<std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>>> sourcesOfTensors(
    const Tensors& tensors) {
  std::vector<std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>>> all;
  for (const std::vector<Source>& sources : sourcesOf(tensors)) {
    all.emplace_back();
    for (const Source& source : sources) {
      all.back().emplace_back(source.text, source.digest.low, source.digest.high);
    }
  }
  return all;
}

}  // namespace

void bindDeferredInit(pybind11::module_& module) {
  bind(module, "enter_deferred_init", enterDeferredInit);
  bind(module, "leave_deferred_init", leaveDeferredInit);
  module.def("all_fakes_if_in", &allFakesIfIn);
  bindPredicate<&isDeferred>(module, "is_deferred", "is_deferred(tensor: torch.Tensor) -> bool");
  module.def("materialize", torch::wrap_pybind_function(materializeTensors), pybind11::arg("placed"),
             pybind11::arg("others") = Tensors{}, pybind11::arg("device") = pybind11::none(),
             pybind11::arg("dtype") = pybind11::none(), pybind11::arg("retain") = false,
             pybind11::arg("on_done") = pybind11::none());
  bind(module, "defer_again", [](const Tensors& tensors) { raisingOwnClass([&] { deferAgain(tensors); }); });
  bind(module, "is_retained", isRetained);
  bind(module, "evaluate", evaluateTensor);
  pybind11::class_<RecycledMemory, std::shared_ptr<RecycledMemory>>(module, "RecycledMemory")
      .def(pybind11::init(&RecycledMemory::make), pybind11::arg("slack"))
      .def("trim", &RecycledMemory::trim);
  bind(module, "evaluate_in", evaluateIn);
  bind(module, "needs_of_evaluating", needsOfEvaluating);
  bind(module, "adopt", adopt);
  bind(module, "kernel_settings", kernelSettings);
  bind(module, "show_data", showData);
  pybind11::class_<RecordedValue>(module, "RecordedValue")
      .def(pybind11::init([](const at::Tensor& tensor) { return RecordedValue{tensor}; }))
      .def("is_of", torch::wrap_pybind_function_no_gil(&RecordedValue::isOf))
      .def("put_back", torch::wrap_pybind_function_no_gil(&RecordedValue::putBack))
      .def("keep_apart", torch::wrap_pybind_function_no_gil(&RecordedValue::keepApart));
  bind(module, "digest_of", digestOfTensor);
  bind(module, "skip_fill", skipFill);
  bind(module, "materialize_as_fakes", materializeAsFakes);
  bind(module, "materializes_as_fakes", materializesAsFakes);
  module.def("explain", torch::wrap_pybind_function(explainTensors), pybind11::arg("tensors"),
             pybind11::arg("uses_computed") = false);
  module.def("time_operators", torch::wrap_pybind_function(timeOperatorsOf), pybind11::arg("tensors"),
             pybind11::arg("measures"));
  bind(module, "digests_of_recordings", digestsOf);
  bind(module, "sources_of", sourcesOfTensors);
  bind(module, "enter_tracing", enterTracing);
  bind(module, "leave_tracing", leaveTracing);
}

}  // namespace torchext::python
