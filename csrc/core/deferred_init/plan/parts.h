#pragma once

// Demands for parts of values, which the hook `PartRules` determines.

#include <exception>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"
#include "../graph/op_graph.h"
#include "grid.h"
#include "liveness.h"

namespace torchext {

// The needed parts of a value, if that is not all of it.
struct RequestedParts {
  std::vector<Box> boxes;
  // The device of the storage when it was recorded.
  c10::Device device;
};

// The demand on one operator.
struct Demand {
  // How the operator can be run for a part.
  PartRule rule = PartRule::kNone;
  // For each value that it writes: the needed parts, which may be none, or nothing if all of it is needed.
  std::vector<std::optional<RequestedParts>> outputs;

  // Returns true if no part is needed.
  bool isNothing() const;
};

// Returns demands for whole values.
std::vector<Demand> wholeValues(const LiveGraph& graph);

// Returns one demand for each operator of `graph`: `PartRules::demandsOf()`, or whole values.
std::vector<Demand> demandsOf(const LiveGraph& graph);

// `PartRules::ruleOf()`, or none.
PartRule partRuleOf(const OpNode& node);

// Returns true if calls with the rule can be run for a part.
constexpr bool isForParts(PartRule rule) {
  return rule != PartRule::kNone && rule != PartRule::kAnyLayout;
}

// Returns the geometry of the tensor that a call with such a rule writes: its only result, or an argument.
TORCHEXT_API const Geometry& writtenGeometry(const OpNode& node);

// Raised if the bits of a part of a result would differ from those in the whole.
class PartsDiffer : public std::exception {};

}  // namespace torchext
