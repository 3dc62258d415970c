#include "registration.h"

#include <cstdlib>
#include <string_view>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "fake/parts.h"
#include "memory/memory_counter.h"
#include "support/allocation_limit.h"
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

// For the tests of this package, as in torch_internals/self_tests.cpp.
bool isBroken(std::string_view what) noexcept {
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && broken == what;
}

}  // namespace

void setUp() {
  static const bool done = [] {
    runSelfTests();
    TORCH_CHECK(
        testAllocationLimit(isBroken("allocation_limit")),
        "torchext needs a CPU allocator of PyTorch that reports memory before it has an owner, but that of torch ",
        TORCH_VERSION, " does not. Use a release that this torchext supports, or a newer torchext.");
    surviveForks();
    return true;
  }();
  static_cast<void>(done);
}

const char* builtForTorch() noexcept {
  return isBroken("library") ? "2.0.1" : TORCH_VERSION;
}

}  // namespace torchext
