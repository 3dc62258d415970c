#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isnan.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include "../../libraries/fills/fill.h"
#include "../../libraries/support/included_key.h"
#include "../../libraries/support/stack_utils.h"
#include "grid.h"
#include "part_rules.h"

namespace torchext {

namespace {

// ---- Steps ----

// Elementwise operators applied to values right after they were drawn: `torch.randn(n) * 0.02`,
// `model.to(torch.bfloat16)`. They run on each stretch of a random fill while it is in the processor's cache, which
// saves one pass through memory per operator.

bool isFloatingPoint(const Geometry& geometry) {
  return c10::isFloatingType(c10::typeMetaToScalarType(geometry.dtype)) &&
         c10::elementSize(c10::typeMetaToScalarType(geometry.dtype)) >= 2;
}

// Kernels other than those for double precision use this value: 1e300 is infinite for them, and 1e-300 is 0.
float inSinglePrecision(double number) {
  return static_cast<float>(number);
}

bool isSafe(const c10::Scalar& number, bool is_factor) {
  if (number.isComplex()) {
    return false;
  }
  const float single = inSinglePrecision(number.toDouble());
  return is_factor ? std::isnormal(single) : std::isfinite(single);  // a denormal one may be flushed to 0
}

// Returns true if all other tensors are safe numbers, and `alpha`, which is rounded separately or not, is 1 or missing.
bool takesSafeNumbers(const OpNode& node) {
  const auto& tensors = node.tensors();
  const std::string& name = node.op().schema().name();
  const bool is_factor = name.rfind("aten::mul", 0) == 0 || name.rfind("aten::div", 0) == 0;
  const bool are_safe = std::all_of(tensors.begin() + 1, tensors.end(), [is_factor](const TensorArgument& argument) {
    return argument.number && isSafe(*argument.number, is_factor);
  });
  return are_safe && hasFactorOne(node);
}

// Returns `mul_` for `mul_` and `mul`: names of in-place operators end in an underscore.
std::optional<OperatorHandle> inPlace(const OperatorHandle& op) {
  const std::string& overload = op.schema().overload_name();
  if (partKindOf(op) != PartKind::kArithmetic || (!overload.empty() && overload != "Tensor")) {
    return std::nullopt;
  }
  std::string name = op.schema().name();
  if (name.back() != '_') {
    name += '_';
  }
  return c10::Dispatcher::singleton().findSchema({name, overload});
}

// Returns true for a copy to another dtype in unpinned memory of the CPU.
bool isConversion(const OpNode& node) {
  if (node.op().schema().name() != "aten::_to_copy") {
    return false;
  }
  return !argumentOf(node, "pin_memory").toOptional<bool>().value_or(false) &&
         argumentOf(node, "device").toOptional<c10::Device>().value_or(c10::kCPU).is_cpu();
}

// Returns true if the tensor's elements cover its storage completely.
bool isWholeStorage(const StorageValue& value, const Geometry& geometry) {
  return geometry.storage_offset == 0 && value.nbytes() == geometry.nbytes() && !value.isPinned();
}

Tensor stretchOf(const c10::Storage& storage, const Geometry& geometry, std::int64_t begin, std::int64_t end) {
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  auto* data = static_cast<std::byte*>(storage.mutable_data()) + (geometry.storage_offset + begin) * itemsize;
  return at::from_blob(data, {end - begin}, at::dtype(geometry.dtype));
}

// Returns true for a random fill that steps may follow: many elements in one contiguous stretch of CPU memory, with
// parameters that are finite in single precision.
bool mayHaveSteps(const OpNode& fill) {
  constexpr std::int64_t kMinElements = 65536;  // elements; smaller fills stay in the cache anyway
  if (!fill.tape() || !distributionOf(fill.op()) || fill.written().size() != 1) {
    return false;
  }
  const TensorArgument& filled = fill.tensors().front();
  const auto is_finite = [](const c10::IValue& value) {
    return !value.isDouble() || std::isfinite(inSinglePrecision(value.toDouble()));
  };
  return filled.value != nullptr && filled.value->device().is_cpu() && filled.geometry().isContiguous() &&
         c10::multiply_integers(filled.geometry().sizes) >= kMinElements &&
         std::all_of(fill.arguments().begin(), fill.arguments().end(), is_finite);
}

// Returns the geometry of the result of `node` if `node` can run as a step on memory of the geometry `shown`, which its
// first tensor argument must have; else nothing.
std::optional<Geometry> resultOfStep(const OpNode& node, const Geometry& shown) {
  if (node.threadState().settings->flushesDenormals() || node.written().size() != 1 || node.tensors().empty() ||
      node.tensors().front().value == nullptr || node.tensors().front().geometry() != shown ||
      !isFloatingPoint(shown)) {
    return std::nullopt;
  }
  const WrittenStorage& written = node.written().front();
  if (inPlace(node.op()) && takesSafeNumbers(node)) {
    const bool keeps_memory = written.is_argument
                                  ? written.position == 0 && !written.was_resized
                                  : written.geometry() == shown && isWholeStorage(*node.tensors().front().value, shown);
    return keeps_memory ? std::optional{shown} : std::nullopt;
  }
  const bool is_same_shape = !written.is_argument && written.geometry().sizes == shown.sizes &&
                             written.geometry().isContiguous() && written.geometry().storage_offset == 0;
  const bool converts =
      isConversion(node) && node.tensors().size() == 1 && is_same_shape && isFloatingPoint(written.geometry());
  return converts ? std::optional{written.geometry()} : std::nullopt;
}

// Returns true for a step that overwrites its input. Its operator may differ: `mul` runs as `mul_`.
bool worksInPlace(const OpNode& step) {
  return inPlace(step.op()).has_value();
}

// Plans the elementwise operators that follow a fill, each the only reader of the result before it.
void planStepsOf(PlannedOperator& planned, std::vector<PlannedOperator>& operators) {
  if (planned.way != Way::kCall || !mayHaveSteps(*planned.node)) {
    return;
  }
  std::optional<Geometry> shown = planned.node->tensors().front().geometry();
  const PlannedOperator* last = &planned;
  while (true) {
    const PlannedValue& written = last->writes.front();
    if (written.reads != 1 || written.isKept() || written.parts) {
      return;
    }
    PlannedOperator& next = operators[written.last_use];
    shown = next.way == Way::kCall ? resultOfStep(*next.node, *shown) : std::nullopt;
    if (!shown || next.writes.front().parts) {
      return;
    }
    if (worksInPlace(*next.node)) {
      PlannedValue& result = next.writes.front();
      result.origin = Origin::kInPlace;
      result.argument = 0;
      result.nbytes = written.nbytes;
    }
    next.way = Way::kStep;
    planned.steps.push_back(next.place);
    last = &next;
  }
}

// One elementwise operator. Only operators that compute each element by one IEEE 754 operation qualify, so that results
// do not depend on how the work is divided. Others, such as `erfinv_`, use different code for the elements that do not
// fill a vector. So do conversions of NaN to bfloat16. Steps produce no NaN, because they take only numbers that are
// finite in single precision, and no factors that are 0 there.
class ElementwiseStep {
 public:
  // `node` must be able to run as a step on the values in `source`, and must outlive this object.
  ElementwiseStep(const OpNode& node, c10::Storage source)
      : node_{&node},
        op_{inPlace(node.op())},
        read_{node.tensors().front().geometry()},
        written_{op_ ? read_ : node.written().front().geometry()},
        source_{std::move(source)},
        result_{op_ ? source_ : written_.makeEmptyTensor(c10::kCPU).storage()} {
    std::transform(node.tensors().begin() + 1, node.tensors().end(), std::back_inserter(numbers_),
                   [](const TensorArgument& argument) { return at::native::wrapped_scalar_tensor(*argument.number); });
  }

