#include "demands.h"

#include <algorithm>
#include <optional>

#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "../fake/calls/op_traits.h"

namespace torchext {

namespace {

// Smaller storages are not worth the thought.
constexpr std::size_t kWorthAThought = 1024;  // bytes

using Key = std::pair<const OpNode*, std::size_t>;

Key keyOf(const StorageValue& value) {
  return {value.writer().get(), value.output()};
}

bool isWritten(const OpNode& node, std::size_t tensor) {
  return std::any_of(node.written().begin(), node.written().end(), [tensor](const WrittenStorage& written) {
    return written.is_argument && written.position == tensor;
  });
}

// Does the tensor show at most three quarters of the storage?
bool isMuchSmaller(const Geometry& geometry, std::size_t nbytes) {
  std::size_t shown = geometry.dtype.itemsize();
  for (const auto i : c10::irange(geometry.sizes.size())) {
    shown *= static_cast<std::size_t>(geometry.strides[i] == 0 ? 1 : geometry.sizes[i]);
  }
  return shown <= nbytes / 4 * 3;
}

bool readsPart(const LiveOperator& live, std::size_t tensor) {
  const StorageValue* value = live.arguments[tensor].value;
  return value != nullptr && value->writer() != nullptr && value->nbytes() >= kWorthAThought &&
         isMuchSmaller(live.node->tensors()[tensor].geometry, value->nbytes()) && !isWritten(*live.node, tensor);
}

bool readsAnyPart(const LiveOperator& live) {
  for (const auto i : c10::irange(live.arguments.size())) {
    if (readsPart(live, i)) {
      return true;
    }
  }
  return false;
}

// The parts that are asked for of one value.
class Asked {
 public:
  // Adds a box, and merges with it those that it makes superfluous.
  void add(Box box) {
    if (std::any_of(boxes_.begin(), boxes_.end(), [&box](const Box& other) { return other.contains(box); })) {
      return;
    }
    for (auto near = boxes_.end(); (near = findNear(box)) != boxes_.end();) {
      box = box.with(*near);
      boxes_.erase(near);
    }
    boxes_.push_back(std::move(box));
    constexpr std::size_t kManyBoxes = 64;
    if (boxes_.size() > kManyBoxes || isMost()) {
      const Box whole = boxes_.front().grid().whole();
      boxes_.assign(1, whole);
    }
  }

  // The same, with all that overlap: they become one box, which is returned.
  Box addWithAll(Box box) {
    const auto overlaps = [&box](const Box& other) { return box.overlaps(other); };
    for (auto other = boxes_.end(); (other = std::find_if(boxes_.begin(), boxes_.end(), overlaps)) != boxes_.end();) {
      box = box.with(*other);
      boxes_.erase(other);
    }
    boxes_.push_back(box);
    return box;
  }

  const std::vector<Box>& boxes() const noexcept {
    return boxes_;
  }

  bool isAll() const {
    return boxes_.size() == 1 && boxes_.front().contains(boxes_.front().grid().whole());
  }

 private:
  // One with which the box would have few bytes that are not requested. That includes each box within it, however
  // narrow: the loop of `visitOutput()` ends only because a wider box replaces the one that it was made of.
  std::vector<Box>::iterator findNear(const Box& box) {
    return std::find_if(boxes_.begin(), boxes_.end(), [&box](const Box& other) {
      const std::size_t sum = box.nbytes() + other.nbytes();
      return box.with(other).nbytes() <= sum + sum / 8;
    });
  }

  bool isMost() const {
    std::size_t sum = 0;
    for (const Box& box : boxes_) {
      sum += box.nbytes();
    }
    return sum > boxes_.front().grid().storageBytes() / 4 * 3;
  }

  std::vector<Box> boxes_;
};

// Goes through a graph twice: from the first operator to the last one, to find out which values are of one storage and
// how these are shown, and back again.
class Pass {
 public:
  explicit Pass(const LiveGraph& graph) : graph_{graph} {}

