#pragma once

#include <c10/core/DispatchKeySet.h>
#include <torchext/macros.h>

namespace torchext {

struct RunningFormula;

// Makes what the gradient formulas of PyTorch allocate fake, or deferred, where a gradient that they are given is so:
// `sgn` returns `at::zeros()`, `matrix_exp` writes its gradient into a tensor from `at::empty()`. Formulas are called
// by the engine, on any thread and in no operator, but PyTorch shows observers each node with its inputs
// (`RecordScope::BACKWARD_FUNCTION`).
//
// The backward of a function that a user has written is left alone, as its forward is: its factories make real tensors
// outside of a block. So is user code that a formula calls: a function that unpacks what was saved, and what
// `torch.utils.checkpoint` computes again in one.

// Begins to observe, or stops at the next node: nodes of real gradients cost more, so this is stopped once no fake is
// alive. A program whose fakes come and go without a backward pass in between changes nothing in PyTorch. From any
// thread.
TORCHEXT_API void makeGradientsFake(bool is_wanted_now);

// Returns true in an observed formula on this thread, and false in user code that it calls.
bool isInGradientFormula();

// While it lives, factories on this thread make what they made before the innermost formula began. For user code that
// a formula calls. Nests.
class TORCHEXT_API OutsideOfFormula {
 public:
  OutsideOfFormula();
  C10_DISABLE_COPY_AND_ASSIGN(OutsideOfFormula);
  ~OutsideOfFormula();

 private:
  const RunningFormula* formula_;
  c10::DispatchKeySet included_;
};

}  // namespace torchext
