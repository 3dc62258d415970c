// NOTE [Demand by parts]
//
// Determines the needed parts of each value: NOTE [Parts of storages]. A shard is a tensor that reads a part of another
// one, as in `weight[:n].clone()`, so the operators themselves express the demand: all of the shard.
//
// `DemandPass` visits readers before writers. An operator that can run for a part demands only the elements that it
// reads for that part. Any other operator demands all that it reads, plus enough around it that the tensors keep their
// strides. An operator that writes into a storage demands the rest of the part from the value before. So consecutive
// values of a storage have the same parts, or larger ones.
//
// Parts that are close to each other are merged; distant ones are computed separately. If most of a value is needed,
// all of it is computed.
//
// Liveness works on bytes and demands on boxes, because the requirements differ. Whether a write is dead must be exact
// for any tensor: with one byte too many, an operator might run that has no generator to draw from. The computed part
// may be larger than the demand, but it must be memory that kernels can take.

#include <algorithm>
#include <memory>
#include <optional>

#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/support/sizes.h"
#include "grid.h"
#include "part_rules.h"

namespace torchext {

namespace {

// Parts of smaller storages are not computed separately.
constexpr std::size_t kMinBytesForParts = 1024;  // bytes

// Returns true if the tensor shows at most three quarters of the storage.
bool isMuchSmaller(const Geometry& geometry, std::size_t nbytes) {
  std::size_t shown = geometry.dtype.itemsize();
  for (const auto i : c10::irange(geometry.sizes.size())) {
    shown *= toSize(geometry.strides[i] == 0 ? 1 : geometry.sizes[i]);
  }
  return shown <= nbytes / 4 * 3;
}

bool readsPart(const LiveOperator& live, std::size_t tensor) {
  const LiveValue& argument = live.arguments[tensor];
  return argument.hasWriter() && argument.value->nbytes() >= kMinBytesForParts &&
         isMuchSmaller(live.node->tensors()[tensor].geometry(), argument.value->nbytes()) &&
         live.node->writtenTo(tensor) == nullptr;
}

bool readsAnyPart(const LiveOperator& live) {
  for (const auto i : c10::irange(live.arguments.size())) {
    if (readsPart(live, i)) {
      return true;
    }
  }
  return false;
}

// The requested parts of one value. No box contains another.
class RequestedBoxes {
 public:
  // Adds a box, merged with nearby boxes. Does nothing if a box contains it; otherwise it, or a larger box, replaces
  // all boxes within it.
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

  // Adds a box, merged with all that overlap it, and returns the result.
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
  // Finds a box whose union with `box` has few bytes that are not requested. Boxes within `box` qualify.
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

// Visits a graph twice. The forward pass determines which values belong to one storage and how tensors show them; the
// backward pass propagates the demands.
class DemandPass {
 public:
  explicit DemandPass(const LiveGraph& graph) : graph_{graph}, chain_of_{graph}, requested_{graph} {}

  std::vector<Demand> run() {
    for (const LiveOperator& live : graph_.operators) {
      addToChains(live);
    }
    makeGrids();
    for (const LiveValue& value : graph_.wanted) {
      requestAll(value);
    }
    std::vector<Demand> demands(graph_.operators.size());
    for (auto live = graph_.operators.rbegin(); live != graph_.operators.rend(); ++live) {
      Demand& demand = demands[live->place];
      demand.rule = ruleOf(*live->node);
      visit(*live, demand.rule);
      for (const auto i : c10::irange(live->node->written().size())) {
        demand.outputs.push_back(partsOf(*live, i));
      }
    }
    return demands;
  }

 private:
  // The consecutive values of one storage.
  struct Chain {
    std::size_t nbytes = 0;
    c10::Device device{c10::kCPU};
    // The geometries of parts come first, so that the grid suits them.
    std::vector<const Geometry*> parts;
    std::vector<const Geometry*> others;
    std::shared_ptr<const Grid> grid;
  };

  // ---- Forward ----

