#pragma once

#include <c10/util/Exception.h>

namespace torchext {

// While it lives, PyTorch's warnings on this thread are discarded.
class NoWarnings {
 private:
  struct Ignore final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };

  Ignore ignore_;
  c10::WarningUtils::WarningHandlerGuard guard_{&ignore_};
};

}  // namespace torchext
