#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../core/deferred_init/graph/op_graph.h"
#include "../core/deferred_init/plan/replay_plan.h"
#include "../core/deferred_init/random/tape.h"
#include "../core/deferred_init/replay/replay.h"
#include "../core/deferred_init/state/real_dispatch.h"
#include "../core/fake/calls/errors.h"
#include "../core/fake/calls/op_traits.h"
#include "../extensions/digests/digest.h"
#include "../extensions/parts/grid.h"
#include "../extensions/parts/plan_costs.h"
#include "../extensions/placement/placed.h"
#include "../libraries/support/locks.h"
#include "bind.h"
#include "module.h"

namespace py = pybind11;

namespace torchext::python {

namespace {

using Tensors = std::vector<at::Tensor>;

template <typename Items, typename Convert>
py::list listOf(const Items& items, const Convert& convert) {
  py::list list;
  for (const auto& item : items) {
    list.append(convert(item));
  }
  return list;
}

py::tuple tupleOf(c10::IntArrayRef sizes) {
  return listOf(sizes, [](std::int64_t size) { return size; });
}

// Returns the enumeration that a schema declares for an argument that the dispatcher passes as an integer.
c10::TypeKind enumerationOf(const c10::Argument& argument) {
  const auto optional = argument.real_type()->cast<c10::OptionalType>();
  return (optional == nullptr ? argument.real_type() : optional->getElementType())->kind();
}

py::object asEnumeration(std::int64_t number, c10::TypeKind enumeration) {
  switch (enumeration) {
    case c10::TypeKind::ScalarTypeType:
      return py::cast(static_cast<c10::ScalarType>(number));
    case c10::TypeKind::LayoutType:
      return py::cast(static_cast<c10::Layout>(number));
    case c10::TypeKind::MemoryFormatType:
      return py::cast(static_cast<c10::MemoryFormat>(number));
    default:
      return py::int_(number);
  }
}

// Returns the place of the operator that writes `value` in a plan, or None.
py::object placeOf(const LiveValue& value) {
  return value.hasWriter() ? py::cast(value.writer) : py::none();
}

// Converts a recording and its plan to the named tuples of `torchext/_C.pyi`. The caller holds the lock `kReplay`.
//
// Making Python objects may run code of the program, such as finalizers and signal handlers. On this thread they can
// read deferred tensors, whose values then lose their operators: `fold()`. So the view keeps the operators alive, and
// reads the writers of all values before it makes the first object.
class RecordingView {
 public:
  RecordingView(const ReplayPlan& plan, const std::vector<StorageValuePtr>& values)
      : plan_{plan}, nodes_{operatorsBehind(values)} {
    for (const OpNode* node : nodes_) {
      index_.emplace(node, index_.size());
    }
    for (const PlannedOperator& planned : plan.operators()) {
      planned_.emplace(planned.node, &planned);
    }
    for (const StorageValuePtr& value : values) {
      keep(*value);
    }
    for (const OpNode* node : nodes_) {
      for (const TensorArgument& argument : node->tensors()) {
        if (argument.value != nullptr) {
          keep(*argument.value);
        }
      }
    }
  }

  py::list operators() const {
    return listOf(nodes_, [this](const OpNode* node) { return operatorOf(*node); });
  }

  py::object tensor(const StorageValue* value, const Geometry& geometry, bool is_real = false) const {
    return module_.attr("RecordedTensor")(value == nullptr ? py::none() : keyOf(*value), is_real,
                                          tupleOf(geometry.sizes), tupleOf(geometry.strides), geometry.storage_offset,
                                          c10::typeMetaToScalarType(geometry.dtype),
                                          py::make_tuple(geometry.is_conj, geometry.is_neg, geometry.is_zero));
  }

 private:
  // Constants have an address in place of an output.
  struct Key {
    std::optional<std::size_t> writer;
    std::uintptr_t output;
    std::size_t nbytes;
  };

  void keep(const StorageValue& value) {
    const auto& writer = value.writer();
    if (writer == nullptr) {
      keys_.emplace(&value, Key{std::nullopt, reinterpret_cast<std::uintptr_t>(&value), value.constant().nbytes()});
    } else if (keys_.emplace(&value, Key{index_.at(writer.get()), value.output(), value.nbytes()}).second) {
      kept_.push_back(writer);
    }
  }

