#pragma once

#include <cstddef>
#include <vector>

#include "liveness.h"

namespace torchext {

// Reorders operators from recording order into the order that needs the least memory. Returns false if the order does
// not change. The caller numbers their places before, and again afterwards.
bool keepDerivationsTogether(std::vector<LiveOperator>& operators);

// Returns the places of all operators that are connected by reads with the one at `place`, including it, in order. If
// one of them reads without writing, `keepDerivationsTogether()` has made them consecutive.
//
// Both functions take time nearly linear in the number of reads, and access only their arguments.
std::vector<std::size_t> placesConnectedWith(const std::vector<LiveOperator>& operators, std::size_t place);

}  // namespace torchext