  void addToChains(const LiveOperator& live) {
    const OpNode& node = *live.node;
    for (const auto i : c10::irange(node.written().size())) {
      chain_of_.of(live.place)[i] = chainOfOutput(live, node.written()[i]);
    }
    for (const auto i : c10::irange(node.tensors().size())) {
      const LiveValue& value = live.arguments[i];
      if (value.hasWriter()) {
        Chain& chain = chains_[chain_of_.of(value)];
        (readsPart(live, i) ? chain.parts : chain.others).push_back(&node.tensors()[i].geometry());
      }
    }
    for (const auto i : c10::irange(node.written().size())) {
      const WrittenStorage& written = node.written()[i];
      Chain& chain = chains_[chain_of_.of(live.place)[i]];
      chain.others.push_back(&written.geometry());
      if (written.is_argument) {
        chain.others.push_back(&node.tensors()[written.position].geometry());
      }
    }
  }

  std::size_t chainOfOutput(const LiveOperator& live, const WrittenStorage& written) {
    if (written.is_argument && !written.was_resized) {
      const LiveValue& before = live.arguments[written.position];
      if (before.hasWriter()) {
        return chain_of_.of(before);
      }
    }
    chains_.emplace_back();
    return chains_.size() - 1;
  }

  void makeGrids() {
    const auto note = [this](const LiveValue& value) {
      if (value.hasWriter()) {
        Chain& chain = chains_[chain_of_.of(value)];
        chain.nbytes = std::max(chain.nbytes, value.value->nbytes());
        chain.device = value.value->device();
      }
    };
    for (const LiveOperator& live : graph_.operators) {
      std::for_each(live.arguments.begin(), live.arguments.end(), note);
    }
    std::for_each(graph_.wanted.begin(), graph_.wanted.end(), note);
    for (Chain& chain : chains_) {
      chain.parts.insert(chain.parts.end(), chain.others.begin(), chain.others.end());
      chain.grid = Grid::of(chain.nbytes, chain.parts);
    }
  }

  const Grid& gridOf(const LiveOperator& live, std::size_t output) const {
    return *chains_[chain_of_.of(live.place)[output]].grid;
  }
  const Grid& gridOf(const LiveValue& value) const {
    return *chains_[chain_of_.of(value)].grid;
  }

  // ---- Back ----

  void request(const LiveValue& value, const std::optional<Box>& box) {
    if (!value.hasWriter() || !box) {
      return;
    }
    const bool is_on_cpu = value.value->device().is_cpu();  // copying a run of bytes on a GPU launches a kernel
    const Box needed = is_on_cpu ? *box : box->withoutSteps();
    requested_.of(value).add(value.value->isPinned() ? box->grid().whole() : needed);
  }

  void requestAll(const LiveValue& value) {
    if (value.hasWriter()) {
      request(value, gridOf(value).whole());
    }
  }

  // Call it after all readers have been visited.
  NeededParts partsOf(const LiveOperator& live, std::size_t output) const {
    const RequestedBoxes& requested = requested_.of(live.place)[output];
    return requested.isAll()
               ? nullptr
               : std::make_shared<Boxes>(requested.boxes(), chains_[chain_of_.of(live.place)[output]].device);
  }

  // Returns false if only tensors without elements show the outputs.
  bool isRequested(const LiveOperator& live) const {
    const std::vector<RequestedBoxes>& outputs = requested_.of(live.place);
    return std::any_of(outputs.begin(), outputs.end(),
                       [](const RequestedBoxes& requested) { return !requested.boxes().empty(); });
  }

  void visit(const LiveOperator& live, PartRule rule) {
    const OpNode& node = *live.node;
    if (!isRequested(live)) {
      return;
    }
    for (const auto i : c10::irange(node.written().size())) {
      visitOutput(live, i, rule);
    }
    // Operators that run for parts have already requested their inputs.
    const bool is_partial = isForParts(rule) && !requested_.of(live.place).front().isAll();
    for (const auto i : c10::irange(node.tensors().size())) {
      if (!is_partial && node.writtenTo(i) == nullptr) {
        requestTensor(live, i, rule);
      }
    }
  }

