#include "liveness.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/hash.h>
#include <c10/util/irange.h>

#include "../../../libraries/support/byte_set.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../fake/calls/op_traits.h"
#include "../graph/op_graph.h"

namespace torchext {

namespace {

// The effect of a call on the bytes of the storage that one of its tensor arguments shows. If the exact set is unknown,
// `reads` and `writes` are too large and `overwrites` is too small, which is safe.
struct Footprint {
  // At least the bytes that the call reads.
  ByteSet reads;
  // At least the bytes that it may change.
  ByteSet writes;
  // At most the bytes that it overwrites, regardless of their previous contents.
  ByteSet overwrites;
};

// Returns all bytes of a value. Never empty, so that storages without bytes can be alive.
ByteSet wholeOf(const StorageValue& value) {
  return {0, std::max(value.nbytes(), std::size_t{1})};
}

std::optional<ByteSet> bytesOf(const Geometry& geometry) {
  return ByteSet::ofElements(geometry.sizes, geometry.strides, geometry.storage_offset, geometry.dtype.itemsize());
}

// Returns the geometry of a written argument after the call, or null if it is unknown. An `out` may get another shape,
// and then shows bytes that it did not show before: `add(a, b, out=t[:0])`.
const Geometry* geometryAfter(const OpNode& node, std::size_t tensor, std::size_t argument) {
  if (const WrittenStorage* written = node.writtenTo(tensor)) {
    return &written->geometry();
  }
  // If several tensors share a storage, only the first is listed as written.
  const bool may_change = node.op().schema().arguments()[argument].is_out() || node.op().hasTag(at::Tag::inplace_view);
  return may_change ? nullptr : &node.tensors()[tensor].geometry();
}

Footprint footprintOf(const OpNode& node, std::size_t tensor, std::size_t argument) {
  const StorageValue& value = *node.tensors()[tensor].value;
  const Geometry& geometry = node.tensors()[tensor].geometry();
  const ByteSet whole = wholeOf(value);
  const std::optional<ByteSet> own = bytesOf(geometry);
  const bool goes_beyond = reachesBeyondElements(node.op());
  Footprint footprint;
  footprint.reads = goes_beyond ? whole : own.value_or(whole);
  if (!writesArgument(node.op(), node.arguments(), argument)) {
    return footprint;
  }
  footprint.writes = footprint.reads;
  const Geometry* after = geometryAfter(node, tensor, argument);
  const bool is_kept = after != nullptr && *after == geometry;
  if (!is_kept) {
    footprint.writes.add(after == nullptr ? whole : bytesOf(*after).value_or(whole));
  } else if (own && !goes_beyond && overwritesArgument(node.op(), argument)) {
    footprint.overwrites = *own;
    footprint.reads = {};
  }
  return footprint;
}

// Returns one footprint for each of `node.tensors()`, empty for those that show no recorded value.
std::vector<Footprint> footprintsOf(const OpNode& node) {
  std::vector<Footprint> footprints;
  footprints.reserve(node.tensors().size());
  for (const auto argument : c10::irange(node.arguments().size())) {
    forEachTensor(node.arguments()[argument], [&](const at::Tensor& /*placeholder*/) {
      const std::size_t tensor = footprints.size();
      const bool is_recorded = node.tensors()[tensor].value != nullptr;
      footprints.push_back(is_recorded ? footprintOf(node, tensor, argument) : Footprint{});
    });
  }
  return footprints;
}

// Identifies a value: a writer and the index of its output, or a constant.
using Key = std::pair<const void*, std::size_t>;

Key keyOf(const StorageValue& value) {
  return value.writer() == nullptr ? Key{&value, 0} : Key{value.writer().get(), value.output()};
}

// Walks back from the wanted values. Readers of a value are recorded after its writer, so the demand on a value is
// complete when its writer is visited.
class LivenessPass {
 public:
  explicit LivenessPass(bool uses_computed) : uses_computed_{uses_computed} {}

  LiveGraph run(const std::vector<StorageValuePtr>& wanted) {
    for (const StorageValuePtr& value : wanted) {
      demand(*value, wholeOf(*value));
    }
    while (!open_.empty()) {
      const DemandedOperator demanded = std::move(std::prev(open_.end())->second);
      open_.erase(std::prev(open_.end()));
      const std::vector<Footprint> footprints = footprintsOf(*demanded.node);
      if (!forwardsDemand(demanded, footprints)) {
        addOperator(demanded, footprints);
      }
    }
    std::reverse(graph_.operators.begin(), graph_.operators.end());
    for (LiveOperator& live : graph_.operators) {
      for (LiveValue& argument : live.arguments) {
        argument = resolved(argument.value);
      }
    }
    for (const StorageValuePtr& value : wanted) {
      graph_.wanted.push_back(resolved(value.get()));
    }
    return std::move(graph_);
  }

 private:
  // A value that an operator wrote, if it is read, and its live bytes.
  struct Output {
    const StorageValue* value = nullptr;
    ByteSet bytes;
  };

  // The demand on an operator that has not been visited yet.
  struct DemandedOperator {
    const OpNode* node = nullptr;
    std::vector<Output> outputs;
  };

  bool isComputed(const StorageValue& value) const {
    return uses_computed_ && value.computed() != nullptr;
  }

