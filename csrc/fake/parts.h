#pragma once

namespace torchext {

// Gives lower components the functions of the handler of fakes that they call, since they must not include higher
// components. Call before there are fakes. Repeated calls do nothing.
void connectPartsOfFakes();

}  // namespace torchext
