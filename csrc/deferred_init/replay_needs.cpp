#include "replay_needs.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/hash.h>
#include <c10/util/irange.h>

#include "../support/locks.h"
#include "demands.h"
#include "liveness.h"
#include "part_rules.h"
#include "replay.h"
#include "replay_order.h"

namespace torchext {

namespace {

// Goes through the operators as `Replay` does, and keeps account of the memory that it would hold.
class Rehearsal {
 public:
  explicit Rehearsal(const StorageValuePtr& wanted) : graph_{liveGraph({wanted})} {
    keepDerivationsTogether(graph_.operators);
    demands_ = Demands::of(graph_);
    countReads();
  }

  ReplayNeeds run() {
    for (const LiveOperator& live : graph_.operators) {
      if (!demands_.areNone(*live.node)) {
        account(live);
      }
      finishReads(live);
    }
    return needs_;
  }

 private:
  using Key = std::pair<const OpNode*, std::size_t>;

  struct Held {
    std::size_t nbytes = 0;
    std::size_t pending_reads = 0;
  };

  static Key keyOf(const StorageValue& value) {
    return {value.writer().get(), value.output()};
  }

  static bool isComputed(const StorageValue* value) {
    return value != nullptr && value->writer() != nullptr;
  }

  void countReads() {
    for (const LiveOperator& live : graph_.operators) {
      for (const LiveArgument& argument : live.arguments) {
        if (isComputed(argument.value)) {
          held_[keyOf(*argument.value)].pending_reads += 1;
        }
      }
    }
    for (const StorageValue* value : graph_.wanted) {
      if (isComputed(value)) {
        held_[keyOf(*value)].pending_reads += 1;
      } else {
        needs_.peak = value->nbytes();  // a constant, which is copied
      }
    }
  }

  void account(const LiveOperator& live) {
    const OpNode& node = *live.node;
    std::size_t fresh = 0;
    for (const auto i : c10::irange(node.written().size())) {
      const std::size_t nbytes = bytesOf(node, i);
      needs_.written += nbytes;
      if (!takesMemory(live, i, nbytes)) {
        fresh += nbytes;
      }
      held_[{&node, i}].nbytes = nbytes;
    }
    alive_ += fresh;
    needs_.peak = std::max(needs_.peak, alive_ + workspaceOf(live));
    for (const auto i : c10::irange(node.written().size())) {
      dropIfUnread({&node, i});
    }
  }

  // What there will be of an output in memory.
  std::size_t bytesOf(const OpNode& node, std::size_t output) const {
    if (const Demands::Parts* parts = demands_.partsOf(node, output)) {
      std::size_t sum = 0;
      for (const Box& box : parts->boxes) {
        sum += box.packedBytes();
      }
      return sum;
    }
    const WrittenStorage& written = node.written()[output];
    if (written.is_argument && !written.was_resized) {
      return node.tensors()[written.position].value->nbytes();
    }
    const Geometry& geometry = written.geometry;
    return at::detail::computeStorageNbytes(geometry.sizes, geometry.strides, geometry.dtype.itemsize(),
                                            static_cast<std::size_t>(geometry.storage_offset));
  }

  // Is the output written into the memory of what was there before, or that itself, because nobody reads it again?
  bool takesMemory(const LiveOperator& live, std::size_t output, std::size_t nbytes) {
    const WrittenStorage& written = live.node->written()[output];
    const std::optional<std::size_t> source =
        written.is_argument ? std::optional<std::size_t>{written.position} : copiedArgument(*live.node);
    const StorageValue* before = source ? live.arguments[*source].value : nullptr;
    if (!isComputed(before)) {
      return false;
    }
    const auto reads =
        std::count_if(live.arguments.begin(), live.arguments.end(), [before](const LiveArgument& argument) {
          return argument.value != nullptr && isSameValue(*argument.value, *before);
        });
    Held& held = held_.at(keyOf(*before));
    if (held.pending_reads != static_cast<std::size_t>(reads) || held.nbytes != nbytes) {
      return false;
    }
    held.nbytes = 0;
    return true;
  }

  // What the kernel allocates besides its results.
  std::size_t workspaceOf(const LiveOperator& live) const {
    const OpNode& node = *live.node;
    const bool makes_tensors = std::any_of(node.written().begin(), node.written().end(),
                                           [](const WrittenStorage& written) { return !written.is_argument; });
    const PartRule rule = partRuleOf(node);
    if (rule == PartRule::kElementwise) {
      // The result of a part is made apart, and looked at.
      return bytesOf(node, 0) * (makes_tensors && !copiedArgument(node) ? 2 : 1);
    }
    if (!makes_tensors || node.tape() || node.op().hasTag(at::Tag::pointwise) || rule != PartRule::kNone) {
      return 0;
    }
    std::size_t sum = 0;
    for (const LiveArgument& argument : live.arguments) {
      sum += argument.value == nullptr ? 0 : argument.value->nbytes();
    }
    return sum;
  }

  void finishReads(const LiveOperator& live) {
    for (const LiveArgument& argument : live.arguments) {
      if (isComputed(argument.value)) {
        held_.at(keyOf(*argument.value)).pending_reads -= 1;
        dropIfUnread(keyOf(*argument.value));
      }
    }
  }

  void dropIfUnread(const Key& key) {
    Held& held = held_.at(key);
    if (held.pending_reads == 0) {
      alive_ -= std::exchange(held.nbytes, 0);
    }
  }

  LiveGraph graph_;
  Demands demands_;
  std::unordered_map<Key, Held, c10::hash<Key>> held_;
  std::size_t alive_ = 0;
  ReplayNeeds needs_;
};

}  // namespace

ReplayNeeds needsOf(const at::Tensor& deferred) {
  const Locked lock{LockRank::kReplay};
  const StorageValuePtr value = valueOf(deferred);
  TORCH_CHECK_VALUE(value != nullptr, "Only of a deferred tensor can it be told what computing it takes.");
  return Rehearsal{value}.run();
}

}  // namespace torchext
