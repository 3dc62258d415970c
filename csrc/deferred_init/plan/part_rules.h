#pragma once

// NOTE [Operators that are run for a part]
//
// An operator is run for a part of what it writes only where the bits of an element depend neither on which others are
// computed with it, nor on where in memory they are. That is so for copies, for fills with a number, for random fills
// by fills/part_fill.h, and for operations of IEEE 754, which have one result; not for others, such as `exp`, which
// have other code for the elements that do not fill a vector, nor for matrix products and reductions, whose order
// depends on sizes. Those are run as they were recorded.
//
// What is not a number has many bits, and where two such meet, or one is rounded to half precision, vectorized code may
// choose others. So results of such operators are looked at, and if one is not a number, what it is connected with is
// computed anew as it was recorded: `PartsDiffer` (replay/part_calls.h).

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/MT19937RNGEngine.h>

#include "../../fills/random_fill.h"
#include "../../fills/truncated_fill.h"
#include "../graph/op_graph.h"
#include "grid.h"

namespace torchext {

enum class PartRule : std::uint8_t {
  kNone,       // is run as it was recorded, on tensors that have the strides and the alignment that they had
  kAnyLayout,  // is run as it was recorded, wherever the elements of its arguments are
  kElementwise,
  kConstant,       // makes a tensor of equal elements
  kConcatenation,  // `cat` and `stack`
  kPadding,
  kRandomFill,
};

// A pure function of the call, as all of this file. Takes a microsecond or less.
PartRule partRuleOf(const OpNode& node);

// Returns true if calls with the rule can be run for a part.
constexpr bool isForParts(PartRule rule) {
  return rule != PartRule::kNone && rule != PartRule::kAnyLayout;
}

// Which tensor argument a call copies, element by element, to a storage that then has nothing else, on the same device
// and in the same dtype. Nothing for other calls.
std::optional<std::size_t> copiedArgument(const OpNode& node);

// How the tensor that a call with such a rule writes shows its storage: its only result, or an argument.
const Geometry& writtenGeometry(const OpNode& node);

// What a call with such a rule needs of each tensor argument to write the elements in `ranges`: some elements, or none.
// Of an argument that it writes, `ranges`.
std::vector<std::optional<IndexRanges>> readsForPart(const OpNode& node, PartRule rule, const IndexRanges& ranges);

// One piece of a result that is put together of others: which elements of an argument, and where they go.
struct Piece {
  IndexRanges source;
  IndexRanges target;
};

// Which piece of the elements in `ranges` each tensor argument of a concatenation or padding gives, or none.
std::vector<std::optional<Piece>> piecesOf(const OpNode& node, PartRule rule, const IndexRanges& ranges);

// What a random fill of contiguous memory on the CPU is asked for: one of the two, or neither if it cannot be computed
// for a part with the bits of the whole, given where it begins.
struct AskedFill {
  std::optional<RandomFill> random;
  std::optional<TruncatedFill> truncated;
};
AskedFill askedFillOf(const OpNode& node, const at::mt19937_data_pod& engine);

// What a factory such as `zeros` and `full_like` fills a tensor with, or nothing for other calls.
std::optional<c10::Scalar> constantOf(const OpNode& node);

// Returns true for a call that is computed for a part by copying to where the result is to be.
bool isWrittenDirectly(const OpNode& node);

// How much an elementwise call on `elements` elements allocates for tensors that it converts to the dtype in which it
// computes (`TensorIteratorBase::compute_types()`), in bytes.
std::size_t bytesOfConversions(const OpNode& node, std::size_t elements);

// May two ways of computing the same number disagree about the bits of what is not a number?
bool hasManyNans(const OpNode& node);

}  // namespace torchext
