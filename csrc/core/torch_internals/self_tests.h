#pragma once

// The files of this directory rely on details that PyTorch does not promise. Each piece has a test that takes
// microseconds, and the newest release on which it was verified: the test does not cover all changes of PyTorch, and an
// undetected one may crash. So a piece fails with newer releases, unless TORCHEXT_ACCEPT_UNVERIFIED_TORCH is 1.

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

struct TestedPiece {
  const char* name;
  const char* relies_on;
  int verified;
  bool (*passes)(bool is_broken);
  bool is_needed_by_all = true;
};

TORCHEXT_API const std::array<TestedPiece, 8>& piecesOfPyTorch();

// Runs the tests of the pieces that all features rely on. Raises an error that names the first failed piece.
void runSelfTests();

// Raises an error if the test of a piece fails. It names the piece and begins with `usage`. For pieces that only some
// features rely on; they are tested on first use.
void requireSelfTest(SelfTest test, const char* usage);

// Return true if the test passes.
bool passesSelfTest(SelfTest test);
TORCHEXT_API bool passesSelfTest(const TestedPiece& piece);

}  // namespace torchext
