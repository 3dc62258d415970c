#pragma once

namespace torchext {

// Hands to the rooms below what only the handler of fakes can do for them: they know nothing of what is above. To be
// called before there are fakes; does nothing when called again.
void connectPartsOfFakes();

}  // namespace torchext
