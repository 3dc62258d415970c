#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

namespace torchext {

// NOTE [Marked tensors]
//
// Two features have to meet any operator on tensors of theirs, real ones too, above autograd: NOTE [Origins of
// inference tensors] and NOTE [The identity of AmpTensors]. PyTorch has one key to spare for that, which is meant for
// modes in tests and is above all others that do anything. So the two share it. A tensor that one of them has marked
// carries the key; how it is marked is told by an object that hangs on its TensorImpl, in the place that PyTorch has
// for a backend's own metadata. Copies of a TensorImpl that share its data take both along. A view that a kernel makes
// has the key of its base only, until the fallback of the key marks it as its base is. What is not marked does not meet
// the key, and pays nothing.
constexpr c10::DispatchKey kMarksKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

enum class AmpMark : std::uint8_t { kNone, kWrapped, kToBeCleaned };

// The marks of a tensor. Immutable, and shared by all tensors that are marked alike.
struct TensorMarks final : c10::BackendMeta {
  TensorMarks(std::string where, AmpMark identity) : origin{std::move(where)}, amp{identity} {}

  // The line of the program that made the tensor, or empty.
  const std::string origin;
  const AmpMark amp;
};

// Takes the key, for good. Cheap when that has been done. To be called before anything carries or includes the key;
// raises when another library has taken it.
void takeMarksKey();

// Null when there are none, or when the tensor's metadata is that of a backend.
const TensorMarks* marksOf(const c10::TensorImpl& impl);

inline const std::string& originMarkOf(const c10::TensorImpl& impl) {
  static const std::string none;
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? none : marks->origin;
}

inline AmpMark ampMarkOf(const c10::TensorImpl& impl) {
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? AmpMark::kNone : marks->amp;
}

// Change one of the marks, and whether the tensor carries the key. They do nothing to a tensor whose metadata is that
// of a backend.
void setOriginMark(c10::TensorImpl& impl, const std::string& origin);
void setAmpMark(c10::TensorImpl& impl, AmpMark amp);

// The same tensor for those who know of no marks: of the same memory, detached.
at::Tensor withoutMarks(const at::Tensor& tensor);

// Held while the process forks, so that the child does not find it locked by a thread that it does not have.
void lockMarks();
void unlockMarks();

// The fallback of `kMarksKey`: hands the call to the features that it is about.
void marksFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// How a call goes on below the feature that comes first: as the other one does it, or with the keys below.
using MarkedCall = void (*)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