  // If many operators each cut bytes out of a set, it has many runs, and every earlier operator processes them all.
  // Above a limit of work, all bytes are demanded: running a dead operator is harmless.
  void demand(const StorageValue& value, const ByteSet& bytes) {
    constexpr std::size_t kMaxWork = 20'000'000;
    constexpr std::size_t kFewRuns = 64;
    const OpNode* node = value.writer().get();
    if (node == nullptr || isComputed(value)) {
      return;
    }
    DemandedOperator& demanded = open_[node->number()];
    demanded.node = node;
    demanded.outputs.resize(node->written().size());
    Output& output = demanded.outputs[value.output()];
    output.value = &value;
    output.bytes.add(bytes);
    work_ += output.bytes.countRuns();
    if (work_ > kMaxWork && output.bytes.countRuns() > kFewRuns) {
      output.bytes = wholeOf(value);
    }
  }

  static bool isWhole(const Output& output) {
    if (output.value == nullptr) {
      return false;
    }
    ByteSet dead = wholeOf(*output.value);
    dead.remove(output.bytes);
    return dead.isEmpty();
  }

  // Returns true if none of the bytes that the operator itself wrote are alive. Then forwards the demand to the value
  // before.
  bool forwardsDemand(const DemandedOperator& demanded, const std::vector<Footprint>& footprints) {
    const OpNode& node = *demanded.node;
    const auto isUntouched = [&](const Output& output, const StorageValue& before) {
      for (const auto i : c10::irange(node.tensors().size())) {
        const StorageValue* value = node.tensors()[i].value.get();
        if (value != nullptr && isSameValue(*value, before) && output.bytes.overlaps(footprints[i].writes)) {
          return false;
        }
      }
      return true;
    };
    for (const auto i : c10::irange(node.written().size())) {
      const Output& output = demanded.outputs[i];
      if (output.value == nullptr) {
        continue;
      }
      if (!node.written()[i].is_argument) {
        return false;
      }
      const StorageValue& before = *node.tensors()[node.written()[i].position].value;
      // Before a resize, the value has another size.
      if (before.nbytes() != output.value->nbytes() || !isUntouched(output, before)) {
        return false;
      }
    }
    for (const auto i : c10::irange(node.written().size())) {
      if (demanded.outputs[i].value != nullptr) {
        const StorageValue& before = *node.tensors()[node.written()[i].position].value;
        earlier_[{&node, i}] = &before;
        demand(before, demanded.outputs[i].bytes);
      }
    }
    return true;
  }

  void addOperator(const DemandedOperator& demanded, const std::vector<Footprint>& footprints) {
    const OpNode& node = *demanded.node;
    struct Bytes {
      ByteSet read;
      ByteSet overwritten;
    };
    std::unordered_map<Key, Bytes, c10::hash<Key>> values;
    for (const auto i : c10::irange(node.tensors().size())) {
      if (const StorageValue* value = node.tensors()[i].value.get()) {
        Bytes& bytes = values[keyOf(*value)];
        bytes.read.add(footprints[i].reads);
        bytes.overwritten.add(footprints[i].overwrites);
      }
    }
    for (const auto i : c10::irange(node.written().size())) {
      const WrittenStorage& written = node.written()[i];
      if (written.is_argument) {
        const StorageValue& before = *node.tensors()[written.position].value;
        Bytes& bytes = values[keyOf(before)];
        ByteSet passed_on = written.was_resized ? wholeOf(before) : demanded.outputs[i].bytes;
        passed_on.remove(bytes.overwritten);
        bytes.read.add(passed_on);
      }
    }
    LiveOperator live{&node, 0, {}, {}};
    for (const Output& output : demanded.outputs) {
      live.is_whole.push_back(isWhole(output));
    }
    for (const TensorArgument& argument : node.tensors()) {
      live.arguments.emplace_back();
      if (argument.value == nullptr) {
        continue;
      }
      const StorageValue& value = *argument.value;
      const ByteSet& read = values[keyOf(value)].read;
      if (!read.isEmpty()) {
        live.arguments.back().value = &value;
        demand(value, read);
      }
    }
    graph_.operators.push_back(std::move(live));
  }

  LiveValue resolved(const StorageValue* value) {
    while (value != nullptr && !isComputed(*value)) {
      const auto found = earlier_.find(keyOf(*value));
      if (found == earlier_.end()) {
        return {value};
      }
      value = found->second;
    }
    if (value == nullptr) {
      return {};
    }
    graph_.computed.push_back(value->computed());
    return {graph_.computed.back().get()};
  }

  const bool uses_computed_;
  std::map<std::uint64_t, DemandedOperator> open_;
  // Values whose live bytes are those of an earlier value.
  std::unordered_map<Key, const StorageValue*, c10::hash<Key>> earlier_;
  LiveGraph graph_;
  // The number of byte runs processed so far.
  std::size_t work_ = 0;
};

// Sets the place of each operator and the writer of each value.
void number(LiveGraph& graph) {
  std::unordered_map<const OpNode*, std::size_t> place_of;
  const auto locate = [&place_of](LiveValue& value) {
    if (value.value != nullptr && value.value->writer() != nullptr) {
      value.writer = place_of.at(value.value->writer().get());
    }
  };
  for (const auto place : c10::irange(graph.operators.size())) {
    LiveOperator& live = graph.operators[place];
    live.place = place;
    place_of[live.node] = place;
    std::for_each(live.arguments.begin(), live.arguments.end(), locate);
  }
  std::for_each(graph.wanted.begin(), graph.wanted.end(), locate);
}

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

// Reorders operators from recording order into the order that needs the least memory. Returns false if the order does
// not change. Takes time nearly linear in the number of reads.
//
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

}  // namespace

LiveGraph liveGraph(const std::vector<StorageValuePtr>& wanted, bool uses_computed) {
  LiveGraph graph = LivenessPass{uses_computed}.run(wanted);
  number(graph);
  if (keepDerivationsTogether(graph.operators)) {
    number(graph);
  }
  return graph;
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
