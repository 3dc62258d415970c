#include "replay.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <typeinfo>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/irange.h>

#include "../../../libraries/support/held_warnings.h"
#include "../../../libraries/support/locks.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../fake/calls/errors.h"
#include "../../fake/calls/op_traits.h"
#include "../../fake/fake.h"
#include "../../hooks/hooks.h"
#include "../plan/liveness.h"

namespace torchext {

using c10::Storage;

namespace {

// If a kernel returns other strides than its Meta kernel promised, moves its result to where views expect it. Zeros
// without memory (NOTE [Zeros of forward AD]) get memory, because a value is a storage.
Storage storageAsPromised(Geometry promised, const Tensor& result) {
  if (promised.fits(result) && !promised.is_zero) {
    return result.storage();
  }
  promised.is_zero = false;  // `copy_` refuses to write into zeros without memory
  const Tensor moved = promised.makeEmptyTensor(result.device());
  moved.copy_(result);
  return moved.storage();
}

// Returns a device of `node` that does not exist: fake devices can be recorded on, but not computed on.
std::optional<c10::Device> missingDeviceOf(const OpNode& node) {
  std::optional<c10::Device> missing;
  const auto visit = [&missing](c10::Device device) {
    if (hooks().devices.isMissing(device)) {
      missing = device;
    }
  };
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.device) {
      visit(*argument.device);
    }
    if (argument.value != nullptr) {
      visit(argument.value->device());
    }
  }
  for (const c10::IValue& value : node.arguments()) {
    if (value.isDevice()) {
      visit(value.toDevice());
    }
  }
  return missing;
}

void checkDevicesExist(const OpNode& node) {
  const auto missing = missingDeviceOf(node);
  TORCH_CHECK(!missing, "`", node.op().operator_name(), "` was recorded on ", *missing,
              ", but this machine has no CUDA device to compute it on. Materialize on a machine with one, or construct "
              "the model on the CPU and let materialize_module() place it.");
}

bool isFloat32OnCuda(c10::Device device, caffe2::TypeMeta dtype) {
  return device.is_cuda() &&
         (dtype == caffe2::TypeMeta::Make<float>() || dtype == caffe2::TypeMeta::Make<c10::complex<float>>());
}

bool readsFloat32OnCuda(const OpNode& node) {
  return std::any_of(node.tensors().begin(), node.tensors().end(), [](const TensorArgument& argument) {
    if (argument.external != nullptr) {
      return isFloat32OnCuda(argument.external->tensor().device(), argument.external->tensor().dtype());
    }
    return argument.value != nullptr && isFloat32OnCuda(argument.value->device(), argument.geometry().dtype);
  });
}

// Raises an error if `node`, which reads float32 on a CUDA device, was recorded under another precision of matrix
// products. PyTorch's default for this setting cannot be read, so the setting cannot be restored.
void checkCudaPrecision(const OpNode& node) {
  if (!readsFloat32OnCuda(node) || hooks().parts.ruleOf(node) != PartRule::kNone) {
    return;
  }
  const auto changed = node.threadState().settings->changedCudaPrecision();
  TORCH_CHECK(!changed, "`", node.op().operator_name(),
              "` was recorded with another float32 precision (`torch.backends.", changed.value_or(""),
              "`) than the current one. Restore the setting that was active during construction.");
}

// Checks that the real tensors that `node` reads are unchanged, and that its devices exist.
void checkInputs(const OpNode& node) {
  checkDevicesExist(node);
  checkCudaPrecision(node);
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.external != nullptr) {
      argument.external->check(node.op().operator_name());
    }
  }
}

