#include "self_tests.h"

#include <array>
#include <cstdlib>
#include <exception>
#include <string_view>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "backend_meta.h"
#include "dispatcher_internals.h"
#include "error_texts.h"
#include "kernel_identity.h"
#include "keys_of_tests.h"
#include "open_tensor_impl.h"
#include "virtual_table.h"

namespace torchext {

namespace {

struct Piece {
  SelfTest test;
  const char* name;
  const char* relies_on;
  bool (*passes)(bool is_broken);
  bool is_needed_by_all;
};

constexpr std::array<Piece, 8> kPieces{{
    {SelfTest::kTensorKeys, "open_tensor_impl", "the key set of a tensor being the protected `TensorImpl::key_set_`",
     &testTensorKeys, true},
    {SelfTest::kVirtualTable, "virtual_table", "virtual functions being called as the Itanium C++ ABI tells",
     &testVirtualTable, true},
    {SelfTest::kKernelIdentity, "kernel_identity", "the first four words of a KernelFunction telling kernels apart",
     &testKernelIdentity, true},
    {SelfTest::kOperatorEntry, "operator_entry", "private members of OperatorHandle, OperatorEntry and KernelFunction",
     &testOperatorEntry, true},
    {SelfTest::kFallbacks, "fallbacks", "private members of the Dispatcher about the fallbacks of keys", &testFallbacks,
     false},
    {SelfTest::kErrorTexts, "error_texts", "the words of errors that PyTorch raises", &testErrorTexts, true},
    {SelfTest::kKeysOfTests, "keys_of_tests", "the two `TESTING_ONLY` keys being above those of autograd",
     &testKeysOfTests, true},
    {SelfTest::kBackendMeta, "backend_meta", "copies of a tensor taking its BackendMeta along", &testBackendMeta,
     false},
}};

// For the tests of this package: the variable names a piece that has to behave as if PyTorch had changed under it.
bool isBroken(const Piece& piece) {
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && std::string_view{broken} == piece.name;
}

bool passes(const Piece& piece) {
  try {
    return piece.passes(isBroken(piece));
  } catch (const std::exception&) {
    return false;
  }
}

const Piece& pieceOf(SelfTest test) {
  return kPieces.at(static_cast<std::size_t>(test));
}

[[noreturn]] void raise(const Piece& piece, const char* usage) {
  TORCH_CHECK(false, usage, " `", piece.name, "` of csrc/torch_internals, which relies on ", piece.relies_on,
              ". Its self-test fails with this PyTorch (built for ", TORCH_VERSION,
              "). Use a release of PyTorch that this torchext supports, or a newer torchext.");
}

}  // namespace

void runSelfTests() {
  for (const Piece& piece : kPieces) {
    if (piece.is_needed_by_all && !passes(piece)) {
      raise(piece, "torchext needs");
    }
  }
}

void requireSelfTest(SelfTest test, const char* usage) {
  const Piece& piece = pieceOf(test);
  if (!passes(piece)) {
    raise(piece, usage);
  }
}

bool passesSelfTest(SelfTest test) {
  return passes(pieceOf(test));
}

}  // namespace torchext
