#pragma once

// The files of this directory, and some of extensions, rely on details that PyTorch does not promise. Each piece has a
// test that takes microseconds, and the newest release on which it was verified: the test does not cover all changes of
// PyTorch, and an undetected one may crash. So a piece fails with newer releases, unless
// TORCHEXT_ACCEPT_UNVERIFIED_TORCH is 1.

#include <string_view>
#include <vector>

#include <torchext/macros.h>

#include "../hooks/hooks.h"

namespace torchext {

// Returns the pieces of this directory and those of extensions.
TORCHEXT_API std::vector<TestedPiece> piecesOfPyTorch();

// Runs the tests of the pieces that all features rely on. Raises an error that names the first failed piece.
void runSelfTests();

// Raises an error if the test of the piece with this name fails. It names the piece and begins with `usage`. For pieces
// that only some features rely on; they are tested on first use.
void requireSelfTest(std::string_view piece, const char* usage);

// Return true if the test passes. A name must be that of a piece.
bool passesSelfTest(std::string_view piece);
TORCHEXT_API bool passesSelfTest(const TestedPiece& piece);

}  // namespace torchext
