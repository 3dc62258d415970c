#pragma once

namespace torchext {

// Answers the hook `ExternalValues`. Call it while the library is loaded.
void registerExternalValues();

}  // namespace torchext
