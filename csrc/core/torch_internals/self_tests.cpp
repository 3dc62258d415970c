#include "self_tests.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string_view>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <torch/version.h>

#include "dispatcher_internals.h"
#include "error_texts.h"
#include "open_tensor_impl.h"
#include "torch_compat.h"

namespace torchext {

namespace {

bool testTensorKeys(bool is_broken) {
  const c10::DispatchKeySet keys{c10::DispatchKey::CPU};
  const c10::DispatchKeySet added{c10::DispatchKey::Conjugate};
  const auto impl =
      c10::make_intrusive<c10::TensorImpl>(keys, caffe2::TypeMeta::Make<std::uint8_t>(), c10::Device{c10::kCPU});
  const c10::DispatchKeySet before = impl->key_set();
  OpenTensorImpl::keysOf(*impl) = is_broken ? before : before | added;
  const bool is_given = impl->key_set() == (before | added) && impl->is_conj();
  OpenTensorImpl::keysOf(*impl) = before;
  return is_given && impl->key_set() == before && !impl->is_conj();
}

// PyTorch has two keys for its own tests of modes and wrappers (backend_fallback_test.cpp). Nothing else uses them.
// They are above all keys with kernels in ordinary use, and the one for modes is above the one for wrappers.
bool testKeysOfTests(bool is_broken) {
  const c10::DispatchKeySet below_modes{c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::TESTING_ONLY_GenericMode};
  const c10::DispatchKeySet below_wrappers{c10::DispatchKeySet::FULL_AFTER,
                                           c10::DispatchKey::TESTING_ONLY_GenericWrapper};
  const c10::DispatchKeySet met_later({c10::DispatchKey::DeferredInit, c10::DispatchKey::AutocastCPU,
                                       c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView,
                                       c10::DispatchKey::Fake});
  return below_modes.has(c10::DispatchKey::TESTING_ONLY_GenericWrapper) != is_broken &&
         below_wrappers.has_all(met_later);
}

// Calls `raise`, and returns true if `recognizes` recognizes the error.
template <typename Raise, typename Recognizes>
bool isRecognized(Raise raise, Recognizes recognizes) {
  try {
    raise();
  } catch (const c10::Error& error) {
    return recognizes(error);
  }
  return false;
}

bool testErrorTexts(bool is_broken) {
  const auto write = [is_broken] {
    if (is_broken) {
      TORCH_CHECK(false, "in other words");
    }
    c10::VariableVersion{c10::VariableVersion::DISABLED}.bump();
  };
  const auto fail = [] { TORCH_INTERNAL_ASSERT(false); };
  return isRecognized(write, isWriteToInferenceTensor) && isRecognized(write, isAboutInferenceTensors) &&
         isRecognized(fail, isInternalAssert);
}

constexpr std::array<TestedPiece, 5> kPieces{{
    {"open_tensor_impl", "the key set of a tensor being the protected `TensorImpl::key_set_`", 215, &testTensorKeys},
    {"kernel_identity", "the first four words of a KernelFunction identifying a kernel", 215, &testKernelIdentity},
    {"operator_entry", "private members of OperatorHandle, OperatorEntry and KernelFunction", 215, &testOperatorEntry},
    {"error_texts", "the words of errors that PyTorch raises", 215, &testErrorTexts},
    {"keys_of_tests", "the two `TESTING_ONLY` keys being above those of autograd", 215, &testKeysOfTests},
}};

// For the tests of this package: the variable names a piece whose self-test must fail, as after a change of PyTorch, or
// is "release" to treat the release as unverified.
bool isBroken(std::string_view what) {
  const char* broken = std::getenv("TORCHEXT_BREAK_PIECE");
  return broken != nullptr && what == broken;
}

bool isVerified(const TestedPiece& piece) {
  return (TORCHEXT_TORCH <= piece.verified && !isBroken("release")) ||
         c10::utils::check_env("TORCHEXT_ACCEPT_UNVERIFIED_TORCH") == true;
}

[[noreturn]] void raise(const TestedPiece& piece, const char* usage) {
  TORCH_CHECK(isVerified(piece), usage, " `", piece.name, "`, which relies on ", piece.relies_on,
              ". That was verified up to torch ", piece.verified / 100, ".", piece.verified % 100,
              ", and torchext is built for torch ", TORCH_VERSION,
              ". Use a release that this torchext supports, or a "
              "newer torchext; or set TORCHEXT_ACCEPT_UNVERIFIED_TORCH=1 if crashes and wrong results are acceptable.");
  TORCH_CHECK(false, usage, " `", piece.name, "`, which relies on ", piece.relies_on,
              ". Its self-test fails with this PyTorch (built for ", TORCH_VERSION,
              "). Use a release of PyTorch that this torchext supports, or a newer torchext.");
}

TestedPiece pieceNamed(std::string_view name) {
  for (const TestedPiece& piece : piecesOfPyTorch()) {
    if (piece.name == name) {
      return piece;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "there is no piece `", name, "`");
}

}  // namespace

std::vector<TestedPiece> piecesOfPyTorch() {
  std::vector<TestedPiece> pieces{kPieces.begin(), kPieces.end()};
  for (const TestedPiece* piece : hooks().pieces) {
    pieces.push_back(*piece);
  }
  return pieces;
}

void runSelfTests() {
  for (const TestedPiece& piece : piecesOfPyTorch()) {
    if (piece.is_needed_by_all && !passesSelfTest(piece)) {
      raise(piece, "torchext needs");
    }
  }
}

void requireSelfTest(std::string_view piece, const char* usage) {
  if (!passesSelfTest(piece)) {
    raise(pieceNamed(piece), usage);
  }
}

bool passesSelfTest(std::string_view piece) {
  return passesSelfTest(pieceNamed(piece));
}

bool passesSelfTest(const TestedPiece& piece) {
  // `TensorImpl::shallow_copy_and_detach()` calls the innermost mode of Python.
  const c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKey::Python};
  try {
    return isVerified(piece) && piece.passes(isBroken(piece.name));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace torchext
