#include "liveness.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include <c10/util/hash.h>
#include <c10/util/irange.h>

#include "../fake/calls/op_traits.h"
#include "../support/stack_utils.h"
#include "byte_set.h"

namespace torchext {

namespace {

// Names a value: a writer and which of its outputs, or a constant.
using Key = std::pair<const void*, std::size_t>;

Key keyOf(const StorageValue& value) {
  return value.writer() == nullptr ? Key{&value, 0} : Key{value.writer().get(), value.output()};
}

// Not empty, so that storages without bytes are alive, too.
ByteSet wholeOf(const StorageValue& value) {
  return {0, std::max(value.nbytes(), std::size_t{1})};
}

std::optional<ByteSet> bytesOf(const TensorArgument& argument) {
  const Geometry& geometry = argument.geometry;
  return ByteSet::ofElements(geometry.sizes, geometry.strides, geometry.storage_offset, geometry.dtype.itemsize());
}

// For each tensor argument of `node`, what `tell` says of the argument in the schema that it belongs to.
std::vector<bool> forEachArgument(const OpNode& node, const std::function<bool(std::size_t)>& tell) {
  std::vector<bool> answers;
  answers.reserve(node.tensors().size());
  for (const auto i : c10::irange(node.arguments().size())) {
    const auto answer = [&](const at::Tensor& /*placeholder*/) { answers.push_back(tell(i)); };
    forEachTensor(node.arguments()[i], answer);
  }
  return answers;
}

// Does the call leave the argument at `position`, which it writes, its size and strides? An `out` may get others, and
// then not all of the elements that it had are written.
bool keepsGeometry(const OpNode& node, std::size_t position) {
  const auto& written = node.written();
  const auto found = std::find_if(written.begin(), written.end(), [position](const WrittenStorage& storage) {
    return storage.is_argument && storage.position == position;
  });
  // Only the first of several tensors on one storage is listed.
  return found == written.end() ? writesForeach(node.op()) : found->geometry == node.tensors()[position].geometry;
}

// Walks back from the wanted values. Who reads a value was recorded after who wrote it, so that all is known of a value
// when its writer is looked at.
class Walk {
 public:
  LiveGraph run(const std::vector<StorageValuePtr>& wanted);

 private:
  // What is known of an operator before it is looked at: which bytes of the values that it wrote are alive.
  struct Demanded {
    const OpNode* node = nullptr;
    std::vector<ByteSet> outputs;
  };

  void demand(const StorageValue& value, const ByteSet& bytes);
  bool passesOn(const Demanded& demanded);
  void runs(const Demanded& demanded);
  const StorageValue* actual(const StorageValue* value) const;