  py::object operatorOf(const OpNode& node) const {
    const py::list tensors = listOf(node.tensors(), [this](const TensorArgument& one) { return tensorOf(one); });
    py::list arguments;
    py::iterator next = py::iter(tensors);
    py::iterator none = py::iter(py::tuple{});
    for (const auto i : c10::irange(node.arguments().size())) {
      const c10::Argument& argument = node.op().schema().arguments()[i];
      const c10::TypeKind enumeration = enumerationOf(argument);
      const auto& standard = argument.default_value();
      arguments.append(py::make_tuple(argument.name(), argument.kwarg_only(),
                                      argumentOf(node.arguments()[i], enumeration, next),
                                      standard ? argumentOf(*standard, enumeration, none) : py::ellipsis{}));
    }
    const py::list writes = listOf(node.written(), [&](const WrittenStorage& written) {
      const bool keeps_size = written.is_argument && !written.was_resized;
      return keeps_size ? py::object{tensors[written.position]} : tensor(nullptr, written.geometry());
    });
    const TapePositionPtr& tape = node.tape();
    return module_.attr("RecordedOperator")(
        node.op().schema().name(), node.op().schema().overload_name(), arguments, tensors, writes,
        tape ? py::object{py::make_tuple(tape->device(), tape->draws(), tape->length())} : py::none(),
        std::string{node.source()}, onlyAllocates(node.op()), planOf(node));
  }

  py::object tensorOf(const TensorArgument& argument) const {
    if (argument.number) {
      return torch::jit::toPyObject(*argument.number);
    }
    if (argument.external) {
      Geometry shown;  // sparse tensors have no strides
      shown.sizes = argument.external->tensor().sizes();
      shown.dtype = argument.external->tensor().dtype();
      return tensor(nullptr, shown, /*is_real=*/true);
    }
    return tensor(argument.device ? nullptr : argument.value.get(), argument.geometry());
  }

  py::object keyOf(const StorageValue& value) const {
    const auto& [writer, output, nbytes] = keys_.at(&value);
    return py::make_tuple(writer, output, nbytes);
  }

  py::object argumentOf(const c10::IValue& value, c10::TypeKind enumeration, py::iterator& tensors) const {
    const auto item = [&](const c10::IValue& one) { return argumentOf(one, c10::TypeKind::AnyType, tensors); };
    if (value.isTensor()) {
      return value.toTensor().defined() ? py::reinterpret_borrow<py::object>(*tensors++) : py::none();
    }
    if (value.isList()) {
      return listOf(value.toListRef(), item);
    }
    if (value.isTuple()) {
      return py::tuple(listOf(value.toTupleRef().elements(), item));
    }
    return value.isInt() ? asEnumeration(value.toInt(), enumeration) : torch::jit::toPyObject(value);
  }

  py::object planOf(const OpNode& node) const {
    const auto found = planned_.find(&node);
    if (found == planned_.end()) {
      return py::none();
    }
    const PlannedOperator& planned = *found->second;
    const py::list memory = listOf(planned.writes, [](const PlannedValue& written) {
      return py::make_tuple(static_cast<int>(written.origin), written.nbytes);
    });
    py::list drops;
    for (const LiveValue& value : planned.last_uses) {
      if (!plan_.of(value).is_wanted) {
        drops.append(py::make_tuple(index_.at(plan_.operators()[value.writer].node), value.value->output()));
      }
    }
    return module_.attr("PlannedOperator")(planned.place, static_cast<int>(planned.way), shareOf(planned),
                                           planned.steps, partsOf(planned), listOf(planned.reads, placeOf), memory,
                                           drops);
  }

  // Returns the parts in order of their position: for each dimension of the output a slice, or None for all of it.
  // Returns None for an operator that runs as a whole.
  static py::object partsOf(const PlannedOperator& planned) {
    if (planned.way != Way::kParts) {
      return planned.way == Way::kNotAtAll ? py::object{py::list{}} : py::none();
    }
    const Geometry& written = planned.node->written().front().geometry();
    std::vector<Box> boxes = boxesOf(*planned.writes.front().parts);
    std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) {
      return std::lexicographical_compare(a.ranges().begin(), a.ranges().end(), b.ranges().begin(), b.ranges().end(),
                                          [](const IndexRange& a_range, const IndexRange& b_range) {
                                            return std::tie(a_range.first, a_range.last, a_range.step) <
                                                   std::tie(b_range.first, b_range.last, b_range.step);
                                          });
    });
    py::list parts;
    for (Box& box : boxes) {
      if (const auto ranges = box.widenToElementsOf(written)) {
        py::list part;
        for (const auto i : c10::irange(ranges->size())) {
          const IndexRange& range = ranges->at(i);
          const bool is_all = range.count() == written.sizes[i];
          part.append(is_all ? py::none() : py::object{py::slice(range.first, range.last, range.step)});
        }
        parts.append(part);
      }
    }
    return parts;
  }

