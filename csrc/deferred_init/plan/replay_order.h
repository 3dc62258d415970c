#pragma once

#include <cstddef>
#include <vector>

#include "liveness.h"

namespace torchext {

// Puts operators, which are in the order of their recording, into the order in which memory holds least. Returns false
// if that is the same. Their places are to be numbered before, and again afterwards.
bool keepDerivationsTogether(std::vector<LiveOperator>& operators);

// The places of the operators that are connected with the one at `place` by what they read, itself included, in order.
// Where one of them reads without writing, `keepDerivationsTogether()` has put all of them next to each other.
//
// Both take a time that is nearly linear in the number of reads, and touch nothing but their arguments.
std::vector<std::size_t> placesConnectedWith(const std::vector<LiveOperator>& operators, std::size_t place);

}  // namespace torchext
