#pragma once

// NOTE [Operators that compute parts]
//
// An operator runs for a part of its output only if the bits of an element depend neither on the elements computed with
// it nor on their memory layout. This holds for copies, for fills with a number, for random fills by
// libraries/fills/fill.h, and for IEEE 754 operations, which have one result. It does not hold for operators such
// as `exp`, which use other code for the elements that do not fill a vector, nor for matrix products and reductions,
// whose order depends on sizes. Those run as they were recorded.
//
// NaN has many bit patterns. Where two NaNs meet, or one is rounded to half precision, vectorized code may pick
// another. So results of such operators are checked for NaN, and if one is found, all connected operators are run again
// as recorded: `PartsDiffer`.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../libraries/fills/fill.h"
#include "../../libraries/fills/random_fill.h"
#include "../../libraries/support/operator_table.h"
#include "../tapes/draws.h"
#include "grid.h"

namespace torchext {

// How an operator computes its elements, regardless of its arguments. `ruleOf()` derives the rule of a call, unless its
// arguments do not allow one: kElementwise from kArithmetic to kWhere, kAnyLayout from kRearrange, kConstant from
// kZeros to kFull and for uninitialized memory, kConcatenation from kConcatenate and kStack, and kPadding from kPad.
// Random fills are kNone here, and have their rule by `partialFillOf()`. Steps on a stretch of a random fill are
// elementwise kinds as well: part_calls.cpp.
enum class PartKind : std::uint8_t {
  kNone,
  kArithmetic,  // one IEEE 754 operation for each element
  kClamp,
  kCopy,  // of one tensor, perhaps with another dtype
  kFill,  // with a number
  kWhere,
  kRearrange,
  kZeros,
  kOnes,
  kFull,
  kConcatenate,
  kStack,
  kPad,
};
extern const OperatorTable<PartKind> partKindOf;

// Returns the elements of each tensor argument that a call with such a rule needs to write the elements in `ranges`, if
// any. For an argument that it writes, `ranges`.
std::vector<std::optional<IndexRanges>> readsForPart(const OpNode& node, PartRule rule, const IndexRanges& ranges);

// A piece of a concatenated or padded result: a range of an argument, and its range in the result.
struct Piece {
  IndexRanges source;
  IndexRanges target;
};

// Returns the piece that each tensor argument of a concatenation or padding contributes to the elements in `ranges`, if
// any.
std::vector<std::optional<Piece>> piecesOf(const OpNode& node, PartRule rule, const IndexRanges& ranges);

// Returns the random fill of contiguous CPU memory that a call requests, or nothing if a part cannot be computed with
// the bits of the whole from the state of the generator at its beginning.
std::optional<RequestedFill> partialFillOf(const OpNode& node, const at::mt19937_data_pod& engine);

// Returns the number that a factory such as `zeros` and `full_like` fills a tensor with; nothing for other calls.
std::optional<c10::Scalar> constantOf(const OpNode& node);

// Returns the argument of a call by its name in the schema, or None if the schema has none.
const c10::IValue& argumentOf(const OpNode& node, const char* name);

// Returns true unless the call multiplies an argument by a factor: `alpha` of sums and differences.
bool hasFactorOne(const OpNode& node);

// Returns true for a call whose part is computed by copying directly into the result.
bool isWrittenDirectly(const OpNode& node);

// Returns the number of bytes that an elementwise call on `elements` elements allocates for tensors converted to the
// dtype of the computation (`TensorIteratorBase::compute_types()`).
std::size_t bytesOfConversions(const OpNode& node, std::size_t elements);

// Returns true if two ways of computing the same number may produce different bits for NaN.
bool hasManyNans(const OpNode& node);

// ---- Functions that implement `PartRules` (core/hooks/hooks.h) ----

PartRule ruleOf(const OpNode& node);
std::vector<Demand> demandsByParts(const LiveGraph& graph);
void checkPlan(const ReplayPlan& plan);
void runForParts(const PlannedOperator& planned,
                 const PartsMemory& memory,
                 const at::Generator& generator,
                 PartRules::ReadTensor read);
void checkIsExact(const OpNode& node, const at::Tensor& result);
void planSteps(std::vector<PlannedOperator>& operators);
std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                       torch::jit::Stack& stack,
                                                       const at::Generator& generator,
                                                       c10::ArrayRef<const OpNode*> steps);

}  // namespace torchext
