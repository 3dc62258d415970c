#include <vector>

#include "kinds.h"
#include "sparse_call.h"
#include "sparse_fakes.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// COO and the four compressed layouts: NOTE [Sparse fakes].
class SparseLayout final : public LayoutHandler {
 public:
  constexpr SparseLayout() = default;

  bool has(const at::TensorBase& tensor) const noexcept override {
    return isSparse(tensor);
  }

  bool isFake(const at::TensorBase& tensor) const override {
    return isSparseFake(tensor);
  }

  std::vector<Tensor> membersOf(const Tensor& tensor) const override {
    return sparseMembersOf(tensor);
  }

  Tensor fakeOf(const Tensor& tensor, at::ArrayRef<Tensor> members) const override {
    return makeSparseFake(tensor, members);
  }

  bool concerns(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) const override {
    return isAboutSparse(op, arguments);
  }

  void check(const OperatorHandle& op, const Stack& stack) const override {
    checkSparse(op, stack);
  }

  void run(const OperatorHandle& op, Stack& stack) const override {
    runOnSparse(op, stack);
  }
};

}  // namespace

void registerSparseLayout() {
  static constexpr SparseLayout layout;
  hooks().layouts.add(&layout);
}

}  // namespace torchext
