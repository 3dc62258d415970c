#pragma once

#include <vector>

#include "liveness.h"

namespace torchext {

// Puts operators, which are in the order of their recording, into the order in which memory holds least.
void keepDerivationsTogether(std::vector<LiveOperator>& operators);

}  // namespace torchext
