#include <memory>

#include "kinds.h"
#include "refused_layout.h"

namespace torchext {

namespace {

class MkldnnLayout final : public RefusedLayout {
 public:
  MkldnnLayout()
      : RefusedLayout{{"a tensor of layout torch._mkldnn", "keep such tensors out of fake_mode() and deferred_init()"},
                      {"aten::to_mkldnn"}} {}
};

}  // namespace

std::unique_ptr<const LayoutHandler> makeMkldnnLayout() {
  return std::make_unique<const MkldnnLayout>();
}

}  // namespace torchext
