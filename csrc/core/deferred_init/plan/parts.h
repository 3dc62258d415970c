#pragma once

// Demands for parts of values. The core does not know what a part is: an extension determines the demands, and
// implements the classes below.

#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"
#include "../graph/op_graph.h"
#include "liveness.h"

namespace torchext {

// The memory of the computed parts of a value.
class PartsMemory {
 public:
  PartsMemory() = default;
  C10_DISABLE_COPY_AND_ASSIGN(PartsMemory);
  virtual ~PartsMemory() = default;

  // Returns the tensor that `geometry` shows in the storage of the whole value, for a kernel with the rule `reader`. A
  // part must contain it, unless it has no elements. For a kernel without a rule, the tensor has the recorded strides
  // and alignment: it is a copy if necessary. Raises `PartsDiffer` if the kernel would write this copy.
  virtual at::Tensor tensorFor(PartRule reader, const Geometry& geometry, bool is_written) const = 0;

  // Returns the storage of the only part.
  virtual const c10::Storage& only() const = 0;
};

// The memory of a computed value: the whole storage, or parts of it. Neither for a value that is not computed.
struct ValueMemory {
  c10::Storage whole;
  std::shared_ptr<const PartsMemory> parts;

  const c10::Storage& only() const {
    return parts ? parts->only() : whole;
  }
};

// The needed parts of a value, if that is not all of it. Immutable.
class ValueParts {
 public:
  ValueParts() = default;
  C10_DISABLE_COPY_AND_ASSIGN(ValueParts);
  virtual ~ValueParts() = default;

  // Returns true if nothing is needed.
  virtual bool areNone() const noexcept = 0;
  // The bytes that they take in memory.
  virtual std::size_t nbytes() const = 0;
  // Returns true if each of them is one of `others`.
  virtual bool areAmong(const ValueParts& others) const = 0;
  // Returns true if they are one part, in whose memory the tensor `geometry` has the geometry `shown`.
  virtual bool areOnlyPart(const Geometry& geometry, const Geometry& shown) const = 0;

  // Returns memory for them: new memory, or the memory of the value `before`, or a copy of it.
  virtual std::shared_ptr<const PartsMemory> makeMemory() const = 0;
  virtual std::shared_ptr<const PartsMemory> inPlace(const ValueMemory& before) const = 0;
  virtual std::shared_ptr<const PartsMemory> copyOf(const ValueMemory& before) const = 0;
};

// Null for the whole value.
using NeededParts = std::shared_ptr<const ValueParts>;

// The demand on one operator.
struct Demand {
  // How the operator can be run for a part.
  PartRule rule = PartRule::kNone;
  // For each value that it writes.
  std::vector<NeededParts> outputs;

  // Returns true if no part is needed.
  bool isNothing() const;
};

// Returns demands for whole values.
std::vector<Demand> wholeValues(const LiveGraph& graph);

// Returns one demand for each operator of `graph`: `PartRules::demandsOf()`, or whole values.
std::vector<Demand> demandsOf(const LiveGraph& graph);

// Returns true if calls with the rule can be run for a part.
constexpr bool isForParts(PartRule rule) {
  return rule != PartRule::kNone && rule != PartRule::kAnyLayout;
}

// Returns the geometry of the tensor that a call with such a rule writes: its only result, or an argument.
TORCHEXT_API const Geometry& writtenGeometry(const OpNode& node);

// Raised if the bits of a part of a result would differ from those in the whole.
class PartsDiffer : public std::exception {};

}  // namespace torchext
