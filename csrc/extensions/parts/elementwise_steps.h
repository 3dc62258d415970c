#pragma once

// Elementwise operators applied to values right after they were drawn: `torch.randn(n) * 0.02`,
// `model.to(torch.bfloat16)`. They run on each stretch of a random fill while it is in the processor's cache, which
// saves one pass through memory per operator.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include "../../core/deferred_init/plan/replay_plan.h"

namespace torchext {

// `PartRules::planSteps()`. Fills of few elements stay in the cache anyway, and get no steps.
void planSteps(std::vector<PlannedOperator>& operators);

// One elementwise operator. Only operators that compute each element by one IEEE 754 operation qualify, so that results
// do not depend on how the work is divided. Others, such as `erfinv_`, use different code for the elements that do not
// fill a vector. So do conversions of NaN to bfloat16. Steps produce no NaN, because they take only numbers that are
// finite in single precision, and no factors that are 0 there.
class ElementwiseStep {
 public:
  // `node` must be able to run as a step, and must outlive this object.
  explicit ElementwiseStep(const OpNode& node);

  // Returns the storage for the results of a step on `source`: the same one, or a new one if the dtype changes.
  c10::Storage resultFor(const c10::Storage& source) const;

  // Computes the elements in [begin, end). Thread-safe.
  void compute(const c10::Storage& source, const c10::Storage& result, std::int64_t begin, std::int64_t end) const;

 private:
  const OpNode* node_;
  // The in-place operator. Nothing for a conversion.
  std::optional<c10::OperatorHandle> op_;
  // The arguments after the first one.
  std::vector<at::Tensor> numbers_;
  Geometry source_;
  Geometry shown_;
};

// `PartRules::fillWithSteps()`.
std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                       torch::jit::Stack& stack,
                                                       const at::Generator& generator,
                                                       c10::ArrayRef<const OpNode*> steps);

}  // namespace torchext