  void run() {
    for (const LiveOperator& live : graph_.operators) {
      look(live);
    }
    makeGrids();
    for (const StorageValue* value : graph_.wanted) {
      askForAll(*value);
    }
    // These run whoever asks: NOTE [Dead writes].
    for (const LiveOperator& live : graph_.operators) {
      for (std::size_t i = 0; live.node->dependsOnOtherGenerators() && i < live.node->written().size(); ++i) {
        asked_[{live.node, i}].add(gridOf({live.node, i}).whole());
      }
    }
    for (auto live = graph_.operators.rbegin(); live != graph_.operators.rend(); ++live) {
      const PartRule rule = partRuleOf(*live->node);
      rules_[live->node] = rule;
      visit(*live, rule);
    }
  }

  const std::unordered_map<const OpNode*, PartRule>& rules() const noexcept {
    return rules_;
  }

  template <typename Visit>
  void forEachPartial(const Visit& visit) {
    for (auto& [key, asked] : asked_) {
      if (!asked.isAll()) {
        visit(key, asked.boxes(), chains_[chain_of_.at(key)].device);
      }
    }
  }

 private:
  // The values of one storage, each made of the one before.
  struct Chain {
    std::size_t nbytes = 0;
    c10::Device device{c10::kCPU};
    // Those of parts first, so that the grid suits them.
    std::vector<const Geometry*> parts;
    std::vector<const Geometry*> others;
    std::shared_ptr<const Grid> grid;
  };

  void look(const LiveOperator& live);
  std::size_t chainOfOutput(const LiveOperator& live, const WrittenStorage& written);
  void makeGrids();

  const Grid& gridOf(const Key& key) const {
    return *chains_[chain_of_.at(key)].grid;
  }
  void ask(const StorageValue& value, const std::optional<Box>& box);
  void askForAll(const StorageValue& value);

  bool isAskedFor(const OpNode& node);
  void visit(const LiveOperator& live, PartRule rule);
  void visitOutput(const LiveOperator& live, std::size_t output, PartRule rule);
  void askForTensor(const LiveOperator& live, std::size_t tensor, PartRule rule);
  Box widenedForPart(const LiveOperator& live, Box box, PartRule rule);
  void widenForAll(const LiveOperator& live, std::size_t output, PartRule rule);

