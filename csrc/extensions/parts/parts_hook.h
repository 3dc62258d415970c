#pragma once

namespace torchext {

// Sets the hook `PartRules`. Call while the library is loaded.
void registerPartRules();

}  // namespace torchext
