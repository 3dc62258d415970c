#pragma once

#include <c10/util/Exception.h>

namespace torchext {

// Lets PyTorch's warnings be lost on this thread.
class NoWarnings {
 private:
  struct Ignore final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };

  Ignore ignore_;
  c10::WarningUtils::WarningHandlerGuard guard_{&ignore_};
};

}  // namespace torchext
