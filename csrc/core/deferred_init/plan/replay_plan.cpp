#include "replay_plan.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

#include "../../../libraries/support/sizes.h"
#include "replay_order.h"

namespace torchext {

namespace {

// Returns the bytes that an output takes in memory.
std::size_t bytesHeld(const OpNode& node, std::size_t output, const NeededParts& parts) {
  if (parts) {
    return parts->nbytes();
  }
  const WrittenStorage& written = node.written()[output];
  const bool keeps_size = written.is_argument && !written.was_resized;
  return keeps_size ? node.tensors()[written.position].value->nbytes() : written.geometry().bytesReached();
}

// Returns true if a value with the parts `before` holds exactly `parts` among them.
bool areAmong(const NeededParts& before, const NeededParts& parts) {
  return before && parts ? parts->areAmong(*before) : !before && !parts;
}

}  // namespace

bool shouldCache(const StorageValue& value) {
  return value.isCurrent() && hooks().computed_values.mayKeep(value);
}

double PlannedOperator::share() const {
  if (way == Way::kNotAtAll || way == Way::kTakesOver) {
    return 0;
  }
  return way == Way::kParts ? writes.front().parts->share() : 1;
}

ReplayPlan::ReplayPlan(std::vector<StorageValuePtr> wanted, CacheUse cache)
    : requested_{std::move(wanted)},
      cache_{cache},
      graph_{liveGraph(requested_, cache != CacheUse::kNone)},
      as_recorded_(graph_.operators.size(), false) {
  plan();
}

std::vector<std::size_t> ReplayPlan::connectedWith(std::size_t place) const {
  return placesConnectedWith(graph_.operators, place);
}

ReplayPlan ReplayPlan::withoutParts(std::size_t place) const {
  ReplayPlan other = *this;
  for (const std::size_t one : connectedWith(place)) {
    other.as_recorded_[one] = true;
  }
  other.plan();
  return other;
}

void ReplayPlan::plan() {
  makeOperators();
  countReads();
  std::for_each(operators_.begin(), operators_.end(), [this](PlannedOperator& planned) { planWrites(planned); });
  std::for_each(operators_.begin(), operators_.end(), [this](PlannedOperator& planned) { planSteps(planned); });
  hooks().parts.check(*this);
}

void ReplayPlan::makeOperators() {
  std::vector<Demand> demands = demandsOf(graph_);
  operators_.clear();
  operators_.reserve(graph_.operators.size());
  for (const LiveOperator& live : graph_.operators) {
    Demand& demand = demands[live.place];
    if (as_recorded_[live.place]) {
      demand = {PartRule::kNone, std::vector<NeededParts>(demand.outputs.size())};
    }
    PlannedOperator planned{live.node, live.place, Way::kCall, demand.rule, live.arguments, {}, {}, {}};
    for (const auto i : c10::irange(demand.outputs.size())) {
      planned.writes.emplace_back();
      planned.writes.back().is_whole = live.is_whole[i];
      planned.writes.back().last_use = live.place;
    }
    if (demand.isNothing()) {
      planned.way = Way::kNotAtAll;
    } else if (isForParts(demand.rule) && demand.outputs.front()) {
      planned.way = Way::kParts;
    }
    for (const auto i : c10::irange(demand.outputs.size())) {
      planned.writes[i].parts = std::move(demand.outputs[i]);
    }
    operators_.push_back(std::move(planned));
  }
}

void ReplayPlan::countReads() {
  const auto at = [this](const LiveValue& value) -> PlannedValue& {
    return operators_[value.writer].writes[value.value->output()];
  };
  for (const LiveValue& value : graph_.wanted) {
    if (value.hasWriter()) {
      at(value).is_wanted = true;
      at(value).value = value.value;
    }
  }
  for (const PlannedOperator& planned : operators_) {
    for (const LiveValue& argument : planned.reads) {
      if (!argument.hasWriter() || planned.way == Way::kNotAtAll) {
        continue;
      }
      PlannedValue& read = at(argument);
      read.reads += 1;
      read.last_use = planned.place;
      read.value = argument.value;
      read.is_cached = read.is_cached || (cache_ == CacheUse::kReadsAndWrites && read.is_whole && !read.is_wanted &&
                                          shouldCache(*argument.value));
    }
  }
  for (const PlannedOperator& planned : operators_) {
    for (const PlannedValue& written : planned.writes) {
      if (written.value != nullptr) {
        operators_[written.last_use].last_uses.push_back({written.value, planned.place});
      }
    }
  }
}

void ReplayPlan::planWrites(PlannedOperator& planned) {
  for (const auto i : c10::irange(planned.writes.size())) {
    PlannedValue& written = planned.writes[i];
    written.nbytes = bytesHeld(*planned.node, i, written.parts);
    const WrittenStorage& storage = planned.node->written()[i];
    if (!storage.is_argument) {
      written.origin = planned.way == Way::kParts ? Origin::kNew : Origin::kResult;
      continue;
    }
    const LiveValue& before = planned.reads[storage.position];
    written.argument = storage.position;
    if (before.value == nullptr) {
      written.origin = Origin::kNew;
    } else if (!canBeWrittenInPlace(planned, before, written)) {
      written.origin = Origin::kCopy;
    } else {
      written.origin = storage.was_resized ? Origin::kResized : Origin::kInPlace;
    }
  }
  if (planned.way == Way::kCall && takesOver(planned)) {
    PlannedValue& written = planned.writes.front();
    planned.way = Way::kTakesOver;
    written.origin = Origin::kTakenOver;
    written.argument = hooks().parts.copiedArgument(*planned.node);
    written.parts.reset();
    written.nbytes = of(planned.reads[*written.argument]).nbytes;
  }
}

// Returns true if the value before is not read afterwards, and has the same parts.
bool ReplayPlan::canBeWrittenInPlace(const PlannedOperator& planned,
                                     const LiveValue& before,
                                     const PlannedValue& after) const {
  return before.hasWriter() && !of(before).isKept() && of(before).last_use == planned.place &&
         areAmong(of(before).parts, after.parts);
}

// A copy of a value without other readers is unnecessary: readers of the copy get the memory itself.
bool ReplayPlan::takesOver(const PlannedOperator& planned) const {
  const auto copied = hooks().parts.copiedArgument(*planned.node);
  if (!copied || !planned.reads[*copied].hasWriter()) {
    return false;
  }
  const PlannedValue& source = of(planned.reads[*copied]);
  if (source.isKept() || source.last_use != planned.place) {
    return false;
  }
  const Geometry& geometry = planned.node->tensors()[*copied].geometry();
  const Geometry& written = writtenGeometry(*planned.node);
  if (source.nbytes != written.nbytes()) {
    return false;
  }
  return source.parts ? source.parts->areOnlyPart(geometry, written) : geometry == written;
}

// Plans the elementwise operators that follow a fill, each the only reader of the result before it.
void ReplayPlan::planSteps(PlannedOperator& planned) {
  const PartRules& rules = hooks().parts;
  if (planned.way != Way::kCall || !rules.mayHaveSteps(*planned.node)) {
    return;
  }
  std::optional<Geometry> shown = planned.node->tensors().front().geometry();
  const PlannedOperator* last = &planned;
  while (true) {
    const PlannedValue& written = last->writes.front();
    if (written.reads != 1 || written.isKept() || written.parts) {
      return;
    }
    PlannedOperator& next = operators_[written.last_use];
    shown = next.way == Way::kCall ? rules.resultOfStep(*next.node, *shown) : std::nullopt;
    if (!shown || next.writes.front().parts) {
      return;
    }
    if (rules.worksInPlace(*next.node)) {
      PlannedValue& result = next.writes.front();
      result.origin = Origin::kInPlace;
      result.argument = 0;
      result.nbytes = written.nbytes;
    }
    next.way = Way::kStep;
    planned.steps.push_back(next.place);
    last = &next;
  }
}

// `is_counted(writer, value)` returns true if the memory of the value counts.
template <typename IsCounted>
std::size_t ReplayPlan::peakOf(const IsCounted& is_counted) const {
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
      alive -= of(value).is_wanted ? 0 : bytesOf(operators_[value.writer], of(value));
    }
  };
  const auto withSteps = [this](const PlannedOperator& planned, const auto& visit) {
    visit(planned);
    for (const std::size_t step : planned.steps) {
      visit(operators_[step]);
    }
  };
  for (const PlannedOperator& planned : operators_) {
    if (planned.way != Way::kNotAtAll && planned.way != Way::kStep) {
      withSteps(planned, allocate);
      const bool works_there = is_counted(planned, planned.writes.front());
      peak = std::max(peak, alive + (works_there ? hooks().parts.workspaceOf(*this, planned) : 0));
      withSteps(planned, drop);
    }
  }
  for (const LiveValue& value : graph_.wanted) {
    alive += value.hasWriter() ? 0 : value.value->nbytes();  // a constant, which is copied
  }
  return std::max(peak, alive);
}

std::size_t ReplayPlan::peak() const {
  return peakOf([](const PlannedOperator& /*planned*/, const PlannedValue& /*written*/) { return true; });
}

// A result that is not read has no recorded value. It is on the device of the operator's other inputs and outputs.
std::size_t ReplayPlan::peakOnCpu() const {
  const auto isOnCpu = [](const StorageValue* value) { return value == nullptr || value->device().is_cpu(); };
  return peakOf([&isOnCpu](const PlannedOperator& planned, const PlannedValue& written) {
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

std::size_t ReplayPlan::written() const {
  std::size_t sum = 0;
  for (const PlannedOperator& planned : operators_) {
    for (const PlannedValue& written : planned.writes) {
      sum += planned.way == Way::kNotAtAll || planned.way == Way::kTakesOver ? 0 : written.nbytes;
    }
  }
  return sum;
}

}  // namespace torchext
