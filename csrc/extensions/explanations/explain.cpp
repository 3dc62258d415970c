#include "explain.h"

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

#include <ATen/core/jit_type.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/support/locks.h"
#include "../../core/support/sizes.h"
#include "../placement/retained.h"

namespace torchext {

using at::Tensor;
using c10::IValue;
using c10::ScalarType;
using c10::TypeKind;

namespace {

std::string nameOf(ScalarType dtype) {
  return std::string{c10::getDtypeNames(dtype).first};
}

std::string shapeOf(const Geometry& geometry) {
  return c10::str(nameOf(c10::typeMetaToScalarType(geometry.dtype)), "[", c10::Join(", ", geometry.sizes), "]");
}

// Returns the shortest decimal that equals `number` and reads as a floating-point number.
std::string formatted(double number) {
  std::string text;
  for (const int digits : {6, 15, 16, 17}) {
    std::ostringstream out;
    out << std::setprecision(digits) << number;
    text = out.str();
    if (std::strtod(text.c_str(), nullptr) == number) {
      break;
    }
  }
  return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

// Returns the enumeration that a schema declares for an argument that the dispatcher passes as an integer.
TypeKind enumerationOf(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (type->kind() == TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type->kind();
}

std::string formatted(std::int64_t number, TypeKind meaning) {
  if (meaning == TypeKind::ScalarTypeType) {
    return nameOf(static_cast<ScalarType>(number));
  }
  if (meaning == TypeKind::LayoutType) {
    return c10::str(static_cast<c10::Layout>(number));
  }
  if (meaning == TypeKind::MemoryFormatType) {
    return c10::str(static_cast<c10::MemoryFormat>(number));
  }
  return std::to_string(number);
}

// Formats a number or a bool.
std::string formatted(const IValue& number, TypeKind meaning) {
  if (number.isBool()) {
    return number.toBool() ? "True" : "False";
  }
  if (number.isInt()) {
    return formatted(number.toInt(), meaning);
  }
  if (number.isDouble()) {
    return formatted(number.toDouble());
  }
  const c10::complex<double> both = number.toComplexDouble();
  return "complex(" + formatted(both.real()) + ", " + formatted(both.imag()) + ")";
}

// Formats an index of a tensor: `[96:128, :, 0:4]`.
std::string formatted(const IndexRanges& ranges, c10::IntArrayRef sizes) {
  std::vector<std::string> parts;
  std::size_t needed = 0;
  for (const auto i : c10::irange(ranges.size())) {
    const auto [begin, end] = ranges[i];
    const bool is_all = begin == 0 && end == sizes[i];
    parts.push_back(is_all ? ":" : c10::str(begin, ":", end));
    needed = is_all ? needed : i + 1;
  }
  parts.resize(needed);
  return "[" + c10::Join(", ", parts) + "]";
}

// Writes the arguments of one call, given a text for each of its tensors in order.
class CallFormatter {
 public:
  CallFormatter(const OpNode& node, std::vector<std::string> tensors) : node_{node}, tensors_{std::move(tensors)} {}

  std::string run();

 private:
  std::string format(const IValue& value, TypeKind meaning);
  std::string formatAll(c10::ArrayRef<IValue> values);

  const OpNode& node_;
  std::vector<std::string> tensors_;
  std::size_t next_tensor_ = 0;
};

// Omits arguments that have their default values; those after an omitted one are written by name.
std::string CallFormatter::run() {
  std::vector<std::string> parts;
  bool by_name = false;
  for (const auto i : c10::irange(node_.arguments().size())) {
    const c10::Argument& argument = node_.op().schema().arguments()[i];
    const TypeKind meaning = enumerationOf(argument);
    const std::string text = format(node_.arguments()[i], meaning);
    // Python passes `pin_memory=False` to every factory.
    const bool is_noise = argument.name() == "pin_memory" && text == "False";
    if (is_noise || (argument.default_value() && text == format(*argument.default_value(), meaning))) {
      by_name = true;
      continue;
    }
    by_name = by_name || argument.kwarg_only();
    parts.push_back(by_name ? argument.name() + "=" + text : text);
  }
  return c10::str(node_.op().operator_name(), "(", c10::Join(", ", parts), ")");
}

std::string CallFormatter::format(const IValue& value, TypeKind meaning) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? tensors_[next_tensor_++] : "None";
  }
  if (value.isNone()) {
    return "None";
  }
  if (value.isScalar()) {
    return formatted(value, meaning);
  }
  if (value.isString()) {
    return "'" + value.toStringRef() + "'";
  }
  if (value.isDevice()) {
    return value.toDevice().str();
  }
  if (value.isGenerator()) {
    return "generator on " + value.toGenerator().device().str();
  }
  if (value.isList()) {
    return "[" + formatAll(value.toListRef()) + "]";
  }
  if (value.isTuple()) {
    return "(" + formatAll(value.toTupleRef().elements()) + ")";
  }
  return "<" + value.tagKind() + ">";
}

std::string CallFormatter::formatAll(c10::ArrayRef<IValue> values) {
  std::vector<std::string> parts;
  parts.reserve(values.size());
  for (const IValue& value : values) {
    parts.push_back(format(value, TypeKind::AnyType));
  }
  return c10::Join(", ", parts);
}

// Makes one explanation.
class Explainer {
 public:
  Explanation run(at::ArrayRef<Tensor> tensors, CacheUse cache);

