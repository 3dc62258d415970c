#include "parts.h"

#include <algorithm>

namespace torchext {

bool Demand::isNothing() const {
  return !outputs.empty() && std::all_of(outputs.begin(), outputs.end(),
                                         [](const NeededParts& parts) { return parts && parts->areNone(); });
}

std::vector<Demand> wholeValues(const LiveGraph& graph) {
  std::vector<Demand> demands(graph.operators.size());
  for (const LiveOperator& live : graph.operators) {
    demands[live.place].outputs.resize(live.node->written().size());
  }
  return demands;
}

std::vector<Demand> demandsOf(const LiveGraph& graph) {
  return hooks().parts.demandsOf ? hooks().parts.demandsOf(graph) : wholeValues(graph);
}

const Geometry& writtenGeometry(const OpNode& node) {
  return node.written().front().geometry();
}

}  // namespace torchext
