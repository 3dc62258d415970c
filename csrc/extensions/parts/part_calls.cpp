// Runs operators for parts: NOTE [Operators that compute parts].

#include <algorithm>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/isnan.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/fills/fill.h"
#include "../../libraries/support/stack_utils.h"
#include "grid.h"
#include "part_rules.h"
#include "parts_hook.h"

namespace torchext {

namespace {

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
