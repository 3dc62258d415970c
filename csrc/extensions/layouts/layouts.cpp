#include "layouts.h"

#include <exception>
#include <optional>

#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "sparse_call.h"
#include "sparse_fakes.h"

namespace torchext {

namespace {

class SparseCalls final : public CallHandler {
 public:
  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& /*facts*/) const override {
    if (!isAboutSparse(op, argumentsOf(op, stack))) {
      return std::nullopt;
    }
    try {
      checkSparse(op, stack);
    } catch (const c10::Error&) {
      return HandledCall{std::current_exception()};
    }
    return HandledCall{nullptr, HandledCall::Effect::kDecomposes, "runs the kernel of the layout on fake members"};
  }

  void run(const OperatorHandle& op, c10::DispatchKeySet /*below*/, Stack& stack) const override {
    runOnSparse(op, stack);
  }
};

}  // namespace

void registerLayouts() {
  static constexpr SparseCalls calls;
  hooks().handlers.add(&calls);
  Layouts& layouts = hooks().layouts;
  layouts.isSparse = &isSparse;
  layouts.isSparseFake = &isSparseFake;
  layouts.membersOf = &sparseMembersOf;
  layouts.fakeOf = &makeSparseFake;
  layouts.checkCanBeFaked = &checkLayoutCanBeFaked;
  layouts.refuse = &refuseLayouts;
}

}  // namespace torchext