// While it lives, PyTorch's kernels use as many threads as when `node` was recorded, if its result can depend on that.
// Sums do, for example; random fills, copies and additions do not. Raises an error if the number cannot be restored.
class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(const OpNode& node) : previous_{at::get_num_threads()} {
    const KernelSettings& settings = *node.threadState().settings;
    const int recorded = settings.threads();
    if (recorded == previous_ || hooks().parts.ruleOf(node) != PartRule::kNone) {
      return;
    }
    at::set_num_threads(recorded);
    TORCH_CHECK(at::get_num_threads() == recorded, "`", node.op().operator_name(), "` was recorded with ", recorded,
                " threads, but PyTorch now uses ", previous_,
                ", and the number cannot be changed. Its last bits may depend on that. Call torch.set_num_threads(",
                previous_, ") before the construction.");
  }
  C10_DISABLE_COPY_AND_ASSIGN(ThreadCountGuard);
  ~ThreadCountGuard() {
    if (at::get_num_threads() != previous_) {
      at::set_num_threads(previous_);
    }
  }

 private:
  int previous_;
};

// Adds the operator, and the line that recorded it, to errors. PyTorch's general error becomes a MaterializationError;
// its subclasses, such as ValueError and OutOfMemoryError, stay.
template <typename Function>
void naming(const OpNode& node, const Function& run) {
  try {
    run();
  } catch (c10::Error& error) {
    error.add_context(c10::str("while replaying `", node.op().operator_name(), "`",
                               node.source().empty() ? "" : ", recorded at ", node.source()));
    if (typeid(error) == typeid(c10::Error)) {
      throw MaterializationError{error};
    }
    throw;
  }
}

Tensor tensorIn(const ValueMemory& memory, PartRule reader, const Geometry& geometry, bool is_written) {
  return memory.parts ? memory.parts->tensorFor(reader, geometry, is_written) : geometry.makeTensor(memory.whole);
}

Storage copyOf(const Storage& storage) {
  return bytesAt(storage, 0, storage.nbytes()).clone().storage();
}

// CUDA kernels continue to run after their operator has returned.
void waitForDevice(const PlannedOperator& planned) {
  for (const PlannedValue& written : planned.writes) {
    if (written.value != nullptr && written.value->device().is_cuda()) {
      c10::impl::VirtualGuardImpl{c10::kCUDA}.synchronizeDevice(written.value->device().index());
      return;
    }
  }
}

}  // namespace

bool canRun(const ReplayPlan& plan) {
  const auto reads_fake = [](const TensorArgument& argument) {
    return argument.external != nullptr && isFake(argument.external->tensor());
  };
  const auto& operators = plan.operators();
  return std::all_of(operators.begin(), operators.end(), [&](const PlannedOperator& planned) {
    const auto& tensors = planned.node->tensors();
    return !missingDeviceOf(*planned.node) && std::none_of(tensors.begin(), tensors.end(), reads_fake);
  });
}

Replay::Replay(const std::vector<StorageValuePtr>& wanted, Progress on_value, CacheUse cache)
    : plan_{wanted, cache},
      on_value_{on_value},
      cache_{cache},
      memory_{plan_.graph()},
      is_done_(plan_.operators().size(), false),
      is_reported_(plan_.operators().size(), false) {}

void Replay::check() const {
  for (const PlannedOperator& planned : plan_.operators()) {
    naming(*planned.node, [&planned] { checkInputs(*planned.node); });
  }
}

std::vector<Storage> Replay::run() {
  for (const LiveValue& value : plan_.wanted()) {
    if (!value.hasWriter()) {
      on_value_(value.value->nbytes());
    }
  }
  runAll([this](std::size_t place) {
    runNext(plan_.operators()[place]);
    reportWanted(place);
  });
  const RealDispatch guard;
  std::vector<Storage> storages;
  storages.reserve(plan_.wanted().size());
  for (const LiveValue& value : plan_.wanted()) {
    storages.push_back(value.hasWriter() ? memory_.of(value).whole : copyOf(value.value->constant()));
  }
  cacheWanted(storages);
  for (const LiveValue& value : plan_.wanted()) {
    if (value.hasWriter()) {
      memory_.of(value) = {};
    }
  }
  // A kernel may keep a reference to its result.
  for (Storage& storage : storages) {
    if (storage.use_count() > 1) {
      storage = copyOf(storage);
    }
  }
  return storages;
}

