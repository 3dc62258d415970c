#pragma once

#include <cstddef>
#include <vector>

#include "liveness.h"

namespace torchext {

// Puts operators, which are in the order of their recording, into the order in which memory holds least.
void keepDerivationsTogether(std::vector<LiveOperator>& operators);

// The places of the operators that are connected with the one at `place` by what they read, itself included, in order.
// Where one of them reads without writing, `keepDerivationsTogether()` has put all of them next to each other.
std::vector<std::size_t> placesConnectedWith(const std::vector<LiveOperator>& operators, std::size_t place);

}  // namespace torchext
