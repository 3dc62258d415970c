#pragma once

// Running operators for a part: NOTE [Operators that are run for a part].

#include <exception>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "../plan/part_rules.h"

namespace torchext {

// Writes the elements in `ranges`, which `result` shows, given what is read for them: a tensor for each argument, which
// is undefined where nothing is read. Not for random fills.
void computePart(const OpNode& node,
                 PartRule rule,
                 const IndexRanges& ranges,
                 const std::vector<at::Tensor>& arguments,
                 const at::Tensor& result);

// Computes of the random fill `node` the bytes of its storage in `box` into `memory`, the bytes of the box, with
// `generator` where the fill begins.
void fillPart(const OpNode& node, const Box& box, const c10::Storage& memory, const at::Generator& generator);

// Raised where a part of a result would not have the bits that it has in the whole.
class PartsDiffer : public std::exception {};

// Raises `PartsDiffer` if `result`, which `node` has computed for a part or for other strides than those that were
// recorded, may have other bits than it should.
void checkIsExact(const OpNode& node, const at::Tensor& result);

}  // namespace torchext
