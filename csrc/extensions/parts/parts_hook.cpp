#include "parts_hook.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../core/hooks/hooks.h"
#include "demands.h"
#include "elementwise_steps.h"
#include "part_calls.h"
#include "part_rules.h"
#include "plan_checks.h"
#include "value_parts.h"

namespace torchext {

namespace {

// Returns the bytes of arguments whose values are not read, but must be allocated.
std::size_t bytesOfUnreadArguments(const PlannedOperator& planned) {
  std::size_t sum = 0;
  for (const auto i : c10::irange(planned.reads.size())) {
    const TensorArgument& argument = planned.node->tensors()[i];
    const bool is_unread =
        argument.value != nullptr && planned.reads[i].value == nullptr && planned.node->writtenTo(i) == nullptr;
    sum += is_unread && argument.geometry().hasElements() ? argument.value->nbytes() : 0;
  }
  return sum;
}

// Returns what an operator allocates besides its results. The allocations inside a kernel are unknown: for a kernel
// that is neither elementwise nor a fill and makes tensors, the size of its arguments is assumed.
std::size_t workspaceOf(const ReplayPlan& plan, const PlannedOperator& planned) {
  if (planned.way == Way::kTakesOver) {
    return 0;
  }
  const OpNode& node = *planned.node;
  const PartRule rule = ruleOf(node);
  const std::size_t itemsize = node.written().front().geometry().dtype.itemsize();
  const bool is_for_parts = planned.way == Way::kParts;
  std::size_t largest = planned.writes.front().nbytes;
  if (is_for_parts) {  // one after the other
    largest = 0;
    for (const Box& box : boxesOf(*planned.writes.front().parts)) {
      largest = std::max(largest, box.nbytes());
    }
  }
  const bool reads_parts = std::any_of(planned.reads.begin(), planned.reads.end(), [&plan](const LiveValue& read) {
    return read.hasWriter() && plan.of(read).parts;
  });
  // `checkIsExact()` allocates a Boolean for each element that it checks.
  std::size_t sum = (is_for_parts || reads_parts) && hasManyNans(node) ? largest / itemsize : 0;
  if (is_for_parts && rule == PartRule::kElementwise && !node.written().front().is_argument &&
      !isWrittenDirectly(node)) {
    sum += largest;
  }
  sum += bytesOfUnreadArguments(planned);
  if (rule == PartRule::kElementwise || node.op().hasTag(at::Tag::pointwise)) {
    return sum + bytesOfConversions(node, largest / itemsize);
  }
  const bool makes_tensors = std::any_of(node.written().begin(), node.written().end(),
                                         [](const WrittenStorage& written) { return !written.is_argument; });
  if (makes_tensors && !node.tape() && rule == PartRule::kNone) {
    for (const LiveValue& argument : planned.reads) {
      sum += argument.value == nullptr ? 0 : argument.value->nbytes();
    }
  }
  return sum;
}

class Rules final : public PartRules {
 public:
  constexpr Rules() = default;

  PartRule ruleOf(const OpNode& node) const override {
    return torchext::ruleOf(node);
  }

  std::vector<Demand> demandsOf(const LiveGraph& graph) const override {
    return demandsByParts(graph);
  }

  std::optional<std::size_t> copiedArgument(const OpNode& node) const override {
    return torchext::copiedArgument(node);
  }

  std::size_t workspaceOf(const ReplayPlan& plan, const PlannedOperator& planned) const override {
    return torchext::workspaceOf(plan, planned);
  }

  void check(const ReplayPlan& plan) const override {
    checkPlan(plan);
  }

  void run(const PlannedOperator& planned,
           const PartsMemory& memory,
           const at::Generator& generator,
           ReadTensor read) const override {
    runForParts(planned, memory, generator, read);
  }

  void checkIsExact(const OpNode& node, const at::Tensor& result) const override {
    torchext::checkIsExact(node, result);
  }

  bool mayHaveSteps(const OpNode& fill) const override {
    return torchext::mayHaveSteps(fill);
  }

  std::optional<Geometry> resultOfStep(const OpNode& node, const Geometry& shown) const override {
    return torchext::resultOfStep(node, shown);
  }

  bool worksInPlace(const OpNode& step) const override {
    return torchext::worksInPlace(step);
  }

  std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                         Stack& stack,
                                                         const at::Generator& generator,
                                                         c10::ArrayRef<const OpNode*> steps) const override {
    return torchext::fillWithSteps(fill, stack, generator, steps);
  }
};

}  // namespace

void registerPartRules() {
  static constexpr Rules rules;
  hooks().parts = &rules;
}

}  // namespace torchext
