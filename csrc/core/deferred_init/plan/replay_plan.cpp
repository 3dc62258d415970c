#include "replay_plan.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

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

// Returns true if the operator has outputs, and no part of them is needed.
bool isNothing(const std::vector<NeededParts>& outputs) {
  return !outputs.empty() && std::all_of(outputs.begin(), outputs.end(),
                                         [](const NeededParts& parts) { return parts && parts->areNone(); });
}

}  // namespace

std::vector<Demand> wholeValues(const LiveGraph& graph) {
  std::vector<Demand> demands(graph.operators.size());
  for (const LiveOperator& live : graph.operators) {
    demands[live.place].outputs.resize(live.node->written().size());
  }
  return demands;
}

bool shouldCache(const StorageValue& value) {
  return value.isCurrent() && hooks().computed_values.mayKeep(value);
}

ReplayPlan::ReplayPlan(std::vector<StorageValuePtr> wanted, CacheUse cache)
    : requested_{std::move(wanted)},
      cache_{cache},
      graph_{liveGraph(requested_, cache != CacheUse::kNone)},
      as_recorded_(graph_.operators.size(), false) {
  plan();
}

ReplayPlan ReplayPlan::withoutParts(const std::vector<std::size_t>& places) const {
  ReplayPlan other = *this;
  for (const std::size_t place : places) {
    other.as_recorded_[place] = true;
  }
  other.plan();
  return other;
}

void ReplayPlan::plan() {
  makeOperators();
  countReads();
  std::for_each(operators_.begin(), operators_.end(), [this](PlannedOperator& planned) { planWrites(planned); });
  hooks().parts.planSteps(operators_);
  hooks().parts.check(*this);
}

void ReplayPlan::makeOperators() {
  const PartRules& parts = hooks().parts;
  std::vector<Demand> demands = parts.demandsOf ? parts.demandsOf(graph_) : wholeValues(graph_);
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
    if (isNothing(demand.outputs)) {
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

}  // namespace torchext
