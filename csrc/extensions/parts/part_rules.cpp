#include "part_rules.h"

#include <algorithm>
#include <cmath>

#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/fills/fill.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/registrations.h"
#include "../tapes/twister_tape.h"

namespace torchext {

namespace {

PartKind kindOf(const OpNode& node) {
  return partKindOf(node.op());
}

c10::ScalarType dtypeOf(const Geometry& geometry) {
  return c10::typeMetaToScalarType(geometry.dtype);
}

bool isHalf(c10::ScalarType dtype) {
  return dtype == c10::kHalf || dtype == c10::kBFloat16;
}

// The dtypes whose conversions are exact, or roundings of IEEE 754.
bool isOrdinary(c10::ScalarType dtype) {
  return isHalf(dtype) || dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kComplexFloat ||
         dtype == c10::kComplexDouble || c10::isIntegralType(dtype, /*includeBool=*/true);
}

c10::ScalarType dtypeOf(const TensorArgument& argument) {
  if (argument.number) {
    return argument.number->type();
  }
  return argument.external != nullptr ? argument.external->tensor().scalar_type() : dtypeOf(argument.geometry());
}

c10::IntArrayRef sizesOf(const TensorArgument& argument) {
  if (argument.number) {
    return {};
  }
  return argument.external != nullptr ? argument.external->tensor().sizes()
                                      : c10::IntArrayRef(argument.geometry().sizes);
}

// ---- Choosing the rule ----

// Returns true for one result, or one argument that keeps its shape, in unpinned memory.
bool writesOneTensor(const OpNode& node) {
  if (node.written().size() != 1) {
    return false;
  }
  const WrittenStorage& written = node.written().front();
  if (!written.is_argument) {
    return written.position == 0 && !isPinMemory(node.op());
  }
  const TensorArgument& argument = node.tensors()[written.position];
  return !written.was_resized && written.geometry() == argument.geometry() && !argument.value->isPinned();
}

// Returns true if the call reads the elements that it writes through another tensor. The order of such reads and writes
// depends on the strides. PyTorch refuses some of these calls (`at::assert_no_partial_overlap()`), but not all.
bool readsWhatItWrites(const OpNode& node) {
  const WrittenStorage& written = node.written().front();
  if (!written.is_argument) {
    return false;
  }
  const TensorArgument& target = node.tensors()[written.position];
  return std::any_of(node.tensors().begin(), node.tensors().end(), [&target](const TensorArgument& argument) {
    return argument.value != nullptr && isSameValue(*argument.value, *target.value) &&
           argument.geometry() != target.geometry();
  });
}

// Returns true if `is_wanted` returns true for the dtypes of the result and of all arguments, numbers included.
template <typename Predicate>
bool allDtypes(const OpNode& node, const Predicate& is_wanted) {
  return is_wanted(dtypeOf(writtenGeometry(node))) &&
         std::all_of(node.tensors().begin(), node.tensors().end(),
                     [&is_wanted](const TensorArgument& argument) { return is_wanted(dtypeOf(argument)); });
}

bool areOrdinary(const OpNode& node) {
  return allDtypes(node, isOrdinary) &&
         std::all_of(node.tensors().begin(), node.tensors().end(), [](const TensorArgument& argument) {
           return argument.external == nullptr || isPlain(argument.external->tensor());
         });
}

// Converting a number that an integer cannot hold is undefined, and the result differs between instructions.
bool mayOverflow(const OpNode& node) {
  return c10::isIntegralType(dtypeOf(writtenGeometry(node)), /*includeBool=*/false) &&
         !allDtypes(node, [](c10::ScalarType dtype) { return c10::isIntegralType(dtype, /*includeBool=*/true); });
}

bool areReal(const OpNode& node) {
  return allDtypes(node, [](c10::ScalarType dtype) { return !c10::isComplexType(dtype); });
}

// Returns true for a tensor of the result's dtype. A number would become a tensor of another one.
bool hasDtypeOfResult(const OpNode& node, const TensorArgument& argument) {
  return !argument.number && dtypeOf(argument) == dtypeOf(writtenGeometry(node));
}

// Kernels read a tensor of one element as a number, unconverted; they convert a tensor of several elements to the
// result's dtype first. The choice must not depend on the part.
bool convertsArguments(const OpNode& node) {
  return std::any_of(node.tensors().begin(), node.tensors().end(), [&node](const TensorArgument& argument) {
    return !sizesOf(argument).empty() && dtypeOf(argument) != dtypeOf(writtenGeometry(node));
  });
}

// A sum with a factor is rounded once or twice. The zero that `clamp(min=0)` returns for -0 depends on the instruction.
bool hasOneResult(const OpNode& node) {
  const auto is_nonzero = [](const IValue& bound) { return bound.isNone() || !bound.toScalar().equal(0); };
  if (kindOf(node) == PartKind::kClamp) {
    return node.tensors().size() == 1 && is_nonzero(argumentOf(node, "min")) && is_nonzero(argumentOf(node, "max"));
  }
  if (findArgument(node.op().schema(), "rounding_mode") >= 0) {
    return false;
  }
  return hasFactorOne(node);
}

bool isElementwise(const OpNode& node) {
  if (mayOverflow(node)) {
    return false;
  }
  const auto has_dtype = [&node](const TensorArgument& argument) { return hasDtypeOfResult(node, argument); };
  switch (kindOf(node)) {
    case PartKind::kArithmetic:
    case PartKind::kClamp:
      return areReal(node) && hasOneResult(node) && !convertsArguments(node);
    case PartKind::kWhere:
      return node.tensors().size() == 3 && std::all_of(node.tensors().begin() + 1, node.tensors().end(), has_dtype);
    case PartKind::kCopy:
    case PartKind::kFill:
      return true;
    default:
      return false;
  }
}

bool isConcatenation(const OpNode& node) {
  if (kindOf(node) != PartKind::kConcatenate && kindOf(node) != PartKind::kStack) {
    return false;
  }
  const auto& sizes = writtenGeometry(node).sizes;
  const std::size_t rank = kindOf(node) == PartKind::kStack ? sizes.size() - 1 : sizes.size();
  return std::all_of(node.tensors().begin(), node.tensors().end(), [&](const TensorArgument& argument) {
    return hasDtypeOfResult(node, argument) && sizesOf(argument).size() == rank;
  });
}

bool isConstantFactory(const OpNode& node) {
  if (onlyAllocates(node.op()) && node.threadState().settings->isDeterministic()) {
    return false;  // fills its memory
  }
  return (constantOf(node) || onlyAllocates(node.op())) &&
         std::all_of(node.tensors().begin(), node.tensors().end(),
                     [](const TensorArgument& argument) { return argument.device.has_value(); });
}

// ---- Random fills ----

bool isRandomFill(const OpNode& node) {
  const at::mt19937_data_pod* engine = keptEngineOf(node.tape());
  if (engine == nullptr || !takesGenerator(node.op()) || node.tensors().size() != 1 ||
      node.tensors().front().value == nullptr || !node.tensors().front().value->device().is_cpu()) {
    return false;
  }
  return node.tensors().front().geometry().isContiguous() && partialFillOf(node, *engine);
}

// ---- Reads ----

// Returns the elements of an argument that is broadcast to the result.
IndexRanges broadcastRanges(c10::IntArrayRef sizes, const IndexRanges& ranges) {
  IndexRanges own;
  const std::size_t missing = ranges.size() - sizes.size();
  for (const auto i : c10::irange(sizes.size())) {
    own.push_back(sizes[i] == 1 ? IndexRange{0, 1} : ranges[missing + i]);
  }
  return own;
}

bool isEmpty(const IndexRanges& ranges) {
  return std::any_of(ranges.begin(), ranges.end(), [](const IndexRange& range) { return range.first >= range.last; });
}

IndexRange movedBy(const IndexRange& range, std::int64_t distance) {
  return {range.first + distance, range.last + distance, range.step};
}

std::optional<Piece> pieceAt(const IndexRanges& ranges, const IndexRanges& target) {
  Piece piece{{}, {}};
  for (const auto i : c10::irange(ranges.size())) {
    piece.target.push_back(within(ranges[i], target[i].first, target[i].last));
    piece.source.push_back(movedBy(piece.target.back(), -target[i].first));
  }
  return isEmpty(piece.target) ? std::nullopt : std::optional{std::move(piece)};
}

std::size_t dimensionOf(const OpNode& node) {
  const std::int64_t dim = argumentOf(node, "dim").toInt();
  const auto rank = toSigned(writtenGeometry(node).sizes.size());
  return toSize(dim < 0 ? dim + rank : dim);
}

// Returns the piece of each argument of `cat` and `stack`.
std::vector<std::optional<Piece>> piecesOfConcatenation(const OpNode& node, const IndexRanges& ranges) {
  const bool stacks = kindOf(node) == PartKind::kStack;
  const std::size_t dim = dimensionOf(node);
  std::int64_t begin = 0;
  std::vector<std::optional<Piece>> pieces;
  for (const TensorArgument& argument : node.tensors()) {
    IndexRanges target;
    for (const std::int64_t size : writtenGeometry(node).sizes) {
      target.push_back({0, size});
    }
    const std::int64_t size = stacks ? 1 : sizesOf(argument)[dim];
    target[dim] = {begin, begin + size};
    begin += size;
    pieces.push_back(pieceAt(ranges, target));
    if (stacks && pieces.back()) {
      auto& source = pieces.back()->source;
      source.erase(source.begin() + static_cast<std::ptrdiff_t>(dim));
    }
  }
  return pieces;
}

// `pad` has two numbers for each dimension, the last dimension first; negative numbers crop.
std::optional<Piece> pieceOfPadding(const OpNode& node, const IndexRanges& ranges) {
  const auto pad = argumentOf(node, "pad").toIntVector();
  const auto sizes = sizesOf(node.tensors().front());
  Piece piece{{}, {}};
  for (const auto i : c10::irange(sizes.size())) {
    const std::size_t from_end = sizes.size() - 1 - i;
    const std::int64_t before = 2 * from_end < pad.size() ? pad[2 * from_end] : 0;
    piece.source.push_back(within(movedBy(ranges[i], -before), 0, sizes[i]));
    piece.target.push_back(movedBy(piece.source.back(), before));
  }
  return isEmpty(piece.source) ? std::nullopt : std::optional{std::move(piece)};
}

std::optional<std::size_t> copiedArgument(const OpNode& node) {
  if (kindOf(node) != PartKind::kCopy || hasOut(node.op()) || !writesOneTensor(node) || readsWhatItWrites(node)) {
    return std::nullopt;
  }
  const bool is_clone = !node.written().front().is_argument;
  const std::size_t source = is_clone ? 0 : 1;
  const TensorArgument& argument = node.tensors()[source];
  const Geometry& written = writtenGeometry(node);
  if (argument.value == nullptr || argument.geometry().dtype != written.dtype ||
      argument.geometry().sizes != written.sizes || !written.isContiguous() || argument.value->isPinned()) {
    return std::nullopt;
  }
  if (!is_clone) {
    const StorageValue& target = *node.tensors().front().value;
    const bool is_alone = target.nbytes() == written.nbytes() && target.device() == argument.value->device();
    return is_alone ? std::optional{source} : std::nullopt;
  }
  const auto to = argumentOf(node, "device").toOptional<c10::Device>();
  const bool pins = argumentOf(node, "pin_memory").toOptional<bool>().value_or(false);
  return (!to || *to == argument.value->device()) && !pins ? std::optional{source} : std::nullopt;
}

}  // namespace

const OperatorTable<PartKind> partKindOf{
    "can compute a part of their result",
    {{PartKind::kArithmetic,
      {"aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::add", "aten::add_", "aten::sub", "aten::sub_",
       "aten::neg", "aten::neg_", "aten::abs", "aten::abs_"}},
     {PartKind::kClamp, {"aten::clamp", "aten::clamp_"}},
     {PartKind::kCopy, {"aten::copy_", "aten::clone", "aten::_to_copy"}},
     {PartKind::kFill, {"aten::fill_", "aten::zero_", "aten::masked_fill", "aten::masked_fill_"}},
     {PartKind::kWhere, {"aten::where"}},
     {PartKind::kRearrange,
      {"aten::flip", "aten::roll", "aten::tril", "aten::tril_", "aten::triu", "aten::triu_", "aten::repeat",
       "aten::index_select"}},
     {PartKind::kZeros, {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}},
     {PartKind::kOnes, {"aten::ones", "aten::ones_like", "aten::new_ones"}},
     {PartKind::kFull, {"aten::full", "aten::full_like", "aten::new_full"}},
     {PartKind::kConcatenate, {"aten::cat"}},
     {PartKind::kStack, {"aten::stack"}},
     {PartKind::kPad, {"aten::constant_pad_nd"}}}};

// A fill of complex values draws like a real tensor of twice the elements. PyTorch's kernel splits it internally, so it
// has no rule here.
std::optional<RequestedFill> partialFillOf(const OpNode& node, const at::mt19937_data_pod& engine) {
  const Geometry& filled = node.tensors().front().geometry();
  const std::int64_t count = c10::multiply_integers(filled.sizes);
  auto fill = requestedFillOf(node.op(), dtypeOf(filled), node.arguments());
  const auto can_fill = [&](const auto& one) { return canFillParts(one, count, engine); };
  return fill && std::visit(can_fill, *fill) ? fill : std::nullopt;
}

const IValue& argumentOf(const OpNode& node, const char* name) {
  return argumentNamed(node.op(), node.arguments(), name);
}

bool hasFactorOne(const OpNode& node) {
  const IValue& alpha = argumentOf(node, "alpha");
  return alpha.isNone() || alpha.toScalar().equal(1);
}

PartRule ruleOf(const OpNode& node) {
  // `set_flush_denormal()` is set per thread. Other threads, which compute a part of a whole, may not flush.
  const bool depends_on_threads = node.threadState().settings->flushesDenormals();
  if (depends_on_threads || !writesOneTensor(node) || readsWhatItWrites(node) || !areOrdinary(node)) {
    return PartRule::kNone;
  }
  if (isConstantFactory(node)) {
    return PartRule::kConstant;
  }
  if (isElementwise(node)) {
    return PartRule::kElementwise;
  }
  if (isConcatenation(node)) {
    return PartRule::kConcatenation;
  }
  if (kindOf(node) == PartKind::kPad) {
    return PartRule::kPadding;
  }
  if (isRandomFill(node)) {
    return PartRule::kRandomFill;
  }
  return kindOf(node) == PartKind::kRearrange ? PartRule::kAnyLayout : PartRule::kNone;
}

std::vector<std::optional<Piece>> piecesOf(const OpNode& node, PartRule rule, const IndexRanges& ranges) {
  return rule == PartRule::kPadding ? std::vector{pieceOfPadding(node, ranges)} : piecesOfConcatenation(node, ranges);
}

std::vector<std::optional<IndexRanges>> readsForPart(const OpNode& node, PartRule rule, const IndexRanges& ranges) {
  std::vector<std::optional<IndexRanges>> reads(node.tensors().size());
  switch (rule) {
    case PartRule::kElementwise:
      for (const auto i : c10::irange(reads.size())) {
        reads[i] = broadcastRanges(sizesOf(node.tensors()[i]), ranges);
      }
      break;
    case PartRule::kConcatenation:
    case PartRule::kPadding: {
      const auto pieces = piecesOf(node, rule, ranges);
      for (const auto i : c10::irange(reads.size())) {
        reads[i] = pieces[i] ? std::optional{pieces[i]->source} : std::nullopt;
      }
      break;
    }
    default:
      break;
  }
  return reads;
}

std::optional<c10::Scalar> constantOf(const OpNode& node) {
  switch (kindOf(node)) {
    case PartKind::kFull:
      return argumentOf(node, "fill_value").toScalar();
    case PartKind::kOnes:
      return 1;
    case PartKind::kZeros:
      return 0;
    default:
      return std::nullopt;
  }
}

bool isWrittenDirectly(const OpNode& node) {
  return kindOf(node) == PartKind::kCopy && !isWritten(node.op().schema().arguments().front());
}

// On the CPU, an argument of another dtype is converted as a whole before, and a result afterwards. Copies convert one
// element at a time.
std::size_t bytesOfConversions(const OpNode& node, std::size_t elements) {
  const PartKind kind = kindOf(node);
  if (kind == PartKind::kCopy || kind == PartKind::kFill) {
    return 0;
  }
  const c10::ScalarType result = dtypeOf(writtenGeometry(node));
  std::vector<std::pair<c10::ScalarType, std::size_t>> tensors;  // with the numbers of their elements
  for (const auto i : c10::irange(node.tensors().size())) {
    const TensorArgument& argument = node.tensors()[i];
    const bool is_condition = kind == PartKind::kWhere && i == 0;
    if (!sizesOf(argument).empty() && !argument.device && !is_condition) {
      tensors.emplace_back(dtypeOf(argument), std::min(elements, toSize(c10::multiply_integers(sizesOf(argument)))));
    }
  }
  if (tensors.empty()) {
    return 0;
  }
  c10::ScalarType common = tensors.front().first;
  for (const auto& [dtype, count] : tensors) {
    common = c10::promoteTypes(common, dtype);
  }
  if (c10::isIntegralType(common, /*includeBool=*/true) && c10::isFloatingType(result)) {
    common = result;
  }
  if (node.written().front().is_argument) {
    tensors.emplace_back(result, elements);
  }
  std::size_t sum = 0;
  for (const auto& [dtype, count] : tensors) {
    sum += dtype == common ? 0 : count * c10::elementSize(common);
  }
  return sum;
}

bool hasManyNans(const OpNode& node) {
  const c10::ScalarType dtype = dtypeOf(writtenGeometry(node));
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
    return false;
  }
  const bool clamps = kindOf(node) == PartKind::kClamp;
  const bool is_arithmetic = clamps || kindOf(node) == PartKind::kArithmetic;
  const auto mixes = [&](const TensorArgument& argument) {
    const c10::ScalarType other = dtypeOf(argument);
    return !argument.number && other != dtype && !argument.device && (isHalf(dtype) || isHalf(other));
  };
  const bool converts = std::any_of(node.tensors().begin(), node.tensors().end(), mixes);
  const auto is_tensor = [](const TensorArgument& argument) { return !argument.number; };
  const auto tensors = std::count_if(node.tensors().begin(), node.tensors().end(), is_tensor);
  const auto is_finite = [](const TensorArgument& argument) {
    return !argument.number || argument.number->isComplex() || std::isfinite(argument.number->toDouble());
  };
  const bool are_finite = std::all_of(node.tensors().begin(), node.tensors().end(), is_finite);
  return converts || (is_arithmetic && (isHalf(dtype) || tensors > 1 || clamps || !are_finite));
}

void registerPartRules() {
  PartRules& rules = hooks().parts;
  rules.ruleOf = &ruleOf;
  rules.demandsOf = &demandsByParts;
  rules.copiedArgument = &copiedArgument;
  rules.check = &checkPlan;
  rules.run = &runForParts;
  rules.checkIsExact = &checkIsExact;
  rules.planSteps = &planSteps;
  rules.fillWithSteps = &fillWithSteps;
}

}  // namespace torchext
