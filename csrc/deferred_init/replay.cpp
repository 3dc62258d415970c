#include "replay.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/ops/clone.h>
#include <c10/util/irange.h>

#include "../fake/cuda/fake_cuda.h"
#include "../fake/fake.h"
#include "../support/stack_utils.h"
#include "draws.h"
#include "replay_fill.h"

namespace torchext {

using at::Tensor;
using c10::Storage;
using torch::jit::Stack;

namespace {

// The whole of `storage` as a tensor of bytes.
Tensor asBytes(const Storage& storage) {
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  return Geometry{{nbytes}, {1}, 0, caffe2::TypeMeta::Make<std::uint8_t>(), false, false}.makeTensor(storage);
}

Storage copyOf(const Storage& storage) {
  return asBytes(storage).clone().storage();
}

// A kernel that returns other strides than its Meta kernel promised has its result moved to where views expect it. So
// has one that returns a tensor of zeros without memory (`_efficientzerotensor`), which the fake promised to be
// ordinary.
Storage storageAsPromised(const Geometry& promised, const Tensor& result) {
  if (promised.fits(result) && !result._is_zerotensor()) {
    return result.storage();
  }
  const Tensor moved = promised.makeEmptyTensor(result.device());
  moved.copy_(result);
  return moved.storage();
}

// A fake device can be recorded on, but not computed on.
void checkDevicesExist(const OpNode& node) {
  const auto check = [&node](c10::Device device) {
    TORCH_CHECK(
        !device.is_cuda() || hasRealCuda(), "`", node.op().operator_name(), "` was recorded on ", device,
        ", but this machine has no CUDA device to compute it on. Materialize where there is one, or construct the "
        "model on the CPU and let materialize_module() place it.");
  };
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.device) {
      check(*argument.device);
    }
    if (argument.value != nullptr) {
      check(argument.value->device());
    }
  }
  for (const c10::IValue& value : node.arguments()) {
    if (value.isDevice()) {
      check(value.toDevice());
    }
  }
}

// Are the real tensors that `node` reads as they were, and its devices there?
void checkInputs(const OpNode& node) {
  checkDevicesExist(node);
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.external != nullptr) {
      argument.external->check(node.op().operator_name());
    }
  }
}

// Lets errors name the operator, and the line that recorded it.
template <typename Function>
void naming(const OpNode& node, const Function& run) {
  try {
    run();
  } catch (c10::Error& error) {
    error.add_context(c10::str("while materializing what `", node.op().operator_name(), "` recorded",
                               node.source().empty() ? "" : " at ", node.source()));
    throw;
  }
}

// Does `live` read a recorded value that it does not write over?
bool readsWithoutWriting(const LiveOperator& live) {
  const auto& written = live.node->written();
  return std::any_of(live.arguments.begin(), live.arguments.end(), [&](const LiveArgument& argument) {
    return argument.value != nullptr && argument.value->writer() != nullptr &&
           std::none_of(written.begin(), written.end(), [&](const WrittenStorage& storage) {
             return storage.is_argument && live.arguments[storage.position].value == argument.value;
           });
  });
}

// Sets of numbers, each named by its smallest.
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

