#pragma once

// What is done to values right after they have been drawn: `torch.randn(n) * 0.02`, `model.to(torch.bfloat16)`. Such
// operators are run on each stretch of a random fill while it is in the cache of the processor, which spares passing
// through memory once more for each of them.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../graph/op_graph.h"

namespace torchext {

// Returns true for a random fill that steps may follow: of many elements in one stretch of the CPU's memory, with
// parameters that are finite in single precision.
bool mayHaveSteps(const OpNode& fill);

// What the result of `node` shows if it can be run as a step on the memory that `shown` shows, which its first tensor
// argument is to be; else nothing.
std::optional<Geometry> resultOfStep(const OpNode& node, const Geometry& shown);

// Returns true for such a step that writes over what it reads, whether its operator does that or not.
bool worksInPlace(const OpNode& step);

// One operator. Only such that compute each element for itself by one operation of IEEE 754: then it does not matter
// where the work is divided. Others, such as `erfinv_`, have different code for the elements that do not fill a vector.
// So have conversions to bfloat16, for what is not a number: steps make none, because they take numbers that are finite
// in single precision, and no factors that are 0 there.
class ElementwiseStep {
 public:
  // `node`, which can be run as a step. It has to outlive this.
  explicit ElementwiseStep(const OpNode& node);

  // The memory for the results of a step on `source`: the same, or new one where the dtype changes.
  c10::Storage resultFor(const c10::Storage& source) const;

  // Computes the elements from `begin` to before `end`, on any thread.
  void compute(const c10::Storage& source, const c10::Storage& result, std::int64_t begin, std::int64_t end) const;

 private:
  const OpNode* node_;
  // What works in place. Nothing for a conversion.
  std::optional<c10::OperatorHandle> op_;
  // The arguments behind the first one.
  std::vector<at::Tensor> numbers_;
  Geometry source_;
  Geometry shown_;
};

}  // namespace torchext
