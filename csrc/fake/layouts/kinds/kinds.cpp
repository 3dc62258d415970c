#include "kinds.h"

namespace torchext {

void registerLayouts() {
  registerLayout(makeSparseLayout());
  registerLayout(makeNestedLayout());
  registerLayout(makeQuantizedLayout());
  registerLayout(makeMkldnnLayout());
  registerLayout(makeUnknownLayout());  // last, because it refuses every tensor that no other layout has
}

}  // namespace torchext
