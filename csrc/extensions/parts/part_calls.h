#pragma once

// Runs operators for a part: NOTE [Operators that compute parts].

#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "part_rules.h"

namespace torchext {

// Writes the elements in `ranges` to `result`, given the elements that are read for them: a tensor for each argument,
// undefined if it is not read. Not for random fills.
void computePart(const OpNode& node,
                 PartRule rule,
                 const IndexRanges& ranges,
                 const std::vector<at::Tensor>& arguments,
                 const at::Tensor& result);

// Computes the bytes in `box` of the random fill `node` into `memory`, the bytes of the box. `generator` stands where
// the fill begins.
void fillPart(const OpNode& node, const Box& box, const c10::Storage& memory, const at::Generator& generator);

// Raises `PartsDiffer` if the bits of `result` may be wrong because `node` computed it for a part, or with strides
// other than the recorded ones.
void checkIsExact(const OpNode& node, const at::Tensor& result);

}  // namespace torchext
