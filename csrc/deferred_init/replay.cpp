#include "replay.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ScalarOps.h>
#include <c10/util/irange.h>

#include "../fake/calls/op_traits.h"
#include "../fake/cuda/fake_cuda.h"
#include "../fake/fake.h"
#include "../support/no_warnings.h"
#include "../support/stack_utils.h"
#include "computed_values.h"
#include "draws.h"
#include "replay_fill.h"
#include "replay_order.h"

namespace torchext {

using at::Tensor;
using c10::Storage;
using torch::jit::Stack;

namespace {

// A kernel that returns other strides than its Meta kernel promised has its result moved to where views expect it.
// Zeros without memory (NOTE [Zeros of forward AD]) are given memory, because a value is a storage.
Storage storageAsPromised(Geometry promised, const Tensor& result) {
  if (promised.fits(result) && !promised.is_zero) {
    return result.storage();
  }
  promised.is_zero = false;  // `copy_` refuses to write into one
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
  checkCudaPrecision(node);
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

}  // namespace

Replay::Replay(const std::vector<StorageValuePtr>& wanted, Progress on_value, Memory memory)
    : wanted_{wanted}, graph_{liveGraph(wanted, memory != Memory::kNone)}, on_value_{on_value}, memory_{memory} {
  keepDerivationsTogether(graph_.operators);
  for (const StorageValue* value : graph_.wanted) {
    wanted_of_node_[value->writer().get()].push_back(value);
  }
}

// Operators whose parts would have other bits than the whole has are run again as they were recorded, with all that
// they are connected with.
void Replay::runAll(c10::function_ref<void(std::size_t place)> run_one) {
  demands_ = Demands::of(graph_);
  std::vector<std::size_t> all(graph_.operators.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  begin(all);
  for (std::size_t place = 0; place < all.size();) {
    try {
      run_one(place);
      ++place;
    } catch (const PartsDiffer&) {
      const std::vector<std::size_t> connected = placesConnectedWith(graph_.operators, place);
      for (const std::size_t one : connected) {
        demands_.askForAllOf(*graph_.operators[one].node);
      }
      begin(connected);
      place = connected.front();
    }
  }
}

// Counts who is to read what the operators at `places` write, before any of them is run.
void Replay::begin(const std::vector<std::size_t>& places) {
  is_done_.resize(graph_.operators.size());
  for (const std::size_t place : places) {
    const LiveOperator& live = graph_.operators[place];
    is_done_[place] = false;
    auto& buffers = buffers_[live.node] = std::vector<Buffer>(live.node->written().size());
    for (const auto i : c10::irange(buffers.size())) {
      buffers[i].is_whole = live.is_whole[i];
    }
    for (const LiveArgument& argument : live.arguments) {
      if (argument.value != nullptr && argument.value->writer() != nullptr) {
        Buffer& buffer = bufferOf(*argument.value);
        buffer.pending_reads += 1;
        buffer.reader = place;
        if (buffer.remembered == nullptr && buffer.is_whole && isToBeRemembered(*argument.value)) {
          buffer.remembered = argument.value;
          buffer.pending_reads += 1;
        }
      }
    }
    if (const auto wanted = wanted_of_node_.find(live.node); wanted != wanted_of_node_.end()) {
      for (const StorageValue* value : wanted->second) {
        bufferOf(*value).pending_reads += 1;
        bufferOf(*value).is_wanted = true;
      }
    }
  }
}

Replay::Buffer& Replay::bufferOf(const StorageValue& value) {
  return buffers_.at(value.writer().get())[value.output()];
}

Parts Replay::partsOf(const StorageValue& value) {
  return value.writer() == nullptr ? Parts{{value.constant(), std::nullopt}} : bufferOf(value).parts;
}

// A constant, which no operator writes, is done before it begins.
void Replay::reportWanted(const OpNode* node) {
  const auto found = wanted_of_node_.find(node);
  if (found != wanted_of_node_.end() && reported_.insert(node).second) {
    for (const StorageValue* value : found->second) {
      on_value_(value->nbytes());
    }
  }
}

std::vector<Storage> Replay::run() {
  reportWanted(nullptr);
  runAll([this](std::size_t place) {
    runNext(place);
    reportWanted(graph_.operators[place].node);
  });
  const RealDispatch guard;
  std::vector<Storage> storages;
  storages.reserve(graph_.wanted.size());
  for (const StorageValue* value : graph_.wanted) {
    storages.push_back(value->writer() == nullptr ? copyOf(value->constant()) : partsOf(*value).front().storage);
  }
  rememberWanted(storages);
  buffers_.clear();
  // A kernel may keep what it returns.
  for (Storage& storage : storages) {
    if (storage.use_count() > 1) {
      storage = copyOf(storage);
    }
  }
  return storages;
}

// Only tensors that show a value have it read once more.
bool Replay::isToBeRemembered(const StorageValue& value) const {
  return memory_ == Memory::kRemembers && value.isCurrent() && !value.writer()->dependsOnOtherGenerators() &&
         isWorthRemembering(value);
}

// The caller may write into what it gets.
void Replay::rememberWanted(const std::vector<Storage>& storages) const {
  for (const auto i : c10::irange(storages.size())) {
    const StorageValue& value = *graph_.wanted[i];
    if (value.writer() != nullptr && isToBeRemembered(value)) {
      rememberComputed(value, copyOf(storages[i]));
    }
  }
}

void Replay::runAndDrop(c10::function_ref<void(const LiveOperator& live, double seconds)> on_operator) {
  std::vector<double> seconds(graph_.operators.size());
  runAll([&](std::size_t place) {
    const auto start = std::chrono::steady_clock::now();
    runNext(place);
    seconds[place] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    dropWanted(graph_.operators[place]);
  });
  for (const auto place : c10::irange(graph_.operators.size())) {
    on_operator(graph_.operators[place], seconds[place]);
  }
}

// Drops what nobody but the caller asks for any more, of what the operator has read and written.
void Replay::dropWanted(const LiveOperator& live) {
  const auto drop = [](Buffer& buffer) {
    if (buffer.is_wanted && buffer.pending_reads == 1) {
      buffer.parts.clear();
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
  naming(*live.node, [&] {
    const RealDispatch guard{live.node->threadState()};
    const ThreadCountGuard threads{*live.node};
    checkInputs(*live.node);
    if (demands_.areNone(*live.node)) {
      return;
    }
    if (isForParts(demands_.ruleOf(*live.node)) && demands_.partsOf(*live.node, 0) != nullptr) {
      runForParts(live);
    } else if (!takesOver(live)) {
      runOnce(place);
    }
  });
  finishReads(live);
}

// What is copied and not read by anybody else need not be copied: who reads the copy gets the memory itself.
bool Replay::takesOver(const LiveOperator& live) {
  const auto copied = copiedArgument(*live.node);
  const StorageValue* value = copied ? live.arguments[*copied].value : nullptr;
  if (value == nullptr || value->writer() == nullptr || bufferOf(*value).pending_reads != 1 ||
      bufferOf(*value).parts.size() != 1) {
    return false;
  }
  const Part& part = bufferOf(*value).parts.front();
  if (part.storage.use_count() != 1) {
    return false;  // a kernel keeps what it has returned
  }
  const Geometry& geometry = live.node->tensors()[*copied].geometry;
  const Geometry& written = writtenGeometry(*live.node);
  const std::size_t nbytes = static_cast<std::size_t>(c10::multiply_integers(written.sizes)) * written.dtype.itemsize();
  if (!part.contains(geometry) || part.storage.nbytes() != nbytes || shownIn(part, geometry) != written) {
    return false;
  }
  buffers_.at(live.node).front().parts = {{part.storage, std::nullopt}};
  return true;
}

void Replay::runOnce(std::size_t place) {
  const LiveOperator& live = graph_.operators[place];
  const OpNode& node = *live.node;
  const std::vector<Parts> writable = writableParts(live);
  const std::vector<Tensor> tensors = makeArguments(live, writable);
  Stack stack = node.arguments(tensors);
  std::vector<Fused> fused = stepsAfter(place);
  const bool has_run_fused = !fused.empty() && fillWithSteps(node, stack, fused);
  if (!has_run_fused) {
    call(node, stack);
  }
  if (readsParts(live)) {
    forEachTensor(stack, stack.size(), [&node](const Tensor& result) { checkIsExact(node, result); });
  }
  keepWritten(node, tensors, stack, writable);
  if (has_run_fused) {
    keepFused(fused);
  }
}

bool Replay::readsParts(const LiveOperator& live) {
  return std::any_of(live.arguments.begin(), live.arguments.end(), [this](const LiveArgument& argument) {
    return argument.value != nullptr && argument.value->writer() != nullptr &&
           demands_.partsOf(*argument.value->writer(), argument.value->output()) != nullptr;
  });
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
    if (buffer.pending_reads != 1 || buffer.is_wanted || demands_.partsOf(*last, 0) != nullptr) {
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
  std::optional<NoWarnings> no_warnings;
  if (hasOut(node.op())) {
    no_warnings.emplace();  // the recording has warned of an output that is resized
  }
  if (!node.tape()) {
    node.op().callBoxed(stack);
  } else if (generatorArgument(node.op().schema()) >= 0) {
    callWithGenerator(node.op(), stack, tape_.moveTo(*node.tape()));
  } else {
    const DefaultGeneratorAt guard{*node.tape()};
    node.op().callBoxed(stack);
  }
}

void Replay::runForParts(const LiveOperator& live) {
  const OpNode& node = *live.node;
  const Parts parts = node.written().front().is_argument ? writablePartsOf(live, 0) : freshParts(node, 0);
  for (const Part& part : parts) {
    computePartOf(live, part);
  }
  buffers_.at(&node).front().parts = parts;
}

void Replay::computePartOf(const LiveOperator& live, const Part& part) {
  const OpNode& node = *live.node;
  const PartRule rule = demands_.ruleOf(node);
  if (rule == PartRule::kRandomFill) {
    fillPart(node, *part.box, part.storage, tape_.placedAt(*node.tape()));
    return;
  }
  const auto ranges = Box{*part.box}.take(writtenGeometry(node));
  if (!ranges) {
    return;
  }
  const std::vector<Parts> writable{{part}};
  const auto reads = readsForPart(node, rule, *ranges);
  std::vector<Tensor> arguments(reads.size());
  for (const auto i : c10::irange(reads.size())) {
    if (reads[i]) {
      arguments[i] = makeArgument(live, i, &*reads[i], writable);
    }
  }
  const Geometry written = narrowed(writtenGeometry(node), *ranges);
  computePart(node, rule, *ranges, arguments, tensorIn(part, written));
}

// ---- Arguments ----

std::vector<Tensor> Replay::makeArguments(const LiveOperator& live, const std::vector<Parts>& writable) {
  std::vector<Tensor> tensors;
  tensors.reserve(live.arguments.size());
  for (const auto i : c10::irange(live.arguments.size())) {
    const auto& same_as = live.node->tensors()[i].same_as;
    tensors.push_back(same_as ? tensors[*same_as] : makeArgument(live, i, nullptr, writable));
  }
  return tensors;
}

// Those of its elements that are in `ranges`, if that is not null.
Tensor Replay::makeArgument(const LiveOperator& live,
                            std::size_t index,
                            const IndexRanges* ranges,
                            const std::vector<Parts>& writable) {
  const TensorArgument& argument = live.node->tensors()[index];
  if (argument.device) {
    return argument.geometry.makeEmptyTensor(*argument.device);
  }
  if (argument.number) {
    return at::native::wrapped_scalar_tensor(*argument.number);
  }
  if (argument.value == nullptr) {
    return ranges == nullptr ? argument.external->tensor() : narrowed(argument.external->tensor(), *ranges);
  }
  const Geometry geometry = ranges == nullptr ? argument.geometry : narrowed(argument.geometry, *ranges);
  const auto& written = live.node->written();
  for (const auto i : c10::irange(written.size())) {
    if (written[i].is_argument && isSameValue(*live.node->tensors()[written[i].position].value, *argument.value)) {
      return seenBy(*live.node, writable[i], argument, geometry, /*is_written=*/true);
    }
  }
  const StorageValue* value = live.arguments[index].value;
  return value != nullptr ? seenBy(*live.node, partsOf(*value), argument, geometry, /*is_written=*/false)
                          : geometry.makeTensor(argument.value->makeEmptyStorage());
}

// Who is not to notice that it is a part gets the strides and the alignment that were recorded.
Tensor Replay::seenBy(const OpNode& reader,
                      const Parts& parts,
                      const TensorArgument& argument,
                      const Geometry& geometry,
                      bool is_written) const {
  if (parts.empty()) {  // nobody asks for what has no elements
    return geometry.makeEmptyTensor(argument.value->device());
  }
  const Part& part = partWith(parts, geometry);
  if (demands_.ruleOf(reader) != PartRule::kNone || isSeenAlike(part, geometry)) {
    return tensorIn(part, geometry);
  }
  if (is_written) {
    throw PartsDiffer{};
  }
  return alignedCopyOf(part, geometry);
}

// ---- What is written into ----

// A storage that the operator writes is made writable first: several arguments may show it.
std::vector<Parts> Replay::writableParts(const LiveOperator& live) {
  std::vector<Parts> writable;
  for (const auto i : c10::irange(live.node->written().size())) {
    writable.push_back(live.node->written()[i].is_argument ? writablePartsOf(live, i) : Parts{});
  }
  return writable;
}

// Memory of the value before when nobody reads that afterwards, else a copy.
Parts Replay::writablePartsOf(const LiveOperator& live, std::size_t output) {
  const std::size_t position = live.node->written()[output].position;
  const StorageValue* value = live.arguments[position].value;
  const Demands::Parts* planned = demands_.partsOf(*live.node, output);
  if (value == nullptr) {
    return planned != nullptr ? freshParts(*live.node, output)
                              : Parts{{live.node->tensors()[position].value->makeEmptyStorage(), std::nullopt}};
  }
  const auto reads = static_cast<std::size_t>(
      std::count_if(live.arguments.begin(), live.arguments.end(), [value](const LiveArgument& argument) {
        return argument.value != nullptr && isSameValue(*argument.value, *value);
      }));
  const bool is_last = value->writer() != nullptr && bufferOf(*value).pending_reads == reads;
  const Parts before = partsOf(*value);
  if (planned == nullptr) {
    return {{is_last ? before.front().storage : copyOf(before.front().storage), std::nullopt}};
  }
  Parts parts;
  for (const Box& box : planned->boxes) {
    const Part& source = partWith(before, box);
    const bool is_same = source.box && box.contains(*source.box);
    parts.push_back(is_last && is_same ? source : cutOut(source, box));
  }
  return parts;
}

Parts Replay::freshParts(const OpNode& node, std::size_t output) const {
  Parts parts;
  const Demands::Parts& planned = *demands_.partsOf(node, output);
  for (const Box& box : planned.boxes) {
    parts.push_back({makeStorage(box.packedBytes(), planned.device), box});
  }
  return parts;
}

// ---- What has been written ----

void Replay::keepWritten(const OpNode& node,
                         const std::vector<Tensor>& arguments,
                         const Stack& results,
                         const std::vector<Parts>& writable) {
  auto& buffers = buffers_[&node];
  const std::vector<Tensor> returned = returnedTensors(results);
  for (const auto i : c10::irange(node.written().size())) {
    const WrittenStorage& written = node.written()[i];
    if (buffers[i].pending_reads == 0) {
      continue;  // nobody asks for this one
    }
    if (written.is_argument) {
      const Tensor& argument = arguments[written.position];
      buffers[i].parts = writable[i];
      if (!writable[i].empty() && !writable[i].front().box) {
        buffers[i].parts.front().storage =
            written.was_resized ? storageAsPromised(written.geometry, argument) : argument.storage();
      }
      continue;
    }
    TORCH_CHECK(written.position < returned.size() && returned[written.position].defined(), "`",
                node.op().operator_name(), "` returned no tensor as result ", written.position,
                ", although its Meta kernel did.");
    const Tensor& result = returned[written.position];
    Storage storage = storageAsPromised(written.geometry, result);
    const bool is_shared = std::any_of(arguments.begin(), arguments.end(), [&storage](const Tensor& argument) {
      return argument.has_storage() && isSameStorage(argument.storage(), storage);
    });
    buffers[i].parts = {{is_shared ? copyOf(storage) : std::move(storage), std::nullopt}};
  }
}

void Replay::keepFused(const std::vector<Fused>& fused) {
  for (const Fused& one : fused) {
    const LiveOperator& live = graph_.operators[one.place];
    Buffer& buffer = buffers_.at(live.node).front();
    if (buffer.pending_reads > 0) {
      buffer.parts = {{one.result, std::nullopt}};
    }
    finishReads(live);
    is_done_[one.place] = true;
  }
}

// At once, so that the memory of older ones can be freed. A kernel may write into what it keeps.
void Replay::rememberRead(const Buffer& buffer) {
  if (buffer.parts.size() == 1 && !buffer.parts.front().box && buffer.parts.front().storage.use_count() == 1) {
    rememberComputed(*buffer.remembered, buffer.parts.front().storage);
  }
}

void Replay::finishReads(const LiveOperator& live) {
  for (const LiveArgument& argument : live.arguments) {
    if (argument.value == nullptr || argument.value->writer() == nullptr) {
      continue;
    }
    Buffer& buffer = bufferOf(*argument.value);
    buffer.pending_reads -= 1;
    if (buffer.pending_reads == 1 && buffer.remembered != nullptr && !buffer.is_wanted) {
      rememberRead(buffer);
      buffer.pending_reads = 0;
    }
    if (buffer.pending_reads == 0) {
      buffer.parts.clear();
    }
  }
}

}  // namespace torchext
