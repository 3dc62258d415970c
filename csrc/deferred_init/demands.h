#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/hash.h>

#include "grid.h"
#include "liveness.h"
#include "part_rules.h"

namespace torchext {

// NOTE [Demand by parts]
//
// Which parts of each value somebody asks for: NOTE [Parts of storages]. Readers are asked before writers. An operator
// that can be run for a part asks for what it reads for that; any other asks for all that it reads, and for so much
// around it that the tensors keep their strides. What writes into a storage asks for the rest of the part as it was
// before, so that all values of a storage that follow each other have the same parts, or larger ones.
//
// Parts that lie near each other become one, those that lie apart are computed each for itself. Where most of a value
// is asked for, the whole is.
class Demands {
 public:
  // What somebody asks for of one value, which is not all of it.
  struct Parts {
    std::vector<Box> boxes;
    // Where the storage was recorded.
    c10::Device device;
  };

  // Of the values that `graph` wants everything is asked for.
  static Demands of(const LiveGraph& graph);

  // Asks for all that an operator writes.
  void askForAllOf(const OpNode& writer);

  // The parts of a value that an operator of the graph writes, or null where it is the whole. There may be none.
  const Parts* partsOf(const OpNode& writer, std::size_t output) const;

  // Returns true if nobody asks for anything that an operator of the graph writes.
  bool areNone(const OpNode& writer) const;

  // How much of what an operator of the graph writes it computes, from 0 to 1.
  double shareOf(const OpNode& writer) const;

  // How an operator of the graph can be run for a part.
  PartRule ruleOf(const OpNode& node) const;

 private:
  using Key = std::pair<const OpNode*, std::size_t>;

  std::unordered_map<Key, Parts, c10::hash<Key>> parts_;
  std::unordered_map<const OpNode*, PartRule> rules_;
};

}  // namespace torchext
