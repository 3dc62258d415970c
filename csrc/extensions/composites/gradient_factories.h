#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torchext/macros.h>

namespace torchext {

struct RunningFormula;

// Makes the allocations of gradient formulas in PyTorch fake, or deferred, if one of their incoming gradients is: `sgn`
// returns `at::zeros()`, `matrix_exp` writes its gradient into a tensor from `at::empty()`. The engine calls formulas
// on any thread and outside of operators, but PyTorch passes each node with its inputs to observers
// (`RecordScope::BACKWARD_FUNCTION`).
//
// The backward function of a user-defined function is excluded, like its forward function: its factories make real
// tensors outside of a block. So is user code that a formula calls: hooks that pack and unpack saved tensors, and
// recomputation by `torch.utils.checkpoint`.

// Begins to observe, or stops at the next node. Observing makes nodes of real gradients slower, so stop once no fake is
// alive. Without a backward pass in between, starting and stopping changes nothing in PyTorch. May be called from any
// thread.
TORCHEXT_API void makeGradientsFake(bool are_wanted_now);

// Returns true in an observed formula on this thread, and false in user code that it calls.
bool isInGradientFormula();

// While an instance exists, this thread runs an operator that computes the tangent of its result, if `has_tangent`.
class TangentFormula {
 public:
  explicit TangentFormula(bool has_tangent);
  C10_DISABLE_COPY_AND_ASSIGN(TangentFormula);
  ~TangentFormula();

 private:
  bool previous_;
};

// Returns true in such an operator, and false in user code that it calls.
bool isInTangentFormula();

// While an instance exists, factories on this thread make the same kind of tensors as before the innermost formula
// began. For user code that a formula calls. Nests.
class TORCHEXT_API OutsideOfFormula {
 public:
  OutsideOfFormula();
  C10_DISABLE_COPY_AND_ASSIGN(OutsideOfFormula);
  ~OutsideOfFormula();

 private:
  const RunningFormula* formula_;
  bool was_in_tangent_formula_;
  c10::DispatchKeySet included_;
};

}  // namespace torchext
