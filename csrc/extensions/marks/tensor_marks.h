#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torchext/macros.h>

#include "../../libraries/support/leases.h"

namespace torchext {

// NOTE [Marked tensors]
//
// Two features must intercept every operator on their tensors, also on real ones, above autograd: NOTE [Origins of
// inference tensors] and NOTE [AmpTensors]. PyTorch has one unused key for that, so they share it: marks_key.h. A
// tensor that one of them marks has the key. Its marks are an object attached to its TensorImpl as the metadata of its
// backend. Copies of a TensorImpl that share its data have both. A view made by a kernel has only the key of its base,
// until the handler of a feature marks it like its base. Calls without marked tensors do not reach the key, and cost
// nothing more.

enum class AmpMark : std::uint8_t { kNone, kWrapped, kToBeCleaned };

// The marks of a tensor. Immutable, and shared by all tensors with equal marks. Freed with the last of them.
struct TORCHEXT_API TensorMarks final : c10::BackendMeta {
  TensorMarks(std::string source_line, AmpMark amp_mark);
  C10_DISABLE_COPY_AND_ASSIGN(TensorMarks);
  ~TensorMarks() override;

  // Called by `c10::intrusive_ptr` when the last tensor with these marks has been freed.
  void release_resources() override;

  // The source line that created the tensor, or empty.
  const std::string origin;
  const AmpMark amp;

 private:
  const LeaseHold marks_{leaseOfMarks()};
  // A backward pass must distinguish formulas of autograd from recomputation.
  const LeaseHold regions_{leaseOfRegions()};
};

// A TensorImpl can hold one backend object, a BackendMeta, which PyTorch's backends leave empty, and which holds the
// marks here. Returns true if copies of the TensorImpl without its data, as by `detach()` and `.data`, keep it.
bool testBackendMeta(bool is_broken);

// Returns the number of TensorMarks in the process. While it is 0, no tensor is marked.
TORCHEXT_API std::int64_t liveMarks() noexcept;

// Returns the marks, or null if the tensor has none, or has the metadata of another backend.
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

// Returns false if the tensor has the metadata of another backend, which occupies the same pointer.
bool canBeMarked(const c10::TensorImpl& impl);

// Change one of the marks, and whether the tensor has the key. No-ops for a tensor that cannot be marked: operators on
// it run as if the feature did not exist.
void setOriginMark(c10::TensorImpl& impl, const std::string& origin);
TORCHEXT_API void setAmpMark(c10::TensorImpl& impl, AmpMark amp);

// Returns an alias of the tensor without marks, detached from autograd.
TORCHEXT_API at::Tensor withoutMarks(const at::Tensor& tensor);

}  // namespace torchext
