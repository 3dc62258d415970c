#pragma once

#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace torchext {

// While it lives, holds back PyTorch's warnings on this thread; the destructor passes them on. Warnings that Python
// code raises with `warnings.warn()` are not held back.
class HeldWarnings {
 public:
  HeldWarnings() = default;
  C10_DISABLE_COPY_AND_ASSIGN(HeldWarnings);
  ~HeldWarnings() {
    for (const c10::Warning& warning : handler_.held) {
      outer_->process(warning);
    }
  }

  bool isEmpty() const noexcept {
    return handler_.held.empty();
  }

  // Returns the warnings and drops them, so that the destructor does not pass them on.
  std::vector<c10::Warning> consume() noexcept {
    return std::exchange(handler_.held, {});
  }

 private:
  struct Hold final : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      held.push_back(warning);
    }
    std::vector<c10::Warning> held;
  };

  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
  Hold handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

inline void passOn(const std::vector<c10::Warning>& warnings) {
  for (const c10::Warning& warning : warnings) {
    c10::WarningUtils::get_warning_handler()->process(warning);
  }
}

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
