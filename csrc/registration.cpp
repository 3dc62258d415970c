#include "registration.h"

#include <cstdlib>
#include <string_view>

#include <torch/version.h>

#include "fake/parts.h"
#include "memory/memory_counter.h"
#include "support/locks.h"
#include "support/take_key.h"
#include "torch_internals/self_tests.h"

namespace torchext {

namespace {

// For programs without Python, which import nothing: the self-tests run before the first key is taken.
[[maybe_unused]] const bool is_loaded = [] {
  connectPartsOfFakes();
  registerMemoryCounter();
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
  // For the tests of this package, as in torch_internals/self_tests.cpp.
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && std::string_view{broken} == "library" ? "2.0.1" : TORCH_VERSION;
}

}  // namespace torchext
