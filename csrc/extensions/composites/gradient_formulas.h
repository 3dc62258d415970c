#pragma once

#include <optional>

#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <torch/library.h>
#include <torchext/macros.h>

#include "../../core/fake/storage/fake_keys.h"
#include "../../libraries/support/included_key.h"

namespace torchext {

// While an instance exists, factories on this thread make tensors of the same kind as `arguments`: deferred tensors if
// one of these is deferred, otherwise fakes if one is fake. PyTorch's kernels and gradient formulas allocate with
// factories, and write values computed from their arguments there. Nests.
class FactoriesOfCall {
 public:
  explicit FactoriesOfCall(c10::ArrayRef<c10::IValue> arguments);

 private:
  std::optional<FakeFactoriesGuard> fake_;
  std::optional<IncludedKey> deferred_;
};

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

// Registers the kernels of NOTE [Shortcuts that read values] on the key of composites.
void registerValueShortcuts(torch::Library& library);

}  // namespace torchext