  void visitOutput(const LiveOperator& live, std::size_t output, PartRule rule) {
    const OpNode& node = *live.node;
    const WrittenStorage& written = node.written()[output];
    RequestedBoxes& requested = requested_.of(live.place)[output];
    if (written.was_resized || (!written.is_argument && !isForParts(rule))) {
      requested.add(gridOf(live, output).whole());
    } else if (!isForParts(rule)) {
      widenForAll(live, output, rule);
    } else {
      requested = widenedForParts(live, requested, rule);
    }
    const LiveValue before = written.is_argument ? live.arguments[written.position] : LiveValue{};
    if (written.was_resized) {
      requestAll(before);
      return;
    }
    for (const Box& box : requested.boxes()) {
      request(before, box);
    }
  }

  void requestTensor(const LiveOperator& live, std::size_t tensor, PartRule rule) {
    const LiveValue& value = live.arguments[tensor];
    if (!value.hasWriter()) {
      return;
    }
    if (reachesBeyondElements(live.node->op())) {
      requestAll(value);
      return;
    }
    const auto box = gridOf(value).boxOf(live.node->tensors()[tensor].geometry());
    if (box) {
      request(value, rule == PartRule::kNone ? box->keepingStrides() : *box);
    }
  }

  // Requests the elements that the operator reads to write those in the boxes. Returns boxes with all that it writes.
  RequestedBoxes widenedForParts(const LiveOperator& live, RequestedBoxes widened, PartRule rule) {
    // A box that is merged from widened ones may be too narrow again. Each turn replaces a box by a wider one, and no
    // box contains another, so the requested elements grow until none is missing.
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
    return widened;
  }

  // Requests the elements that the operator reads to write those in the box. Returns the box with all that it writes.
  Box widenedForPart(const LiveOperator& live, Box box, PartRule rule) {
    const OpNode& node = *live.node;
    if (rule == PartRule::kRandomFill) {
      return box.withWholeElements(writtenGeometry(node).dtype.itemsize());
    }
    const auto ranges = box.widenToElementsOf(writtenGeometry(node));
    if (!ranges) {
      return box;
    }
    const auto reads = readsForPart(node, rule, *ranges);
    for (const auto i : c10::irange(reads.size())) {
      const LiveValue& value = live.arguments[i];
      if (value.hasWriter() && reads[i] && node.writtenTo(i) == nullptr) {
        request(value, gridOf(value).boxOf(narrowed(node.tensors()[i].geometry(), *reads[i])));
      }
    }
    return box;
  }

  // A call that runs once needs, for each storage that it writes, all that it touches in one part.
  void widenForAll(const LiveOperator& live, std::size_t output, PartRule rule) {
    const OpNode& node = *live.node;
    const WrittenStorage& written = node.written()[output];
    const Grid& grid = gridOf(live, output);
    const StorageValue* recorded = node.tensors()[written.position].value.get();
    std::optional<Box> touched;
    for (const auto i : c10::irange(node.tensors().size())) {
      const StorageValue* value = node.tensors()[i].value.get();
      if (value == nullptr || !isSameValue(*value, *recorded)) {
        continue;
      }
      const auto box = grid.boxOf(node.tensors()[i].geometry());
      if (box) {
        const Box needed = rule == PartRule::kAnyLayout ? *box : box->keepingStrides();
        touched = touched ? touched->with(needed) : needed;
      }
    }
    // `resize_` and similar operators change the size of the storage.
    if (reachesBeyondElements(node.op()) || node.op().hasTag(at::Tag::inplace_view)) {
      touched = grid.whole();
    }
    if (touched) {
      RequestedBoxes& requested = requested_.of(live.place)[output];
      Box box = requested.addWithAll(*touched);
      while (rule != PartRule::kAnyLayout && !box.contains(box.keepingStrides())) {
        box = requested.addWithAll(box.keepingStrides());
      }
    }
  }

  const LiveGraph& graph_;
  std::vector<Chain> chains_;
  PerOutput<std::size_t> chain_of_;
  PerOutput<RequestedBoxes> requested_;
};

}  // namespace

// Takes time linear in the number of operators, and in the number of boxes of each.
std::vector<Demand> demandsByParts(const LiveGraph& graph) {
  if (std::any_of(graph.operators.begin(), graph.operators.end(), readsAnyPart)) {
    return DemandPass{graph}.run();
  }
  return wholeValues(graph);
}

}  // namespace torchext
