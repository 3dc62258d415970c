#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <torchext/macros.h>

#include "../marks/tensor_marks.h"

namespace torchext {

// NOTE [AmpTensors]
//
// An AmpTensor is a tensor with a mark, NOTE [Marked tensors] in tensor_marks.h. Calls with such a tensor go to a
// handler, which marks the results; other calls are unaffected. The key of marked tensors is above autograd, autocast
// and torchext's keys: a fake or deferred AmpTensor is handled as such below it, and casts are recorded like any other
// operator.

// NOTE [Self-cleaning results]
//
// Results of operators in a self-cleaning region are AmpTensors of a second kind. The first kind, wrapped by a user,
// enables autocast outside of regions. The second kind does the opposite: the next operator that does not autocast
// casts it to float32.

// Returns true if a tensor of this dtype can be an AmpTensor: if it can require a gradient.
inline bool canBeAmp(const at::TensorBase& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

inline bool isAmp(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) != AmpMark::kNone;
}

// Returns true for the second kind.
inline bool isToBeCleaned(const at::TensorBase& tensor) {
  return ampMarkOf(*tensor.unsafeGetTensorImpl()) == AmpMark::kToBeCleaned;
}

// Raises if `tensor` cannot be marked.
TORCHEXT_API void checkCanBeWrapped(const at::TensorBase& tensor);

// Makes `tensor` an AmpTensor of the first kind. Works in place, like `requires_grad_()`: no other thread may access
// the tensor. It stays ordinary if it cannot be marked.
inline void makeAmp(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kWrapped);
}

// Makes `tensor` an AmpTensor of the second kind.
inline void markToBeCleaned(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kToBeCleaned);
}

// Copies the mark of `like` to `tensor`, which was made from `like` or its metadata without an operator.
inline void makeAmpLike(const at::TensorBase& tensor, const at::TensorBase& like) {
  const bool is_cleaned = isToBeCleaned(like) && tensor.scalar_type() != like.scalar_type();
  if (isAmp(like) && canBeAmp(tensor) && !is_cleaned) {
    setAmpMark(*tensor.unsafeGetTensorImpl(), ampMarkOf(*like.unsafeGetTensorImpl()));
  }
}

// Removes the mark of `tensor`.
inline void makeOrdinary(const at::TensorBase& tensor) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), AmpMark::kNone);
}

// NOTE [AmpTensors in a backward pass]
//
// The operators of a backward pass run in the dtypes of the forward pass, so AmpTensors are neither autocast nor
// cleaned there. Two kinds of code in a backward pass are not formulas. Recomputation is a forward pass: for
// torch.utils.checkpoint, Python enters a guard, because PyTorch does not report it; others recompute in their own
// autograd function, where they must enable grad mode. User code uses the tensors of the program in any dtype: it is
// identified by its node in the graph.

// The backward pass or recomputation that is active on a thread.
struct BackwardState {
  bool is_recomputation;
  bool has_region_decided;
  bool creates_graph;
  // The number of regions that are open around it.
  int depth;
};

// Active during a backward pass.
class TORCHEXT_API BackwardGuard {
 public:
  // `creates_graph`: the pass is recorded, so that it can be differentiated.
  explicit BackwardGuard(bool creates_graph) : BackwardGuard{false, false, creates_graph} {}
  C10_DISABLE_COPY_AND_ASSIGN(BackwardGuard);
  ~BackwardGuard();

 protected:
  BackwardGuard(bool is_recomputation, bool has_region_decided, bool creates_graph);

 private:
  std::optional<BackwardState> previous_;
};

// Active during a recomputation, inside the regions that repeat the state of the forward pass.
class RecomputationGuard final : public BackwardGuard {
 public:
  // `has_region_decided`: the value of isRegionDeciding() in the forward pass.
  explicit RecomputationGuard(bool has_region_decided) : BackwardGuard{true, has_region_decided, false} {}
};

// Returns true if an open region of this thread, of torchext or `torch.autocast`, enabled or not, decides about
// autocast instead of the marks of AmpTensors. Regions around a running backward pass do not decide.
TORCHEXT_API bool isRegionDeciding() noexcept;

// The handler receives all calls in a self-cleaning region, and all calls with AmpTensors among their arguments. It
// excludes its key for the calls that it makes, so it runs once for a composite, not for each of its parts. Its steps:
//
//   1. Classify the arguments: wrapped, or made inside of a self-cleaning region and due for cleaning here.
//   2. Pass on the operators of a backward pass: its formulas run in the dtypes of the forward pass. Recomputed
//      operators are handled as outside of the pass, and so are mixtures of dtypes in a user-defined function.
//   3. Autocast a call with a wrapped argument, unless an open region decides.
//   4. Clean a call with an argument due for cleaning: cast it to float32, and cast written arguments back. Views and
//      factories are unchanged.
//   5. Pass on all other calls.
//   6. Mark the results: wrapped, to be cleaned, or neither. Returned arguments keep their marks.
//
// AmpOutcome is its action for a call.
enum class AmpOutcome : std::uint8_t {
  kPassesOn,            // to the keys below
  kPassesOnInBackward,  // the same, in a backward pass, where AmpTensors are neither autocast nor cleaned
  kAutocasts,           // to the keys below and those of autocast
  kCleans,              // to the keys below, with arguments cast to float32
};

struct AmpPrediction {
  AmpOutcome outcome;
  c10::DispatchKeySet autocast_keys;
};
TORCHEXT_API AmpPrediction predictAmp(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Registers the handler. Call while the library is loaded.
void registerAmpHandler();

}  // namespace torchext
