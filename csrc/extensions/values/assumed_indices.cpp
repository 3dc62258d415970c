#include "assumed_indices.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/WrapDimMinimal.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "known_bytes.h"

namespace torchext {

namespace {

constexpr int64_t kMaxPattern = 1 << 16;
const OperatorSet mayMakeIndices{
    "return positions in their argument",
    {"aten::topk", "aten::sort", "aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::median",
     "aten::kthvalue", "aten::mode", "aten::multinomial", "aten::nanmedian"}};

// Returns true if the positions of `scores` follow from values. Assumed scores are alike, also if a known bias was
// added to them, or if a mask of assumed positions covers some. So `topk` of them follows the policy.
bool determinesPositions(const OperatorHandle& op, const Tensor& scores) {
  const ValueKind kind = kindOf(scores);
  const bool is_score = c10::isFloatingType(scores.scalar_type()) && kind != ValueKind::kKnown;
  return hasValue(scores) && !(is_score && (op.schema().name() == "aten::topk" || kind == ValueKind::kAssumed));
}

bool makesIndices(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (!mayMakeIndices(op) || hasOut(op) || determinesPositions(op, arguments.front().toTensor())) {
    return false;
  }
  const bool is_of_values = results.size() == 1 && arguments.front().toTensor().scalar_type() == c10::kLong;
  return results.back().toTensor().scalar_type() == c10::kLong && !is_of_values;
}

// Rows of positions: each row has `length` positions, which are less than `count`.
struct ChosenRows {
  int64_t count;
  int64_t length;
  std::optional<int64_t> dim;  // the dimension of the rows, if there are several positions
};

ChosenRows chosenRows(const OperatorHandle& op, ArrayRef<IValue> arguments, const Tensor& indices) {
  const Tensor& source = arguments.front().toTensor();
  const int position = findArgument(op.schema(), "dim");
  const IValue dim = position < 0 ? IValue(-1) : arguments[toSize(position)];
  const bool is_of_all = !dim.isInt() || source.dim() == 0;
  const int64_t count = std::max<int64_t>(is_of_all ? source.numel() : source.size(dim.toInt()), 1);
  if (is_of_all || indices.dim() != source.dim()) {
    return {count, 1, std::nullopt};
  }
  const int64_t wrapped = c10::maybe_wrap_dim(dim.toInt(), source.dim());
  return {count, std::max<int64_t>(indices.size(wrapped), 1), wrapped};
}

// Rearranges `positions` from the order of rows to a tensor of `sizes` with the rows in `dim`.
Tensor inDimension(const Tensor& positions, c10::IntArrayRef sizes, int64_t dim) {
  const HiddenCalls guard;
  std::vector<int64_t> by_rows = sizes.vec();
  const auto place = by_rows.begin() + static_cast<std::ptrdiff_t>(dim);
  std::rotate(place, place + 1, by_rows.end());
  return positions.view(by_rows).movedim(-1, dim);
}

}  // namespace

bool assumeIndices(const OperatorHandle& op,
                   ArrayRef<IValue> arguments,
                   ArrayRef<IValue> results,
                   const Assumptions& assumptions) {
  if (!makesIndices(op, arguments, results)) {
    return false;
  }
  const Tensor& indices = results.back().toTensor();
  const ChosenRows rows = chosenRows(op, arguments, indices);
  const int64_t num_rows = indices.numel() / rows.length;
  const auto choose = [&](int64_t chosen) {
    const auto [positions, policy] = assumptions.positions(rows.count, rows.length, chosen);
    return std::pair{positions, standingOn(arguments) | policy};
  };
  const bool is_partial = rows.length < rows.count;  // sorting large data returns many positions, which nothing counts
  if (isSmall(indices) || (is_partial && isSmallForRouting(indices))) {
    const auto [positions, kind] = choose(num_rows);
    setElements(indices, rows.dim ? inDimension(positions, indices.sizes(), *rows.dim) : positions, kind);
    return true;
  }
  if ((rows.dim && *rows.dim != indices.dim() - 1) || rows.length * rows.count > kMaxPattern) {
    return false;
  }
  const auto [positions, kind] = choose(std::min(num_rows, rows.count));
  setElements(indices, positions, kind);
  return true;
}

}  // namespace torchext
