#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torchext/macros.h>

#include "../support/leases.h"
#include "marks_handlers.h"
#include "marks_key.h"

namespace torchext {

// NOTE [Marked tensors]
//
// Two features have to intercept every operator on their tensors, even on real ones, above autograd: NOTE [Origins of
// inference tensors] and NOTE [AmpTensors]. PyTorch has one unused key left for that, so the two share
// it: marks_key.h. A tensor that one of them has marked carries the key. Its marks are an object that is attached to
// its TensorImpl, in the place that PyTorch has for a backend's own metadata. Copies of a TensorImpl that share its
// data have both. A view that a kernel makes has only the key of its base, until the handler of a feature marks it like
// its base. Calls without marked tensors do not reach the key, and cost nothing more.

enum class AmpMark : std::uint8_t { kNone, kWrapped, kToBeCleaned };

// The marks of a tensor. Immutable, and shared by all tensors that are marked alike. They are freed with the last of
// these.
struct TORCHEXT_API TensorMarks final : c10::BackendMeta {
  TensorMarks(std::string source_line, AmpMark amp_mark);
  C10_DISABLE_COPY_AND_ASSIGN(TensorMarks);
  ~TensorMarks() override;

  // Called by `c10::intrusive_ptr` when the last tensor that has these marks has been freed.
  void release_resources() override;

  // The line of the program that made the tensor, or empty.
  const std::string origin;
  const AmpMark amp;
  // The features that have made these marks, and that handle calls on the tensor.
  const MarksFeatures features;

 private:
  const LeaseHold marks_{leaseOfMarks()};
  // A backward pass has to tell what autograd computes from what is computed again.
  const LeaseHold regions_{leaseOfRegions()};
};

// Returns the number of TensorMarks in the process. While it is 0, no tensor is marked.
TORCHEXT_API std::int64_t liveMarks() noexcept;

// Returns the marks, or null if there are none, or if the tensor has metadata of a backend's.
TORCHEXT_API const TensorMarks* marksOf(const c10::TensorImpl& impl);

inline const std::string& originMarkOf(const c10::TensorImpl& impl) {
  static const std::string none;
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? none : marks->origin;
}

inline AmpMark ampMarkOf(const c10::TensorImpl& impl) {
  const TensorMarks* marks = marksOf(impl);
  return marks == nullptr ? AmpMark::kNone : marks->amp;
}

// Returns false if the tensor has metadata of a backend's: there is one place for both.
bool canBeMarked(const c10::TensorImpl& impl);

// Change one of the marks, and whether the tensor carries the key. They do nothing to a tensor that cannot be marked:
// operators on it run as if there were no such feature.
void setOriginMark(c10::TensorImpl& impl, const std::string& origin);
TORCHEXT_API void setAmpMark(c10::TensorImpl& impl, AmpMark amp);

// Returns an alias of the tensor without marks, detached from autograd.
TORCHEXT_API at::Tensor withoutMarks(const at::Tensor& tensor);

}  // namespace torchext