  const ReplayPlan& plan_;
  std::vector<const OpNode*> nodes_;
  std::unordered_map<const OpNode*, std::size_t> index_;
  std::unordered_map<const OpNode*, const PlannedOperator*> planned_;
  std::unordered_map<const StorageValue*, Key> keys_;
  std::vector<std::shared_ptr<const OpNode>> kept_;
  const py::module_ module_ = py::module_::import("torchext._C");
};

// Returns the operators that led to `tensors`, in recording order; for each tensor, its recording and the place of the
// operator in the plan that writes it; the peak and the total bytes written by the plan; and, if `measures` is set, the
// seconds of each planned operator. Then they run now, and each result is dropped when it is no longer needed.
py::tuple readRecordings(const Tensors& tensors, bool uses_computed, bool measures) {
  const Locked lock{LockRank::kReplay};  // a value that another thread reads loses its operators: `fold()`
  std::vector<Recording> recordings;
  std::vector<StorageValuePtr> values;
  for (const at::Tensor& tensor : tensors) {
    recordings.push_back(recordingOf(tensor));
    const StorageValuePtr& value = recordings.back().value;
    TORCH_CHECK_VALUE(value != nullptr, "Cannot explain a tensor of shape ", tensor.sizes(),
                      ": it has no recording. Explain tensors that are still deferred, or that were materialized with "
                      "`retain_graph=True`.");
    if (std::find(values.begin(), values.end(), value) == values.end()) {
      values.push_back(value);
    }
  }
  Replay replay{values, ignoreProgress, uses_computed ? CacheUse::kReads : CacheUse::kNone};
  const ReplayPlan& plan = replay.plan();
  const RecordingView view{plan, values};
  const py::list operators = view.operators();
  py::list shown;
  for (const auto& [value, geometry] : recordings) {
    const auto index = static_cast<std::size_t>(std::find(values.begin(), values.end(), value) - values.begin());
    shown.append(py::make_tuple(view.tensor(value.get(), geometry), placeOf(plan.wanted()[index])));
  }
  const py::tuple needs = py::make_tuple(peakOf(plan), bytesWrittenBy(plan));
  std::vector<double> seconds;
  if (measures) {
    const py::gil_scoped_release no_gil;
    seconds = translatingFailures([&replay] { return replay.runAndDrop(); });
  }
  return py::make_tuple(operators, shown, needs, seconds);
}

// Returns the seconds that an operator on a new tensor of `count` elements takes in a replay. Its other arguments are
// `arguments`, which are given by position, with None for the tensor.
double secondsOfCall(const std::string& name,
                     const std::string& overload,
                     const py::list& arguments,
                     at::ScalarType dtype,
                     std::int64_t count) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  torch::jit::Stack stack;
  for (const auto i : c10::irange(arguments.size())) {
    const c10::TypePtr& type = op.schema().arguments()[i].type();
    const bool is_tensor = type->kind() == c10::TypeKind::TensorType;
    stack.push_back(is_tensor ? c10::IValue{at::Tensor{}} : torch::jit::toIValue(arguments[i], type));
  }
  const py::gil_scoped_release no_gil;
  const RealDispatch guard;
  const at::Generator generator = at::detail::createCPUGenerator();
  const auto start = std::chrono::steady_clock::now();
  for (c10::IValue& argument : stack) {
    argument = argument.isTensor() ? at::empty({count}, at::dtype(dtype)) : argument;
  }
  if (takesGenerator(op)) {
    callWithGenerator(op, stack, generator);
  } else {
    op.callBoxed(stack);
  }
  stack.clear();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void bindRecordings(py::module_& module) {
  const py::object named = py::module_::import("collections").attr("namedtuple");
  module.attr("RecordedTensor") = named("RecordedTensor", "value is_real sizes strides offset dtype bits");
  module.attr("RecordedOperator") =
      named("RecordedOperator", "name overload arguments tensors writes tape source allocates plan");
  module.attr("PlannedOperator") = named("PlannedOperator", "place way share steps parts reads memory drops");
  module.def("read_recordings", torch::wrap_pybind_function(readRecordings), py::arg("tensors"),
             py::arg("uses_computed") = false, py::arg("measures") = false);
  module.def("seconds_of_call", torch::wrap_pybind_function(secondsOfCall));
}

}  // namespace torchext::python
