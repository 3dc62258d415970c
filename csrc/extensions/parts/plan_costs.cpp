#include "plan_costs.h"

#include <algorithm>

#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "grid.h"
#include "part_rules.h"

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

// `is_counted(writer, value)` returns true if the memory of the value counts.
template <typename IsCounted>
std::size_t peakWhere(const ReplayPlan& plan, const IsCounted& is_counted) {
  std::size_t peak = 0;
  std::size_t alive = 0;
  const auto bytesOf = [&](const PlannedOperator& planned, const PlannedValue& written) {
    return is_counted(planned, written) ? written.nbytes : 0;
  };
  const auto allocate = [&](const PlannedOperator& planned) {
    for (const PlannedValue& written : planned.writes) {
      alive += written.isTaken() ? 0 : bytesOf(planned, written);
    }
  };
  const auto drop = [&](const PlannedOperator& planned) {
    for (const PlannedValue& written : planned.writes) {
      // The value before is among the last uses. Values that are not read are dropped at once.
      alive += written.isTaken() ? bytesOf(planned, written) : 0;
      alive -= written.value == nullptr ? bytesOf(planned, written) : 0;
    }
    for (const LiveValue& value : planned.last_uses) {
      alive -= plan.of(value).is_wanted ? 0 : bytesOf(plan.operators()[value.writer], plan.of(value));
    }
  };
  const auto withSteps = [&plan](const PlannedOperator& planned, const auto& visit) {
    visit(planned);
    for (const std::size_t step : planned.steps) {
      visit(plan.operators()[step]);
    }
  };
  for (const PlannedOperator& planned : plan.operators()) {
    if (planned.way != Way::kNotAtAll && planned.way != Way::kStep) {
      withSteps(planned, allocate);
      const bool works_there = is_counted(planned, planned.writes.front());
      peak = std::max(peak, alive + (works_there ? workspaceOf(plan, planned) : 0));
      withSteps(planned, drop);
    }
  }
  for (const LiveValue& value : plan.wanted()) {
    alive += value.hasWriter() ? 0 : value.value->nbytes();  // a constant, which is copied
  }
  return std::max(peak, alive);
}

}  // namespace

std::size_t peakOf(const ReplayPlan& plan) {
  return peakWhere(plan, [](const PlannedOperator& /*planned*/, const PlannedValue& /*written*/) { return true; });
}

// A result that is not read has no recorded value. It is on the device of the operator's other inputs and outputs.
std::size_t peakOnCpuOf(const ReplayPlan& plan) {
  const auto isOnCpu = [](const StorageValue* value) { return value == nullptr || value->device().is_cpu(); };
  return peakWhere(plan, [&isOnCpu](const PlannedOperator& planned, const PlannedValue& written) {
    if (written.value != nullptr) {
      return isOnCpu(written.value);
    }
    const auto& tensors = planned.node->tensors();
    return std::all_of(planned.writes.begin(), planned.writes.end(),
                       [&](const PlannedValue& other) { return isOnCpu(other.value); }) &&
           std::all_of(tensors.begin(), tensors.end(),
                       [&](const TensorArgument& argument) { return isOnCpu(argument.value.get()); });
  });
}

std::size_t bytesWrittenBy(const ReplayPlan& plan) {
  std::size_t sum = 0;
  for (const PlannedOperator& planned : plan.operators()) {
    for (const PlannedValue& written : planned.writes) {
      sum += planned.way == Way::kNotAtAll || planned.way == Way::kTakesOver ? 0 : written.nbytes;
    }
  }
  return sum;
}

double shareOf(const PlannedOperator& planned) {
  if (planned.way == Way::kNotAtAll || planned.way == Way::kTakesOver) {
    return 0;
  }
  if (planned.way != Way::kParts) {
    return 1;
  }
  std::size_t computed = 0;
  std::size_t whole = 1;
  for (const Box& box : boxesOf(*planned.writes.front().parts)) {
    computed += box.nbytes();
    whole = box.grid().storageBytes();
  }
  return std::min(1.0, static_cast<double>(computed) / static_cast<double>(whole));
}

}  // namespace torchext
