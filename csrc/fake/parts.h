#pragma once

namespace torchext {

// Gives the rooms below the functions of the handler of fakes that they call, since they must not include what is above
// them. To be called before there are fakes; does nothing when called again.
void connectPartsOfFakes();

}  // namespace torchext
