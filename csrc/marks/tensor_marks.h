#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "../support/leases.h"
#include "../support/macros.h"
#include "marks_handlers.h"
#include "marks_key.h"

namespace torchext {

// NOTE [Marked tensors]
//
// Two features have to meet any operator on tensors of theirs, real ones too, above autograd: NOTE [Origins of
// inference tensors] and NOTE [The identity of AmpTensors]. PyTorch has one key to spare for that, so the two share it:
// marks_key.h. A tensor that one of them has marked carries the key; how it is marked is told by an object that hangs
// on its TensorImpl, in the place that PyTorch has for a backend's own metadata. Copies of a TensorImpl that share its
// data take both along. A view that a kernel makes has the key of its base only, until the handler of a feature marks
// it as its base is. What is not marked does not meet the key, and pays nothing.

enum class AmpMark : std::uint8_t { kNone, kWrapped, kToBeCleaned };

// The marks of a tensor. Immutable, and shared by all tensors that are marked alike. They die with the last of these.
struct TORCHEXT_API TensorMarks final : c10::BackendMeta {
  TensorMarks(std::string where, AmpMark identity);
  TensorMarks(const TensorMarks&) = delete;
  TensorMarks& operator=(const TensorMarks&) = delete;
  TensorMarks(TensorMarks&&) = delete;
  TensorMarks& operator=(TensorMarks&&) = delete;
  ~TensorMarks() override;

  // Called by `c10::intrusive_ptr` when the last tensor that bears the marks has died.
  void release_resources() override;

  // The line of the program that made the tensor, or empty.
  const std::string origin;
  const AmpMark amp;
  // Those that have made these marks, and handle calls on the tensor.
  const MarksFeatures features;

 private:
  const LeaseHold marks_{leaseOfMarks()};
  // A backward pass has to tell what autograd computes from what is computed again.
  const LeaseHold regions_{leaseOfRegions()};
};

// How many TensorMarks there are. While it is 0, no tensor of the process is marked.
TORCHEXT_API std::int64_t liveMarks() noexcept;

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

// Returns false if the tensor has metadata of a backend's, for which it has one place.
bool canBeMarked(const c10::TensorImpl& impl);

// Change one of the marks, and whether the tensor carries the key. They do nothing to a tensor that cannot be marked:
// operators on it run as without the feature.
void setOriginMark(c10::TensorImpl& impl, const std::string& origin);
void setAmpMark(c10::TensorImpl& impl, AmpMark amp);

// The same tensor for those who know of no marks: of the same memory, detached.
at::Tensor withoutMarks(const at::Tensor& tensor);

// Held while the process forks, so that the child does not find it locked by a thread that it does not have.
void lockMarks();
void unlockMarks();

}  // namespace torchext
