#pragma once

// The files of this directory, and some of extensions, rely on details that PyTorch does not promise. Each piece has a
// test that takes microseconds, and the newest release on which it was verified: the test does not cover all changes of
// PyTorch, and an undetected one may crash. So a piece fails with newer releases, unless
// TORCHEXT_ACCEPT_UNVERIFIED_TORCH is 1.

#include <vector>

#include <torchext/macros.h>

#include "../hooks/hooks.h"

namespace torchext {

enum class SelfTest : int {
  kTensorKeys,      // open_tensor_impl.h
  kKernelIdentity,  // kernel_identity.h
  kOperatorEntry,   // dispatcher_internals.h: the tables of operators
  kFallbacks,       // dispatcher_internals.h: the fallbacks of keys
  kErrorTexts,      // error_texts.h
  kKeysOfTests,     // keys_of_tests.h
  kBackendMeta,     // backend_meta.h
};

// Returns the pieces of this directory, in the order of `SelfTest`, and those of extensions.
TORCHEXT_API std::vector<TestedPiece> piecesOfPyTorch();

// Runs the tests of the pieces that all features rely on. Raises an error that names the first failed piece.
void runSelfTests();

// Raises an error if the test of a piece fails. It names the piece and begins with `usage`. For pieces that only some
// features rely on; they are tested on first use.
void requireSelfTest(SelfTest test, const char* usage);

// Return true if the test passes.
bool passesSelfTest(SelfTest test);
TORCHEXT_API bool passesSelfTest(const TestedPiece& piece);

}  // namespace torchext
