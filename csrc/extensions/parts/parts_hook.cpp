#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/plan/replay_plan.h"
#include "../../core/hooks/hooks.h"
#include "../support/registrations.h"
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

}  // namespace

void registerPartRules() {
  PartRules& rules = hooks().parts;
  rules.ruleOf = &ruleOf;
  rules.demandsOf = &demandsByParts;
  rules.copiedArgument = &copiedArgument;
  rules.workspaceOf = &workspaceOf;
  rules.check = &checkPlan;
  rules.run = &runForParts;
  rules.checkIsExact = &checkIsExact;
  rules.mayHaveSteps = &mayHaveSteps;
  rules.resultOfStep = &resultOfStep;
  rules.worksInPlace = &worksInPlace;
  rules.fillWithSteps = &fillWithSteps;
}

}  // namespace torchext
