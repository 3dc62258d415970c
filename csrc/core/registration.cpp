#include "registration.h"

#include <cstdlib>
#include <string_view>

#include <torch/version.h>

#include "../libraries/support/locks.h"
#include "../libraries/support/take_key.h"
#include "torch_internals/self_tests.h"

namespace torchext {

namespace {

// For programs without Python, which import nothing: the self-tests run before the first key is taken.
[[maybe_unused]] const bool is_loaded = [] {
  beforeFirstKey(&setUp);
  return true;
}();

}  // namespace

void setUp() {
  static const bool done = [] {
    runSelfTests();
    surviveForks();
    return true;
  }();
  static_cast<void>(done);
}

const char* builtForTorch() noexcept {
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");  // for the tests of this package
  return broken != nullptr && broken == std::string_view{"library"} ? "2.0.1" : TORCH_VERSION;
}

}  // namespace torchext