std::vector<double> Replay::runAndDrop() {
  drops_wanted_ = true;
  std::vector<double> seconds(plan_.operators().size());
  runAll([&](std::size_t place) {
    const auto start = std::chrono::steady_clock::now();
    runNext(plan_.operators()[place]);
    waitForDevice(plan_.operators()[place]);
    seconds[place] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
  return seconds;
}

// Operators whose parts would have other bits than the whole run again as recorded, with all operators that they are
// connected with.
void Replay::runAll(c10::function_ref<void(std::size_t place)> run_one) {
  for (std::size_t place = 0; place < is_done_.size();) {
    try {
      run_one(place);
      ++place;
    } catch (const PartsDiffer&) {
      place = restartWithoutParts(place);
    }
  }
}

std::size_t Replay::restartWithoutParts(std::size_t place) {
  const std::vector<std::size_t> connected = placesConnectedWith(plan_.graph().operators, place);
  plan_ = plan_.withoutParts(connected);
  for (const std::size_t one : connected) {
    is_done_[one] = false;
    for (ValueMemory& memory : memory_.of(one)) {
      memory = {};
    }
  }
  return connected.front();
}

void Replay::reportWanted(std::size_t place) {
  if (is_reported_[place]) {
    return;
  }
  is_reported_[place] = true;
  for (const PlannedValue& written : plan_.operators()[place].writes) {
    if (written.is_wanted) {
      on_value_(written.value->nbytes());
    }
  }
}

void Replay::runNext(const PlannedOperator& planned) {
  if (is_done_[planned.place]) {
    return;
  }
  naming(*planned.node, [&] {
    const RealDispatch guard{planned.node->threadState()};
    const ThreadCountGuard threads{*planned.node};
    checkInputs(*planned.node);
    if (planned.way == Way::kParts) {
      runForParts(planned);
    } else if (planned.way != Way::kNotAtAll && !takeOver(planned)) {
      runOnce(planned);
    }
  });
  if (!is_done_[planned.place]) {
    finish(planned);
  }
}

// Returns false if that is not planned, or the memory differs from the plan.
bool Replay::takeOver(const PlannedOperator& planned) {
  if (planned.way != Way::kTakesOver) {
    return false;
  }
  const PlannedValue& written = planned.writes.front();
  const Storage& source = memory_.of(planned.reads[*written.argument]).only();
  if (source.use_count() != 1 || source.nbytes() != written.nbytes) {
    return false;  // a kernel kept its result, or returned more
  }
  memory_.of(planned.place).front() = {source, nullptr};
  return true;
}

void Replay::runOnce(const PlannedOperator& planned) {
  const OpNode& node = *planned.node;
  const std::vector<ValueMemory> writable = writableMemory(planned);
  const std::vector<Tensor> tensors = makeArguments(planned, writable);
  Stack stack = node.arguments(tensors);
  const bool has_run_steps = !planned.steps.empty() && fillWithSteps(planned, stack);
  if (!has_run_steps) {
    call(node, stack);
  }
  const auto is_part = [this](const LiveValue& read) { return read.hasWriter() && plan_.of(read).parts; };
  if (std::any_of(planned.reads.begin(), planned.reads.end(), is_part)) {
    forEachTensor(topOf(stack, stack.size()),
                  [&node](const Tensor& result) { hooks().parts.checkIsExact(node, result); });
  }
  storeOutputs(planned, tensors, stack, writable);
  if (has_run_steps) {
    finish(planned);
    for (const std::size_t step : planned.steps) {
      finish(plan_.operators()[step]);
    }
  }
}

// Returns false, without an effect, if the caller must call the fill.
bool Replay::fillWithSteps(const PlannedOperator& planned, Stack& stack) {
  std::vector<const OpNode*> steps;
  for (const std::size_t place : planned.steps) {
    steps.push_back(plan_.operators()[place].node);
  }
  auto results = hooks().parts.fillWithSteps(*planned.node, stack, tape_.moveTo(*planned.node->tape()), steps);
  for (const auto i : c10::irange(results ? results->size() : 0)) {
    memory_.of(planned.steps[i]).front() = {std::move((*results)[i]), nullptr};
  }
  return results.has_value();
}

void Replay::call(const OpNode& node, Stack& stack) {
  std::optional<NoWarnings> no_warnings;
  if (hasOut(node.op())) {
    no_warnings.emplace();  // the recording has already warned about a resized output
  }
  if (node.tape() == nullptr) {
    node.op().callBoxed(stack);
  } else if (takesGenerator(node.op())) {
    const at::Generator& generator = tape_.moveTo(*node.tape());
    callWithGenerator(node.op(), stack, generator);
    node.tape()->checkEnd(node.op(), generator);
  } else {
    const DefaultGeneratorAt guard{*node.tape()};
    node.op().callBoxed(stack);
    node.tape()->checkEnd(node.op(), guard.generator());
  }
}

void Replay::runForParts(const PlannedOperator& planned) {
  ValueMemory memory = writableMemoryOf(planned, 0);
  const bool is_fill = planned.rule == PartRule::kRandomFill;
  hooks().parts.run(
      planned, *memory.parts, is_fill ? tape_.placedAt(*planned.node->tape()) : at::Generator{},
      [&](std::size_t position, const Geometry& geometry) { return readTensor(planned, position, geometry); });
  memory_.of(planned.place).front() = std::move(memory);
}

// ---- Arguments ----

std::vector<Tensor> Replay::makeArguments(const PlannedOperator& planned, const std::vector<ValueMemory>& writable) {
  std::vector<Tensor> tensors;
  tensors.reserve(planned.reads.size());
  for (const auto i : c10::irange(planned.reads.size())) {
    const auto& same_as = planned.node->tensors()[i].same_as;
    tensors.push_back(same_as ? tensors[*same_as] : makeArgument(planned, i, writable));
  }
  return tensors;
}

Tensor Replay::makeArgument(const PlannedOperator& planned,
                            std::size_t index,
                            const std::vector<ValueMemory>& writable) {
  const TensorArgument& argument = planned.node->tensors()[index];
  if (argument.device) {
    return argument.geometry().makeEmptyTensor(*argument.device);
  }
  if (argument.number) {
    return at::native::wrapped_scalar_tensor(*argument.number);
  }
  if (argument.value == nullptr) {
    return argument.external->tensor();
  }
  const auto& written = planned.node->written();
  for (const auto i : c10::irange(written.size())) {
    if (written[i].is_argument && isSameValue(*planned.node->tensors()[written[i].position].value, *argument.value)) {
      return tensorIn(writable[i], planned.rule, argument.geometry(), /*is_written=*/true);
    }
  }
  return readTensor(planned, index, argument.geometry());
}

Tensor Replay::readTensor(const PlannedOperator& planned, std::size_t index, const Geometry& geometry) const {
  const LiveValue& read = planned.reads[index];
  if (read.value != nullptr) {
    return tensorIn(memoryOf(read), planned.rule, geometry, /*is_written=*/false);
  }
  const StorageValue& value = *planned.node->tensors()[index].value;
  return geometry.hasElements() ? geometry.makeTensor(value.makeEmptyStorage())
                                : geometry.makeEmptyTensor(value.device());
}

ValueMemory Replay::memoryOf(const LiveValue& value) const {
  return value.hasWriter() ? memory_.of(value) : ValueMemory{value.value->constant(), nullptr};
}

// ---- Written memory ----

// The storages that an operator writes are made writable first, because several arguments may show one.
std::vector<ValueMemory> Replay::writableMemory(const PlannedOperator& planned) {
  std::vector<ValueMemory> writable;
  for (const auto i : c10::irange(planned.writes.size())) {
    writable.push_back(planned.node->written()[i].is_argument ? writableMemoryOf(planned, i) : ValueMemory{});
  }
  return writable;
}

ValueMemory Replay::writableMemoryOf(const PlannedOperator& planned, std::size_t output) {
  const PlannedValue& written = planned.writes[output];
  const WrittenStorage& storage = planned.node->written()[output];
  const LiveValue before = storage.is_argument ? planned.reads[storage.position] : LiveValue{};
  const bool is_in_place = written.origin == Origin::kInPlace || written.origin == Origin::kResized;
  if (before.value == nullptr) {
    return written.parts ? ValueMemory{{}, written.parts->makeMemory()}
                         : ValueMemory{planned.node->tensors()[storage.position].value->makeEmptyStorage(), nullptr};
  }
  const ValueMemory source = memoryOf(before);
  if (written.parts) {
    return {{}, is_in_place ? written.parts->inPlace(source) : written.parts->copyOf(source)};
  }
  return {is_in_place ? source.only() : copyOf(source.only()), nullptr};
}

// ---- Written values ----

void Replay::storeOutputs(const PlannedOperator& planned,
                          const std::vector<Tensor>& arguments,
                          const Stack& results,
                          const std::vector<ValueMemory>& writable) {
  const OpNode& node = *planned.node;
  const std::vector<Tensor> returned = returnedTensors(results);
  for (const auto i : c10::irange(planned.writes.size())) {
    if (planned.writes[i].value == nullptr) {
      continue;  // not read
    }
    ValueMemory& memory = memory_.of(planned.place)[i];
    const WrittenStorage& written = node.written()[i];
    if (written.is_argument) {
      const Tensor& argument = arguments[written.position];
      memory = writable[i];
      if (!memory.parts) {
        memory.whole = written.was_resized ? storageAsPromised(written.geometry(), argument) : argument.storage();
      }
      continue;
    }
    TORCH_CHECK(written.position < returned.size() && returned[written.position].defined(), "`",
                node.op().operator_name(), "` returned no tensor as result ", written.position,
                ", although its Meta kernel did.");
    const Tensor& result = returned[written.position];
    Storage storage = storageAsPromised(written.geometry(), result);
    const bool is_shared = std::any_of(arguments.begin(), arguments.end(), [&storage](const Tensor& argument) {
      return argument.has_storage() && isSameStorage(argument.storage(), storage);
    });
    memory = {is_shared ? copyOf(storage) : std::move(storage), nullptr};
  }
}

// Drops the values that are no longer needed.
void Replay::finish(const PlannedOperator& planned) {
  is_done_[planned.place] = true;
  for (const LiveValue& value : planned.last_uses) {
    const PlannedValue& used = plan_.of(value);
    if (used.is_cached) {
      cacheValue(value);
    }
    if (!used.is_wanted || drops_wanted_) {
      memory_.of(value) = {};
    }
  }
}

// Adds it at once, so that memory of older entries can be freed. A kernel may still write memory that it kept.
void Replay::cacheValue(const LiveValue& value) {
  const Storage& storage = memory_.of(value).whole;
  if (storage && storage.use_count() == 1) {
    hooks().computed_values.keep(*value.value, storage);
  }
}

// Copies the values, because the caller may write into its storages.
void Replay::cacheWanted(const std::vector<Storage>& storages) const {
  for (const auto i : c10::irange(storages.size())) {
    const LiveValue& value = plan_.wanted()[i];
    if (cache_ == CacheUse::kReadsAndWrites && value.hasWriter() && shouldCache(*value.value)) {
      hooks().computed_values.keep(*value.value, copyOf(storages[i]));
    }
  }
}

std::vector<Storage> computeValues(const std::vector<StorageValuePtr>& values, bool keep_small, CacheUse cache) {
  if (values.empty()) {
    return {};
  }
  const Locked lock{LockRank::kReplay};
  std::vector<Storage> storages = Replay{values, ignoreProgress, cache}.run();
  constexpr std::size_t kSmallBytes = std::size_t{1} << 20U;
  const auto add_bytes = [](std::size_t sum, const Storage& storage) { return sum + storage.nbytes(); };
  if (keep_small && std::accumulate(storages.begin(), storages.end(), std::size_t{0}, add_bytes) <= kSmallBytes) {
    for (const auto i : c10::irange(values.size())) {
      values[i]->fold(storages[i]);
    }
  }
  return storages;
}

Tensor computeTensor(const Tensor& deferred) {
  const Locked lock{LockRank::kReplay};  // it may become real on another thread, which changes its storage and geometry
  return Geometry::of(deferred).makeTensor(computeValues({valueOf(deferred)}, /*keep_small=*/false).front());
}

}  // namespace torchext
