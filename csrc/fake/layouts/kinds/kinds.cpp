#include "kinds.h"

namespace torchext {

void registerLayouts() {
  registerLayout(makeSparseLayout());
  registerLayout(makeNestedLayout());
  registerLayout(makeQuantizedLayout());
  registerLayout(makeMkldnnLayout());
  registerLayout(makeUnknownLayout());  // the last one: refuses what none of the others has
}

}  // namespace torchext
