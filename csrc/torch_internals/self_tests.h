#pragma once

// The pieces of this room rely on what PyTorch does not promise. Each has a test that takes microseconds, and the
// newest release on which it was verified: where PyTorch has changed beyond what the test looks at, a piece may crash.
// With a newer release it fails, unless TORCHEXT_ACCEPT_UNVERIFIED_TORCH is 1.

#include <array>

#include <torchext/macros.h>

namespace torchext {

enum class SelfTest : int {
  kTensorKeys,      // open_tensor_impl.h
  kVirtualTable,    // virtual_table.h
  kKernelIdentity,  // kernel_identity.h
  kOperatorEntry,   // dispatcher_internals.h: the tables of operators
  kFallbacks,       // dispatcher_internals.h: the fallbacks of keys
  kErrorTexts,      // error_texts.h
  kKeysOfTests,     // keys_of_tests.h
  kBackendMeta,     // backend_meta.h
};

struct Piece {
  const char* name;
  const char* relies_on;
  int verified;
  bool (*passes)(bool is_broken);
  bool is_needed_by_all = true;
};

TORCHEXT_API const std::array<Piece, 8>& piecesOfPyTorch();

// Runs the tests of the pieces that everything relies on. Raises an error that names the first one that fails.
void runSelfTests();

// Raises an error if the test of a piece fails. It names the piece, and `usage`, the beginning of a sentence. For
// pieces that only some features rely on; they are tested when they are first needed.
void requireSelfTest(SelfTest test, const char* usage);

// Returns true if the test passes.
bool passesSelfTest(SelfTest test);

}  // namespace torchext