  const LiveGraph& graph_;
  std::vector<Chain> chains_;
  std::unordered_map<Key, std::size_t, c10::hash<Key>> chain_of_;
  std::unordered_map<Key, Asked, c10::hash<Key>> asked_;
  std::unordered_map<const OpNode*, PartRule> rules_;
};

// ---- Forward ----

void Pass::look(const LiveOperator& live) {
  const OpNode& node = *live.node;
  for (const auto i : c10::irange(node.written().size())) {
    chain_of_[{&node, i}] = chainOfOutput(live, node.written()[i]);
  }
  for (const auto i : c10::irange(node.tensors().size())) {
    const StorageValue* value = live.arguments[i].value;
    if (value != nullptr && value->writer() != nullptr) {
      Chain& chain = chains_[chain_of_.at(keyOf(*value))];
      (readsPart(live, i) ? chain.parts : chain.others).push_back(&node.tensors()[i].geometry);
    }
  }
  for (const auto i : c10::irange(node.written().size())) {
    const WrittenStorage& written = node.written()[i];
    Chain& chain = chains_[chain_of_.at({&node, i})];
    chain.others.push_back(&written.geometry);
    if (written.is_argument) {
      chain.others.push_back(&node.tensors()[written.position].geometry);
    }
  }
}

std::size_t Pass::chainOfOutput(const LiveOperator& live, const WrittenStorage& written) {
  if (written.is_argument && !written.was_resized) {
    const StorageValue* before = live.arguments[written.position].value;
    if (before != nullptr && before->writer() != nullptr) {
      return chain_of_.at(keyOf(*before));
    }
  }
  chains_.emplace_back();
  return chains_.size() - 1;
}

void Pass::makeGrids() {
  const auto note = [this](const StorageValue* value) {
    if (value != nullptr && value->writer() != nullptr) {
      Chain& chain = chains_[chain_of_.at(keyOf(*value))];
      chain.nbytes = std::max(chain.nbytes, value->nbytes());
      chain.device = value->device();
    }
  };
  for (const LiveOperator& live : graph_.operators) {
    std::for_each(live.arguments.begin(), live.arguments.end(),
                  [&note](const LiveArgument& argument) { note(argument.value); });
  }
  std::for_each(graph_.wanted.begin(), graph_.wanted.end(), note);
  for (Chain& chain : chains_) {
    chain.parts.insert(chain.parts.end(), chain.others.begin(), chain.others.end());
    chain.grid = Grid::of(chain.nbytes, chain.parts);
  }
}

// ---- Back ----

void Pass::ask(const StorageValue& value, const std::optional<Box>& box) {
  if (value.writer() == nullptr || !box) {
    return;
  }
  const bool is_whole = value.isPinned() || value.dependsOnOtherGenerators();
  asked_[keyOf(value)].add(is_whole ? box->grid().whole() : *box);
}

void Pass::askForAll(const StorageValue& value) {
  if (value.writer() != nullptr) {
    ask(value, gridOf(keyOf(value)).whole());
  }
}

// Nobody asks for what only tensors without elements show.
bool Pass::isAskedFor(const OpNode& node) {
  bool is_asked = false;
  for (const auto i : c10::irange(node.written().size())) {
    is_asked = !asked_[{&node, i}].boxes().empty() || is_asked;
  }
  return is_asked;
}

void Pass::visit(const LiveOperator& live, PartRule rule) {
  const OpNode& node = *live.node;
  if (!isAskedFor(node)) {
    return;
  }
  for (const auto i : c10::irange(node.written().size())) {
    visitOutput(live, i, rule);
  }
  // What is run for parts has asked for what it reads.
  const bool is_partial = isForParts(rule) && !asked_[{&node, 0}].isAll();
  for (const auto i : c10::irange(node.tensors().size())) {
    if (!is_partial && !isWritten(node, i)) {
      askForTensor(live, i, rule);
    }
  }
}

void Pass::visitOutput(const LiveOperator& live, std::size_t output, PartRule rule) {
  const OpNode& node = *live.node;
  const WrittenStorage& written = node.written()[output];
  Asked& asked = asked_[{&node, output}];
  if (written.was_resized || (!written.is_argument && !isForParts(rule))) {
    asked.add(gridOf({&node, output}).whole());
  } else if (!isForParts(rule)) {
    widenForAll(live, output, rule);
  } else {
    Asked widened;
    for (const Box& box : asked.boxes()) {
      widened.add(box);
    }
    // Widening one may have it contain others, or make it most of the storage.
    for (bool is_done = false; !is_done;) {
      is_done = true;
      for (const Box& box : std::vector<Box>{widened.boxes()}) {
        const Box wider = widenedForPart(live, box, rule);
        if (!box.contains(wider)) {
          widened.add(wider);
          is_done = false;
        }
      }
    }
    asked = std::move(widened);
  }
  const StorageValue* before = written.is_argument ? live.arguments[written.position].value : nullptr;
  if (before == nullptr) {
    return;
  }
  if (written.was_resized) {
    askForAll(*before);
  }
  for (const Box& box : asked.boxes()) {
    if (!written.was_resized) {
      ask(*before, box);
    }
  }
}

// Asks for what the operator reads to write the elements in the box. Returns the box with all of what it writes.
Box Pass::widenedForPart(const LiveOperator& live, Box box, PartRule rule) {
  const OpNode& node = *live.node;
  if (rule == PartRule::kRandomFill) {
    return box.withWholeElements(writtenGeometry(node).dtype.itemsize());
  }
  const auto ranges = box.take(writtenGeometry(node));
  if (!ranges) {
    return box;
  }
  const auto reads = readsForPart(node, rule, *ranges);
  for (const auto i : c10::irange(reads.size())) {
    const StorageValue* value = live.arguments[i].value;
    if (value == nullptr || value->writer() == nullptr || !reads[i] || isWritten(node, i)) {
      continue;
    }
    ask(*value, gridOf(keyOf(*value)).boxOf(narrowed(node.tensors()[i].geometry, *reads[i])));
  }
  return box;
}

// Of a call that is made once, all that it touches of a storage that it writes is to be in one part.
void Pass::widenForAll(const LiveOperator& live, std::size_t output, PartRule rule) {
  const OpNode& node = *live.node;
  const WrittenStorage& written = node.written()[output];
  const Grid& grid = gridOf({&node, output});
  const StorageValue* recorded = node.tensors()[written.position].value.get();
  std::optional<Box> touched;
  for (const auto i : c10::irange(node.tensors().size())) {
    const StorageValue* value = node.tensors()[i].value.get();
    if (value == nullptr || !isSameValue(*value, *recorded)) {
      continue;
    }
    const auto box = grid.boxOf(node.tensors()[i].geometry);
    if (box) {
      const Box needed = rule == PartRule::kAnyLayout ? *box : box->keepingStrides();
      touched = touched ? touched->with(needed) : needed;
    }
  }
  // `resize_` and its kin change how large the storage is.
  if (reachesBeyondElements(node.op()) || node.op().hasTag(at::Tag::inplace_view)) {
    touched = grid.whole();
  }
  if (touched) {
    Asked& asked = asked_[{&node, output}];
    Box box = asked.addWithAll(*touched);
    while (rule != PartRule::kAnyLayout && !box.contains(box.keepingStrides())) {
      box = asked.addWithAll(box.keepingStrides());
    }
  }
}

void Pass::askForTensor(const LiveOperator& live, std::size_t tensor, PartRule rule) {
  const StorageValue* value = live.arguments[tensor].value;
  if (value == nullptr || value->writer() == nullptr) {
    return;
  }
  if (reachesBeyondElements(live.node->op())) {
    askForAll(*value);
    return;
  }
  const auto box = gridOf(keyOf(*value)).boxOf(live.node->tensors()[tensor].geometry);
  if (box) {
    ask(*value, rule == PartRule::kNone ? box->keepingStrides() : *box);
  }
}

}  // namespace

Demands Demands::of(const LiveGraph& graph) {
  Demands demands;
  if (std::none_of(graph.operators.begin(), graph.operators.end(), readsAnyPart)) {
    return demands;
  }
  Pass pass{graph};
  pass.run();
  demands.rules_ = pass.rules();
  pass.forEachPartial([&demands](const Key& key, const std::vector<Box>& boxes, c10::Device device) {
    demands.parts_.emplace(key, Parts{boxes, device});
  });
  return demands;
}

void Demands::askForAllOf(const OpNode& writer) {
  for (const auto i : c10::irange(writer.written().size())) {
    parts_.erase({&writer, i});
  }
  rules_.erase(&writer);
}

bool Demands::areNone(const OpNode& writer) const {
  for (const auto i : c10::irange(writer.written().size())) {
    const Parts* parts = partsOf(writer, i);
    if (parts == nullptr || !parts->boxes.empty()) {
      return false;
    }
  }
  return true;
}

double Demands::shareOf(const OpNode& writer) const {
  const Parts* parts = isForParts(ruleOf(writer)) ? partsOf(writer, 0) : nullptr;
  if (parts == nullptr) {
    return areNone(writer) ? 0 : 1;
  }
  std::size_t asked = 0;
  std::size_t whole = 1;
  for (const Box& box : parts->boxes) {
    asked += box.nbytes();
    whole = box.grid().storageBytes();
  }
  return std::min(1.0, static_cast<double>(asked) / static_cast<double>(whole));
}

PartRule Demands::ruleOf(const OpNode& node) const {
  const auto found = rules_.find(&node);
  return found == rules_.end() ? PartRule::kNone : found->second;
}

const Demands::Parts* Demands::partsOf(const OpNode& writer, std::size_t output) const {
  const auto found = parts_.find({&writer, output});
  return found == parts_.end() ? nullptr : &found->second;
}

}  // namespace torchext
