#include "replay_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/util/irange.h>

namespace torchext {

namespace {

// Returns true if `live` reads a recorded value that it does not overwrite.
bool readsWithoutWriting(const LiveOperator& live) {
  const auto& written = live.node->written();
  return std::any_of(live.arguments.begin(), live.arguments.end(), [&](const LiveValue& argument) {
    return argument.hasWriter() && std::none_of(written.begin(), written.end(), [&](const WrittenStorage& storage) {
             return storage.is_argument && live.arguments[storage.position].value == argument.value;
           });
  });
}

// Disjoint sets of numbers, each identified by its smallest element.
class DisjointSets {
 public:
  explicit DisjointSets(std::size_t count) : parents_(count) {
    std::iota(parents_.begin(), parents_.end(), std::size_t{0});
  }

  std::size_t firstOf(std::size_t i) {
    while (parents_[i] != i) {
      parents_[i] = parents_[parents_[i]];
      i = parents_[i];
    }
    return i;
  }

  void unite(std::size_t a, std::size_t b) {
    const auto [first, second] = std::minmax({firstOf(a), firstOf(b)});
    parents_[second] = first;
  }

 private:
  std::vector<std::size_t> parents_;
};

// Unites operators with the writers of the values that they read.
DisjointSets setsOfConnected(const std::vector<LiveOperator>& operators) {
  DisjointSets sets{operators.size()};
  for (const LiveOperator& live : operators) {
    for (const LiveValue& argument : live.arguments) {
      if (argument.hasWriter()) {
        sets.unite(live.place, argument.writer);
      }
    }
  }
  return sets;
}

}  // namespace

// Operators recorded after construction (`module.half()`, the slicing of shards) make a new storage from each old one.
// In recording order, all old storages would be in memory before the first new one. Any order that computes values
// before they are read is valid, so operators that are connected by reads run together, when the first one is due. If
// all of them overwrite their inputs, as in ordinary construction, nothing would be gained, and recording order draws
// random numbers without moving back and forth on the tape.
bool keepDerivationsTogether(std::vector<LiveOperator>& operators) {
  DisjointSets sets = setsOfConnected(operators);
  std::vector<bool> derives(operators.size(), false);
  for (const auto i : c10::irange(operators.size())) {
    derives[sets.firstOf(i)] = derives[sets.firstOf(i)] || readsWithoutWriting(operators[i]);
  }
  if (std::none_of(derives.begin(), derives.end(), [](bool does) { return does; })) {
    return false;
  }
  std::vector<std::pair<std::size_t, LiveOperator>> due;
  due.reserve(operators.size());
  for (const auto i : c10::irange(operators.size())) {
    due.emplace_back(derives[sets.firstOf(i)] ? sets.firstOf(i) : i, std::move(operators[i]));
  }
  std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::transform(due.begin(), due.end(), operators.begin(), [](auto& entry) { return std::move(entry.second); });
  return true;
}

std::vector<std::size_t> placesConnectedWith(const std::vector<LiveOperator>& operators, std::size_t place) {
  DisjointSets sets = setsOfConnected(operators);
  std::vector<std::size_t> places;
  for (const auto i : c10::irange(operators.size())) {
    if (sets.firstOf(i) == sets.firstOf(place)) {
      places.push_back(i);
    }
  }
  return places;
}

}  // namespace torchext
