#include "kinds.h"

namespace torchext {

void registerLayouts() {
  registerSparseLayout();
  registerRefusedLayouts();
}

}  // namespace torchext
