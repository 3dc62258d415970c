#include "registration.h"

#include <cstdlib>
#include <string_view>

#include <torch/version.h>

#include "hooks/hooks.h"
#include "support/locks.h"
#include "support/take_key.h"
#include "torch_internals/self_tests.h"

namespace torchext {

namespace {

// For programs without Python, which import nothing: the self-tests run before the first key is taken.
[[maybe_unused]] const bool is_loaded = [] {
  beforeFirstKey(&setUp);
  return true;
}();

// For the tests of this package, as in core/torch_internals/self_tests.cpp.
bool isBroken(std::string_view what) noexcept {
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && broken == what;
}

}  // namespace

void setUp() {
  static const bool done = [] {
    runSelfTests();
    for (const ExtensionTest test : hooks().self_tests) {
      test(&isBroken);
    }
    surviveForks();
    return true;
  }();
  static_cast<void>(done);
}

const char* builtForTorch() noexcept {
  return isBroken("library") ? "2.0.1" : TORCH_VERSION;
}

}  // namespace torchext