 private:
  void explainNode(const OpNode& node);
  void explainPlan(ExplainedOperation& operation, const PlannedOperator& planned) const;
  static std::optional<std::string> partsOf(const PlannedOperator& planned);
  std::string describe(const TensorArgument& argument, std::vector<std::int64_t>& reads);
  ExplainedTensor show(const StorageValue& value, const Geometry& shown_as);
  Geometry wholeOf(const OpNode& node, const WrittenStorage& written);
  ExplainedValue addValue(const Geometry& geometry);
  std::int64_t numberOf(const StorageValue& value, const Geometry& shown_as);
  std::int64_t addConstant(const StorageValue& value, const Geometry& shown_as);

  // The number of the first output of an operator. The others follow in the order of `OpNode::written()`.
  std::unordered_map<const OpNode*, std::int64_t> first_of_node_;
  std::unordered_map<const StorageValue*, std::int64_t> constants_;
  std::optional<ReplayPlan> plan_;
  std::unordered_map<const OpNode*, const PlannedOperator*> planned_;
  // The geometry of each value, by number.
  std::vector<Geometry> geometries_;
  Explanation explanation_;
};

Explanation Explainer::run(at::ArrayRef<Tensor> tensors, CacheUse cache) {
  std::vector<Recording> recordings;
  for (const Tensor& tensor : tensors) {
    recordings.push_back(recordingOf(tensor));
    TORCH_CHECK_VALUE(recordings.back().value != nullptr, "Cannot explain a tensor of shape ", tensor.sizes(),
                      ": it has no recording. Explain tensors that are still deferred, or that were "
                      "materialized with `retain_graph=True`.");
  }
  std::vector<StorageValuePtr> values;
  values.reserve(recordings.size());
  for (const Recording& recording : recordings) {
    values.push_back(recording.value);
  }
  std::vector<StorageValuePtr> wanted;
  for (const StorageValuePtr& value : values) {
    if (std::find(wanted.begin(), wanted.end(), value) == wanted.end()) {
      wanted.push_back(value);
    }
  }
  plan_.emplace(std::move(wanted), cache);
  for (const PlannedOperator& planned : plan_->operators()) {
    planned_[planned.node] = &planned;
  }
  for (const OpNode* node : operatorsBehind(values)) {
    explainNode(*node);
  }
  for (const Recording& recording : recordings) {
    explanation_.tensors.push_back(show(*recording.value, recording.geometry));
  }
  explanation_.peak = plan_->peak();
  explanation_.written = plan_->written();
  return std::move(explanation_);
}

void Explainer::explainNode(const OpNode& node) {
  ExplainedOperation operation;
  operation.name = node.op().schema().name();
  std::vector<std::string> tensors;
  tensors.reserve(node.tensors().size());
  for (const TensorArgument& argument : node.tensors()) {
    tensors.push_back(describe(argument, operation.reads));
  }
  operation.call = CallFormatter{node, std::move(tensors)}.run();
  first_of_node_[&node] = toSigned(geometries_.size());
  for (const WrittenStorage& written : node.written()) {
    operation.writes.push_back(addValue(wholeOf(node, written)));
  }
  if (node.tape()) {
    operation.generator_offset = node.tape()->draws();
    operation.draws = node.tape()->length();
  }
  operation.source = std::string{node.source()};
  if (const auto found = planned_.find(&node); found != planned_.end()) {
    explainPlan(operation, *found->second);
  }
  // An operator that only allocates writes nothing that is read. If it is not planned, other code allocates the memory.
  operation.runs = operation.place.has_value() || onlyAllocates(node.op());
  explanation_.operations.push_back(std::move(operation));
}

// An operator that runs for parts may compute none of them.
void Explainer::explainPlan(ExplainedOperation& operation, const PlannedOperator& planned) const {
  const std::optional<std::string> parts = partsOf(planned);
  if (planned.way == Way::kNotAtAll || !parts) {
    return;
  }
  operation.parts = *parts;
  operation.place = planned.place;
  operation.way = planned.way;
  operation.steps = planned.steps;
  for (const PlannedValue& written : planned.writes) {
    operation.origins.push_back(written.origin);
    operation.nbytes.push_back(written.nbytes);
  }
  for (const LiveValue& value : planned.last_uses) {
    if (!plan_->of(value).is_wanted) {
      const OpNode* writer = plan_->operators()[value.writer].node;
      operation.drops.push_back(first_of_node_.at(writer) + toSigned(value.value->output()));
    }
  }
}

// Returns nothing if the boxes contain no element of the output, and an empty string if they contain all.
std::optional<std::string> Explainer::partsOf(const PlannedOperator& planned) {
  if (planned.way != Way::kParts) {
    return "";
  }
  std::vector<std::string> texts;
  std::vector<Box> boxes = planned.writes.front().parts->boxes;
  std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.ranges() < b.ranges(); });
  for (Box& box : boxes) {
    if (const auto ranges = box.widenToElementsOf(writtenGeometry(*planned.node))) {
      texts.push_back(formatted(*ranges, writtenGeometry(*planned.node).sizes));
    }
  }
  const bool are_all = std::find(texts.begin(), texts.end(), "[]") != texts.end();
  return texts.empty() ? std::nullopt : std::optional{are_all ? "" : c10::Join(", ", texts)};
}

