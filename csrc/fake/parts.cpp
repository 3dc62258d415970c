#include "parts.h"

#include "composites.h"
#include "cuda/fake_cuda.h"
#include "fake_key.h"
#include "layouts/kinds/kinds.h"
#include "meta/meta_call.h"
#include "storage/fake_keys.h"
#include "values/value_shortcuts.h"

namespace torchext {

void connectPartsOfFakes() {
  static const bool connected = [] {
    registerLayouts();
    setFakeKeyHooks(fakeKeyHooks());
    registerOnCompositesKey(&registerValueShortcuts);
    registerOnCompositesKey(&registerComposites);
    setFakeCudaAllocation(&runOnMeta);
    return true;
  }();
  static_cast<void>(connected);
}

}  // namespace torchext