  // The storage for the results: `source`, or a new one if the dtype changes.
  const c10::Storage& result() const noexcept {
    return result_;
  }

  // Computes the elements in [begin, end). Thread-safe.
  void compute(std::int64_t begin, std::int64_t end) const {
    const KernelsOnly guard;
    std::vector<Tensor> tensors{stretchOf(source_, read_, begin, end)};
    if (!op_) {
      Tensor converted = stretchOf(result_, written_, begin, end);
      at::_ops::copy_::redispatch(KernelsOnly::kCpu, converted, tensors.front(), /*non_blocking=*/false);
      return;
    }
    tensors.insert(tensors.end(), numbers_.begin(), numbers_.end());
    Stack stack = node_->arguments(tensors);
    op_->redispatchBoxed(KernelsOnly::kCpu, &stack);
  }

 private:
  const OpNode* node_;
  // The in-place operator. Nothing for a conversion.
  std::optional<OperatorHandle> op_;
  // The arguments after the first one.
  std::vector<Tensor> numbers_;
  Geometry read_;
  Geometry written_;
  c10::Storage source_;
  c10::Storage result_;
};

// ---- Parts: NOTE [Operators that compute parts] ----

// `result` shows `ranges` of the whole result. Returns its `target` range, given in coordinates of the whole.
Tensor targetIn(const Tensor& result, const IndexRanges& ranges, const IndexRanges& target) {
  IndexRanges own;
  for (const auto i : c10::irange(ranges.size())) {
    const std::int64_t first = (target[i].first - ranges[i].first) / ranges[i].step;
    own.push_back({first, first + target[i].count()});
  }
  return narrowed(result, own);
}

void computeElementwise(const OpNode& node, const std::vector<Tensor>& arguments, const Tensor& result) {
  if (isWrittenDirectly(node)) {
    result.copy_(arguments.front());
    return;
  }
  Stack stack = node.arguments(arguments);
  node.op().callBoxed(stack);
  if (!node.written().front().is_argument) {
    result.copy_(stack.front().toTensor());
  }
}

// `stack` gives each argument an additional dimension of size one.
void placePieces(const std::vector<std::optional<Piece>>& pieces,
                 const IndexRanges& ranges,
                 const std::vector<Tensor>& arguments,
                 const Tensor& result) {
  for (const auto i : c10::irange(pieces.size())) {
    if (pieces[i]) {
      const Tensor target = targetIn(result, ranges, pieces[i]->target);
      target.copy_(arguments[i].view(target.sizes()));
    }
  }
}

// Writes the elements in `ranges` to `result`, given the elements that are read for them: a tensor for each argument,
// undefined if it is not read. Not for random fills.
void computePart(const OpNode& node,
                 PartRule rule,
                 const IndexRanges& ranges,
                 const std::vector<Tensor>& arguments,
                 const Tensor& result) {
  switch (rule) {
    case PartRule::kElementwise:
      computeElementwise(node, arguments, result);
      checkIsExact(node, result);
      break;
    case PartRule::kConstant:
      if (const auto constant = constantOf(node)) {  // `empty` writes nothing
        result.fill_(*constant);
      }
      break;
    case PartRule::kPadding:
      result.fill_(argumentOf(node, "value").toScalar());
      placePieces(piecesOf(node, rule, ranges), ranges, arguments, result);
      break;
    case PartRule::kConcatenation:
      placePieces(piecesOf(node, rule, ranges), ranges, arguments, result);
      break;
    default:
      TORCH_INTERNAL_ASSERT(false, node.op().operator_name(), " cannot be run for a part in this way.");
  }
}

// Computes the bytes in `box` of the random fill `node` into `memory`, the bytes of the box.
void fillPart(const OpNode& node, const Box& box, const c10::Storage& memory, const at::Generator& generator) {
  const Geometry& geometry = writtenGeometry(node);
  const auto itemsize = toSigned(geometry.dtype.itemsize());
  const std::int64_t count = c10::multiply_integers(geometry.sizes);
  const std::int64_t first = geometry.storage_offset * itemsize;
  const std::int64_t last = first + count * itemsize;
  auto* bytes = static_cast<std::byte*>(memory.mutable_data());
  const at::mt19937_data_pod engine = generator.get<at::CPUGeneratorImpl>()->engine().data();
  const auto requested = partialFillOf(node, engine);
  std::vector<FillRun> runs;
  const auto fill = [&] {
    std::visit([&](const auto& one) { fillParts(one, count, runs, engine); }, requested.value());
    runs.clear();
  };
  constexpr std::size_t kManyRuns = std::size_t{1} << 17U;  // 3 MiB; runs of a box with steps may be single values
  box.forEachRun([&](std::int64_t begin, std::int64_t packed, std::int64_t length) {
    const std::int64_t from = std::max(begin, first);
    const std::int64_t to = std::min(begin + length, last);
    if (from < to) {
      runs.push_back({(from - first) / itemsize, (to - first) / itemsize, bytes + packed + from - begin});
    }
    if (runs.size() == kManyRuns) {
      fill();
    }
  });
  if (!runs.empty()) {
    fill();
  }
}

// Returns the elements in `ranges` of an argument.
Tensor argumentIn(const PlannedOperator& planned,
                  std::size_t position,
                  const IndexRanges& ranges,
                  const Part& part,
                  PartRules::ReadTensor read) {
  const TensorArgument& argument = planned.node->tensors()[position];
  if (argument.number) {
    return at::native::wrapped_scalar_tensor(*argument.number);
  }
  if (argument.value == nullptr) {
    return narrowed(argument.external->tensor(), ranges);
  }
  const Geometry geometry = narrowed(argument.geometry(), ranges);
  const WrittenStorage& written = planned.node->written().front();
  const bool is_written =
      written.is_argument && isSameValue(*planned.node->tensors()[written.position].value, *argument.value);
  return is_written ? part.tensor(geometry) : read(position, geometry);
}

}  // namespace

void planSteps(std::vector<PlannedOperator>& operators) {
  for (PlannedOperator& planned : operators) {
    planStepsOf(planned, operators);
  }
}

std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                       Stack& stack,
                                                       const at::Generator& generator,
                                                       c10::ArrayRef<const OpNode*> steps) {
  std::vector<ElementwiseStep> running;
  std::vector<c10::Storage> results;
  for (const OpNode* node : steps) {
    running.emplace_back(*node, results.empty() ? stack.front().toTensor().storage() : results.back());
    results.push_back(running.back().result());
  }
  const auto after = [&running](std::int64_t begin, std::int64_t end) {
    for (const ElementwiseStep& step : running) {
      step.compute(begin, end);
    }
  };
  return replayFill(fill.op(), stack, generator, after) ? std::optional{std::move(results)} : std::nullopt;
}

void runForParts(const PlannedOperator& planned,
                 const PartsMemory& memory,
                 const at::Generator& generator,
                 PartRules::ReadTensor read) {
  const OpNode& node = *planned.node;
  for (const Part& part : static_cast<const BoxesMemory&>(memory).parts()) {
    if (planned.rule == PartRule::kRandomFill) {
      fillPart(node, *part.box, part.storage, generator);
      continue;
    }
    const auto ranges = Box{*part.box}.widenToElementsOf(writtenGeometry(node));
    if (!ranges) {
      continue;
    }
    const auto reads = readsForPart(node, planned.rule, *ranges);
    std::vector<Tensor> arguments(reads.size());
    for (const auto i : c10::irange(reads.size())) {
      arguments[i] = reads[i] ? argumentIn(planned, i, *reads[i], part, read) : Tensor{};
    }
    computePart(node, planned.rule, *ranges, arguments, part.tensor(narrowed(writtenGeometry(node), *ranges)));
  }
}

void checkIsExact(const OpNode& node, const Tensor& result) {
  if (hasManyNans(node) && result.isnan().any().item<bool>()) {
    throw PartsDiffer{};
  }
}

}  // namespace torchext