std::vector<Tensor> flatten(const Stack& results) {
  std::vector<Tensor> tensors;
  forEachTensor(results, results.size(), [&tensors](const Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

}  // namespace

std::recursive_mutex& replayMutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

Replay::Replay(const std::vector<StorageValuePtr>& wanted, Progress on_value)
    : wanted_{wanted}, graph_{liveGraph(wanted)}, on_value_{on_value} {
  keepDerivationsTogether();
  countReads();
}

void Replay::countReads() {
  is_done_.resize(graph_.operators.size());
  for (const auto place : c10::irange(graph_.operators.size())) {
    const LiveOperator& live = graph_.operators[place];
    buffers_.emplace(live.node, live.node->written().size());
    for (const LiveArgument& argument : live.arguments) {
      if (argument.value != nullptr && argument.value->writer() != nullptr) {
        Buffer& buffer = bufferOf(*argument.value);
        buffer.pending_reads += 1;
        buffer.reader = place;
      }
    }
  }
  for (const StorageValue* value : graph_.wanted) {
    wanted_of_node_[value->writer().get()].push_back(value->nbytes());
    if (value->writer() != nullptr) {
      bufferOf(*value).pending_reads += 1;
      bufferOf(*value).is_wanted = true;
    }
  }
}

// What was recorded after construction (`module.half()`, the slicing of shards) makes a new storage of each old one. In
// the order of recording all of the old ones would be in memory before the first new one. Any order will do that
// computes values before they are read; so operators that are connected by what they read run together, when the first
// of them is due. Where all of them write over what they read, as in ordinary construction, there is nothing to gain,
// and the order of recording has random numbers drawn without moving back and forth on the tape.
void Replay::keepDerivationsTogether() {
  std::vector<LiveOperator>& operators = graph_.operators;
  DisjointSets sets{operators.size()};
  std::unordered_map<const OpNode*, std::size_t> place_of;
  for (const auto i : c10::irange(operators.size())) {
    place_of[operators[i].node] = i;
    for (const LiveArgument& argument : operators[i].arguments) {
      if (argument.value != nullptr && argument.value->writer() != nullptr) {
        sets.unite(i, place_of.at(argument.value->writer().get()));
      }
    }
  }
  std::vector<bool> derives(operators.size(), false);
  for (const auto i : c10::irange(operators.size())) {
    derives[sets.firstOf(i)] = derives[sets.firstOf(i)] || readsWithoutWriting(operators[i]);
  }
  std::vector<std::pair<std::size_t, LiveOperator>> due;
  due.reserve(operators.size());
  for (const auto i : c10::irange(operators.size())) {
    due.emplace_back(derives[sets.firstOf(i)] ? sets.firstOf(i) : i, std::move(operators[i]));
  }
  std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::transform(due.begin(), due.end(), operators.begin(), [](auto& entry) { return std::move(entry.second); });
}

Replay::Buffer& Replay::bufferOf(const StorageValue& value) {
  return buffers_.at(value.writer().get())[value.output()];
}

const Storage& Replay::storageOf(const StorageValue& value) {
  return value.writer() == nullptr ? value.constant() : bufferOf(value).storage;
}

// A constant, which no operator writes, is done before it begins.
void Replay::reportWanted(const OpNode* node) {
  const auto found = wanted_of_node_.find(node);
  if (found != wanted_of_node_.end()) {
    std::for_each(found->second.begin(), found->second.end(), on_value_);
  }
}

std::vector<Storage> Replay::run() {
  reportWanted(nullptr);
  for (const auto place : c10::irange(graph_.operators.size())) {
    runNext(place);
    reportWanted(graph_.operators[place].node);
  }
  const RealDispatch guard;
  std::vector<Storage> storages;
  storages.reserve(graph_.wanted.size());
  for (const StorageValue* value : graph_.wanted) {
    storages.push_back(value->writer() == nullptr ? copyOf(value->constant()) : storageOf(*value));
  }
  buffers_.clear();
  // A kernel may keep what it returns.
  for (Storage& storage : storages) {
    if (storage.use_count() > 1) {
      storage = copyOf(storage);
    }
  }
  return storages;
}

void Replay::runAndDrop(c10::function_ref<void(const LiveOperator& live, double seconds)> on_operator) {
  for (const auto place : c10::irange(graph_.operators.size())) {
    const LiveOperator& live = graph_.operators[place];
    const auto start = std::chrono::steady_clock::now();
    runNext(place);
    on_operator(live, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    dropWanted(live);
  }
}

// Drops what nobody but the caller asks for any more, of what the operator has read and written.
void Replay::dropWanted(const LiveOperator& live) {
  const auto drop = [](Buffer& buffer) {
    if (buffer.is_wanted && buffer.pending_reads == 1) {
      buffer.storage = {};
    }
  };
  for (const LiveArgument& argument : live.arguments) {
    if (argument.value != nullptr && argument.value->writer() != nullptr) {
      drop(bufferOf(*argument.value));
    }
  }
  auto& written = buffers_.at(live.node);
  std::for_each(written.begin(), written.end(), drop);
}

void Replay::check() const {
  for (const LiveOperator& live : graph_.operators) {
    naming(*live.node, [&live] { checkInputs(*live.node); });
  }
}

void Replay::runNext(std::size_t place) {
  if (is_done_[place]) {
    return;
  }
  const LiveOperator& live = graph_.operators[place];
  const OpNode& node = *live.node;
  naming(node, [&] {
    const RealDispatch guard{node.threadState()};
    checkInputs(node);
    const std::vector<Tensor> tensors = makeArguments(live);
    Stack stack = node.arguments(tensors);
    std::vector<Fused> fused = stepsAfter(place);
    const bool has_run_fused = !fused.empty() && fillWithSteps(node, stack, fused);
    if (!has_run_fused) {
      call(node, stack);
    }
    keepWritten(node, tensors, stack);
    if (has_run_fused) {
      keepFused(fused);
    }
  });
  finishReads(live);
}

// The elementwise operators that follow a fill, each being the only reader of the result before.
std::vector<Replay::Fused> Replay::stepsAfter(std::size_t place) {
  const OpNode* last = graph_.operators[place].node;
  if (!mayHaveSteps(*last)) {
    return {};
  }
  std::vector<Fused> fused;
  Geometry shown = last->tensors().front().geometry;
  while (true) {
    const Buffer& buffer = buffers_.at(last).front();
    if (buffer.pending_reads != 1 || buffer.is_wanted) {
      return fused;
    }
    last = graph_.operators[*buffer.reader].node;
    auto step = ElementwiseStep::of(*last, shown);
    if (!step) {
      return fused;
    }
    shown = step->shown();
    fused.push_back({*buffer.reader, *std::move(step), {}, {}});
  }
}

// Returns false, and has done nothing, where the fill is to be called.
bool Replay::fillWithSteps(const OpNode& fill, Stack& stack, std::vector<Fused>& fused) {
  Storage storage = stack.front().toTensor().storage();
  for (Fused& one : fused) {
    one.source = storage;
    one.result = one.step.resultFor(storage);
    storage = one.result;
  }
  const auto after = [&fused](std::int64_t begin, std::int64_t end) {
    for (const Fused& one : fused) {
      one.step.compute(one.source, one.result, begin, end);
    }
  };
  return replayFill(fill.op(), stack, tape_.moveTo(*fill.tape()), after);
}

void Replay::call(const OpNode& node, Stack& stack) {
  if (!node.tape()) {
    node.op().callBoxed(stack);
  } else if (generatorArgument(node.op().schema()) >= 0) {
    callWithGenerator(node.op(), stack, tape_.moveTo(*node.tape()));
  } else {
    const DefaultGeneratorAt guard{*node.tape()};
    node.op().callBoxed(stack);
  }
}

std::vector<Tensor> Replay::makeArguments(const LiveOperator& live) {
  const OpNode& node = *live.node;
  // A storage that the operator writes is made writable first: several arguments may show it.
  std::vector<std::pair<const StorageValue*, Storage>> writable;
  for (const WrittenStorage& written : node.written()) {
    if (written.is_argument) {
      writable.emplace_back(node.tensors()[written.position].value.get(), writableStorage(live, written.position));
    }
  }
  std::vector<Tensor> tensors;
  tensors.reserve(node.tensors().size());
  for (const auto i : c10::irange(node.tensors().size())) {
    const TensorArgument& argument = node.tensors()[i];
    if (argument.device) {
      tensors.push_back(argument.geometry.makeEmptyTensor(*argument.device));
      continue;
    }
    if (argument.number) {
      tensors.push_back(at::native::wrapped_scalar_tensor(*argument.number));
      continue;
    }
    if (argument.value == nullptr) {
      tensors.push_back(argument.external->tensor());
      continue;
    }
    const auto copied = std::find_if(writable.begin(), writable.end(), [&argument](const auto& entry) {
      return isSameValue(*entry.first, *argument.value);
    });
    if (copied != writable.end()) {
      tensors.push_back(argument.geometry.makeTensor(copied->second));
    } else if (const StorageValue* value = live.arguments[i].value) {
      tensors.push_back(argument.geometry.makeTensor(storageOf(*value)));
    } else {
      tensors.push_back(argument.geometry.makeTensor(argument.value->makeEmptyStorage()));
    }
  }
  return tensors;
}

// The storage of the argument at `position`, to write the next value into: that of the value before when nobody reads
// it afterwards, else a copy.
Storage Replay::writableStorage(const LiveOperator& live, std::size_t position) {
  const StorageValue* value = live.arguments[position].value;
  if (value == nullptr) {
    return live.node->tensors()[position].value->makeEmptyStorage();
  }
  if (value->writer() == nullptr) {
    return copyOf(value->constant());
  }
  const auto reads = static_cast<std::size_t>(
      std::count_if(live.arguments.begin(), live.arguments.end(), [value](const LiveArgument& argument) {
        return argument.value != nullptr && isSameValue(*argument.value, *value);
      }));
  const Buffer& buffer = bufferOf(*value);
  return buffer.pending_reads == reads ? buffer.storage : copyOf(buffer.storage);
}

void Replay::keepWritten(const OpNode& node, const std::vector<Tensor>& arguments, const Stack& results) {
  auto& buffers = buffers_[&node];
  const std::vector<Tensor> returned = flatten(results);
  for (const auto i : c10::irange(node.written().size())) {
    const WrittenStorage& written = node.written()[i];
    if (buffers[i].pending_reads == 0) {
      continue;  // nobody asks for this one
    }
    if (written.is_argument) {
      const Tensor& argument = arguments[written.position];
      buffers[i].storage = written.was_resized ? storageAsPromised(written.geometry, argument) : argument.storage();
      continue;
    }
    TORCH_INTERNAL_ASSERT(written.position < returned.size(), node.op().operator_name(),
                          " returned fewer tensors than when recorded.");
    Storage storage = storageAsPromised(written.geometry, returned[written.position]);
    const bool is_shared = std::any_of(arguments.begin(), arguments.end(), [&storage](const Tensor& argument) {
      return argument.has_storage() && isSameStorage(argument.storage(), storage);
    });
    buffers[i].storage = is_shared ? copyOf(storage) : std::move(storage);
  }
}

void Replay::keepFused(const std::vector<Fused>& fused) {
  for (const Fused& one : fused) {
    const LiveOperator& live = graph_.operators[one.place];
    Buffer& buffer = buffers_.at(live.node).front();
    if (buffer.pending_reads > 0) {
      buffer.storage = one.result;
    }
    finishReads(live);
    is_done_[one.place] = true;
  }
}

void Replay::finishReads(const LiveOperator& live) {
  for (const LiveArgument& argument : live.arguments) {
    if (argument.value == nullptr || argument.value->writer() == nullptr) {
      continue;
    }
    Buffer& buffer = bufferOf(*argument.value);
    buffer.pending_reads -= 1;
    if (buffer.pending_reads == 0) {
      buffer.storage = {};
    }
  }
}

}  // namespace torchext
