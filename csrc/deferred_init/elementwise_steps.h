#pragma once

// What is done to values right after they have been drawn: `torch.randn(n) * 0.02`, `model.to(torch.bfloat16)`. Such
// operators are run on each stretch of a random fill while it is in the cache of the processor, which spares passing
// through memory once more for each of them, and the memory for what they read.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "op_graph.h"

namespace torchext {

// One operator. Only such that compute each element for itself, and round once or not at all: then it does not matter
// at which elements the work is divided. (Others have different code for the elements that do not fill a vector, such
// as `erfinv_`.)
class ElementwiseStep {
 public:
  // `node` as a step on contiguous memory that `shown` shows, which its first tensor argument is to be, or nothing.
  static std::optional<ElementwiseStep> of(const OpNode& node, const Geometry& shown);

  // What its result shows.
  const Geometry& shown() const noexcept {
    return shown_;
  }

  // Takes the memory of the values to compute on, and returns that of the results: another one where the dtype changes.
  const c10::Storage& prepare(const c10::Storage& storage);

  const c10::Storage& result() const noexcept {
    return to_;
  }

  // Computes the elements from `begin` to before `end`. To be called on any thread, and in its order of the steps.
  void compute(std::int64_t begin, std::int64_t end) const;

 private:
  ElementwiseStep(const OpNode& node, c10::OperatorHandle op, Geometry source, Geometry shown);

  at::Tensor stretchOf(const c10::Storage& storage,
                       const Geometry& geometry,
                       std::int64_t begin,
                       std::int64_t end) const;

  const OpNode* node_;
  c10::OperatorHandle op_;  // works in place, or is `copy_`
  Geometry source_;
  Geometry shown_;
  c10::Storage from_;
  c10::Storage to_;
};

}  // namespace torchext
