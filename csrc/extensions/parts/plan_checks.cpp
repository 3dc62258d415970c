#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <c10/util/irange.h>

#include "../../libraries/support/sizes.h"
#include "grid.h"
#include "part_rules.h"

namespace torchext {

namespace {

bool arePlansChecked() noexcept {
  static const bool are_checked = [] {
    const char* value = std::getenv("TORCHEXT_CHECK_PLANS");
    return value != nullptr && std::string_view{value} == "1";
  }();
  return are_checked;
}

// Returns true if all of `value` that `geometry` shows is computed.
bool isCovered(const PlannedValue& value, const Geometry& geometry) {
  if (!value.parts) {
    return true;
  }
  const auto& boxes = boxesOf(*value.parts);
  if (boxes.empty()) {
    return !geometry.hasElements();
  }
  const auto needed = boxes.front().grid().boxOf(geometry);
  return !needed ||
         std::any_of(boxes.begin(), boxes.end(), [&needed](const Box& box) { return box.contains(*needed); });
}

void checkReads(const ReplayPlan& plan, const PlannedOperator& planned) {
  const auto& name = planned.node->op().operator_name();
  for (const auto i : c10::irange(planned.reads.size())) {
    const LiveValue& read = planned.reads[i];
    const Geometry& geometry = planned.node->tensors()[i].geometry();
    if (read.value == nullptr) {
      continue;
    }
    TORCH_INTERNAL_ASSERT(geometry.is_zero || geometry.bytesReached() <= read.value->nbytes(), name,
                          " reads beyond the end of a storage.");
    if (!read.hasWriter()) {
      continue;
    }
    TORCH_INTERNAL_ASSERT(read.writer < planned.place, name, " reads a value that has not been written yet.");
    TORCH_INTERNAL_ASSERT(plan.of(read).last_use >= planned.place, name, " reads a value that has been dropped.");
    TORCH_INTERNAL_ASSERT(planned.way == Way::kParts || isCovered(plan.of(read), geometry), name,
                          " reads a part that is not computed.");
  }
}

void checkParts(const ReplayPlan& plan, const PlannedOperator& planned) {
  const OpNode& node = *planned.node;
  TORCH_INTERNAL_ASSERT(planned.writes.size() == 1 && isForParts(planned.rule), node.op().operator_name(),
                        " cannot be run for a part.");
  for (Box box : boxesOf(*planned.writes.front().parts)) {
    const auto ranges =
        planned.rule == PartRule::kRandomFill ? std::nullopt : box.widenToElementsOf(writtenGeometry(node));
    const auto reads = ranges ? readsForPart(node, planned.rule, *ranges) : std::vector<std::optional<IndexRanges>>{};
    for (const auto i : c10::irange(reads.size())) {
      TORCH_INTERNAL_ASSERT(!reads[i] || !planned.reads[i].hasWriter() ||
                                isCovered(plan.of(planned.reads[i]), narrowed(node.tensors()[i].geometry(), *reads[i])),
                            node.op().operator_name(), " reads an uncomputed part to compute a part.");
    }
  }
}

void checkWrites(const ReplayPlan& plan, const PlannedOperator& planned) {
  std::vector<const PlannedValue*> taken;
  for (const PlannedValue& written : planned.writes) {
    if (!written.isTaken() && written.origin != Origin::kResized) {
      continue;
    }
    const PlannedValue& before = plan.of(planned.reads[*written.argument]);
    TORCH_INTERNAL_ASSERT(before.last_use == planned.place && !before.isKept(), planned.node->op().operator_name(),
                          " overwrites a value that is read afterwards.");
    TORCH_INTERNAL_ASSERT(std::find(taken.begin(), taken.end(), &before) == taken.end(),
                          planned.node->op().operator_name(), " writes two values into the same memory.");
    taken.push_back(&before);
  }
}

void checkSteps(const ReplayPlan& plan, const PlannedOperator& planned, std::vector<std::size_t>& runs) {
  const PlannedOperator* last = &planned;
  for (const std::size_t step : planned.steps) {
    const PlannedOperator& next = plan.operators()[step];
    const PlannedValue& between = last->writes.front();
    TORCH_INTERNAL_ASSERT(next.way == Way::kStep && next.reads.front().writer == last->place && between.reads == 1 &&
                              !between.isKept() && !between.parts && !next.writes.front().parts,
                          next.node->op().operator_name(), " is not a step of the operator before it.");
    runs[step] += 1;
    last = &next;
  }
}

}  // namespace

// Raises an internal error for an inconsistent plan: reads beyond a storage, before a write or after a drop; parts that
// are read but not computed; memory that two values claim; a value that is dropped twice, or never. With the
// environment variable TORCHEXT_CHECK_PLANS=1, which our tests set, each new plan is checked.
void checkPlan(const ReplayPlan& plan) {
  if (!arePlansChecked()) {
    return;
  }
  std::vector<std::size_t> runs(plan.operators().size(), 0);
  std::size_t dropped = 0;
  std::size_t needed = 0;
  for (const PlannedOperator& planned : plan.operators()) {
    runs[planned.place] += planned.way == Way::kStep ? 0 : 1;
    checkSteps(plan, planned, runs);
    if (planned.way != Way::kNotAtAll) {
      checkReads(plan, planned);
      checkWrites(plan, planned);
    }
    if (planned.way == Way::kParts) {
      checkParts(plan, planned);
    }
    for (const LiveValue& value : planned.last_uses) {
      TORCH_INTERNAL_ASSERT(plan.of(value).last_use == planned.place);
    }
    dropped += planned.last_uses.size();
    needed += toSize(std::count_if(planned.writes.begin(), planned.writes.end(),
                                   [](const PlannedValue& one) { return one.value != nullptr; }));
  }
  TORCH_INTERNAL_ASSERT(std::all_of(runs.begin(), runs.end(), [](std::size_t count) { return count == 1; }),
                        "An operator of a plan is run twice, or never.");
  TORCH_INTERNAL_ASSERT(dropped == needed, "A value of a plan is dropped twice, or never.");
  for (const LiveValue& value : plan.wanted()) {
    TORCH_INTERNAL_ASSERT(!value.hasWriter() || (plan.of(value).is_wanted && !plan.of(value).parts),
                          "A wanted value is not computed as a whole.");
  }
}

}  // namespace torchext
