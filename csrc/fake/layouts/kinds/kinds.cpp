#include "kinds.h"

namespace torchext {

void registerLayouts() {
  registerLayout(makeSparseLayout());
  registerRefusedLayouts();
}

}  // namespace torchext