  std::map<std::uint64_t, Demanded> open_;
  // Values whose living bytes are those of an earlier one.
  std::unordered_map<Key, const StorageValue*, c10::hash<Key>> earlier_;
  LiveGraph graph_;
};

LiveGraph Walk::run(const std::vector<StorageValuePtr>& wanted) {
  for (const StorageValuePtr& value : wanted) {
    demand(*value, wholeOf(*value));
  }
  while (!open_.empty()) {
    const Demanded demanded = std::move(std::prev(open_.end())->second);
    open_.erase(std::prev(open_.end()));
    if (!passesOn(demanded)) {
      runs(demanded);
    }
  }
  std::reverse(graph_.operators.begin(), graph_.operators.end());
  for (LiveOperator& live : graph_.operators) {
    for (LiveArgument& argument : live.arguments) {
      argument.value = actual(argument.value);
    }
  }
  for (const StorageValuePtr& value : wanted) {
    graph_.wanted.push_back(actual(value.get()));
  }
  return std::move(graph_);
}

void Walk::demand(const StorageValue& value, const ByteSet& bytes) {
  if (const OpNode* node = value.writer().get()) {
    Demanded& demanded = open_[node->number()];
    demanded.node = node;
    demanded.outputs.resize(node->written().size());
    demanded.outputs[value.output()].add(bytes);
  }
}

// Is nothing of what the operator itself has written alive? Then who asked for the rest is referred to the value
// before.
bool Walk::passesOn(const Demanded& demanded) {
  const OpNode& node = *demanded.node;
  if (node.dependsOnOtherGenerators()) {
    return false;
  }
  const std::vector<bool> is_written =
      forEachArgument(node, [&](std::size_t i) { return writesArgument(node.op(), node.arguments(), i); });
  for (const auto output : c10::irange(node.written().size())) {
    const WrittenStorage& written = node.written()[output];
    if (demanded.outputs[output].isEmpty()) {
      continue;
    }
    if (!written.is_argument || written.was_resized) {
      return false;
    }
    const StorageValue& before = *node.tensors()[written.position].value;
    for (const auto i : c10::irange(node.tensors().size())) {
      const TensorArgument& argument = node.tensors()[i];
      if (!is_written[i] || argument.value == nullptr || !isSameValue(*argument.value, before)) {
        continue;
      }
      const auto bytes = bytesOf(argument);
      if (!bytes || demanded.outputs[output].overlaps(*bytes)) {
        return false;
      }
    }
  }
  for (const auto output : c10::irange(node.written().size())) {
    if (!demanded.outputs[output].isEmpty()) {
      const StorageValue& before = *node.tensors()[node.written()[output].position].value;
      earlier_[{&node, output}] = &before;
      demand(before, demanded.outputs[output]);
    }
  }
  return true;
}

void Walk::runs(const Demanded& demanded) {
  const OpNode& node = *demanded.node;
  struct Bytes {
    ByteSet read;
    ByteSet overwritten;
  };
  std::unordered_map<Key, Bytes, c10::hash<Key>> values;
  const std::vector<bool> is_overwritten =
      forEachArgument(node, [&](std::size_t i) { return overwritesArgument(node.op(), i); });
  for (const auto i : c10::irange(node.tensors().size())) {
    const TensorArgument& argument = node.tensors()[i];
    if (argument.value != nullptr) {
      Bytes& bytes = values[keyOf(*argument.value)];
      const auto own = bytesOf(argument);
      const bool is_read = !own || !is_overwritten[i] || !keepsGeometry(node, i);
      (is_read ? bytes.read : bytes.overwritten).add(own.value_or(wholeOf(*argument.value)));
    }
  }
  for (const auto output : c10::irange(node.written().size())) {
    const WrittenStorage& written = node.written()[output];
    if (written.is_argument) {
      const StorageValue& before = *node.tensors()[written.position].value;
      Bytes& bytes = values[keyOf(before)];
      ByteSet passed_on = written.was_resized ? wholeOf(before) : demanded.outputs[output];
      passed_on.remove(bytes.overwritten);
      bytes.read.add(passed_on);
    }
  }
  LiveOperator live{&node, {}};
  for (const TensorArgument& argument : node.tensors()) {
    live.arguments.emplace_back();
    if (argument.value == nullptr) {
      continue;
    }
    const StorageValue& value = *argument.value;
    ByteSet read = values[keyOf(value)].read;
    if (value.writer() != nullptr && value.writer()->dependsOnOtherGenerators()) {
      read = wholeOf(value);
    }
    if (!read.isEmpty()) {
      live.arguments.back().value = &value;
      demand(value, read);
    }
  }
  graph_.operators.push_back(std::move(live));
}

const StorageValue* Walk::actual(const StorageValue* value) const {
  for (auto found = earlier_.end(); value != nullptr && (found = earlier_.find(keyOf(*value))) != earlier_.end();) {
    value = found->second;
  }
  return value;
}

}  // namespace

LiveGraph liveGraph(const std::vector<StorageValuePtr>& wanted) {
  return Walk{}.run(wanted);
}

bool isSameValue(const StorageValue& a, const StorageValue& b) {
  return keyOf(a) == keyOf(b);
}

}  // namespace torchext