std::string Explainer::describe(const TensorArgument& argument, std::vector<std::int64_t>& reads) {
  if (argument.device) {
    return "like " + shapeOf(argument.geometry());
  }
  if (argument.number) {
    return formatted(IValue(*argument.number), TypeKind::NumberType);
  }
  if (argument.value == nullptr) {
    const at::Tensor& tensor = argument.external->tensor();
    return c10::str("real ", nameOf(tensor.scalar_type()), "[", c10::Join(", ", tensor.sizes()), "]");
  }
  ExplainedTensor tensor = show(*argument.value, argument.geometry());
  reads.push_back(tensor.value);
  return std::move(tensor.text);
}

ExplainedTensor Explainer::show(const StorageValue& value, const Geometry& shown_as) {
  const std::int64_t number = numberOf(value, shown_as);
  std::string text = c10::str("%", number);
  if (geometries_[toSize(number)] != shown_as) {
    text += " as " + shapeOf(shown_as);
    if (shown_as.storage_offset != 0) {
      text += c10::str(" at ", shown_as.storage_offset);
    }
  }
  return {number, std::move(text)};
}

// An operator that writes through a view leaves the rest unchanged: the value has the geometry of the whole.
Geometry Explainer::wholeOf(const OpNode& node, const WrittenStorage& written) {
  if (!written.is_argument || written.was_resized) {
    return written.geometry();
  }
  const TensorArgument& argument = node.tensors()[written.position];
  return geometries_[toSize(numberOf(*argument.value, argument.geometry()))];
}

ExplainedValue Explainer::addValue(const Geometry& geometry) {
  geometries_.push_back(geometry);
  return {toSigned(geometries_.size()) - 1,
          {geometry.sizes.begin(), geometry.sizes.end()},
          c10::typeMetaToScalarType(geometry.dtype)};
}

std::int64_t Explainer::numberOf(const StorageValue& value, const Geometry& shown_as) {
  if (value.writer() != nullptr) {
    return first_of_node_.at(value.writer().get()) + toSigned(value.output());
  }
  const auto known = constants_.find(&value);
  return known == constants_.end() ? addConstant(value, shown_as) : known->second;
}

std::int64_t Explainer::addConstant(const StorageValue& value, const Geometry& shown_as) {
  ExplainedOperation operation;
  operation.name = "constant";
  operation.call = c10::str("constant(", value.constant().nbytes(), " bytes)");
  operation.writes.push_back(addValue(shown_as));
  const std::int64_t number = operation.writes.front().number;
  constants_[&value] = number;
  explanation_.operations.push_back(std::move(operation));
  return number;
}

}  // namespace

Explanation explain(at::ArrayRef<Tensor> tensors, CacheUse cache) {
  const Locked lock{LockRank::kReplay};  // a value that another thread reads loses its operators: `fold()`
  return Explainer{}.run(tensors, cache);
}

}  // namespace torchext
