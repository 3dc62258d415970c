#include "hooks.h"

namespace torchext {

// Constant-initialized, so that other files can change it while the library is loaded.
Hooks& hooks() noexcept {
  static Hooks hooks;
  return hooks;
}

}  // namespace torchext
