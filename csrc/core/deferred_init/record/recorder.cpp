#include "recorder.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/irange.h>

#include "../../../libraries/support/interpreter.h"
#include "../../../libraries/support/locks.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../fake/calls/errors.h"
#include "../../fake/calls/op_traits.h"
#include "../../fake/calls/recording.h"
#include "../../fake/fake.h"
#include "../../fake/meta/device_rules.h"
#include "../../fake/storage/fake_keys.h"
#include "../../fake/storage/fake_storage.h"
#include "../../fake/storage/fake_tensor_impl.h"
#include "../../hooks/hooks.h"
#include "../../torch_internals/error_texts.h"
#include "../../torch_internals/open_tensor_impl.h"
#include "../graph/op_graph.h"
#include "../random/tape.h"
#include "../replay/replay.h"
#include "real_call.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

constexpr DispatchKeySet kDeferredInit{DispatchKey::DeferredInit};
constexpr DispatchKeySet kFake{DispatchKey::Fake};
const DispatchKeySet kBelowDeferredInit{DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit};

// A storage that the call is about to write, and its previous state.
struct PendingWrite {
  std::uint32_t position;  // of its tensor among the tensor arguments
  Tensor tensor;
  c10::Storage storage;
  std::size_t nbytes;
};

// Excludes PyTorch's own operators: errors of their Meta kernels are genuine.
bool isCustom(const OperatorHandle& op) {
  const std::string_view name_space = namespaceOf(op.operator_name());
  return name_space != "aten" && name_space != "prims";
}

// Only a program that updates a deferred tensor in every step reaches this number. Loops over the rows of a parameter
// write other elements each time, constructors may write any number of times, and small values restart the count when
// read.
constexpr std::uint32_t kRepeatsToWarn = 300;

std::uint32_t repeatsAfterConstruction(const c10::Storage& storage, const Geometry& written) {
  if (c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit)) {
    return 0;
  }
  const StorageValuePtr before = valueOf(storage);
  if (before == nullptr) {
    return 1;
  }
  const Locked lock{LockRank::kReplay};  // a value that another thread reads loses its operators: `fold()`
  const bool writes_again =
      before->writer() != nullptr && before->writer()->written()[before->output()].geometry() == written;
  return writes_again ? before->repeats() + 1 : 1;
}

void warnOfGrowth(const OperatorHandle& op) {
  TORCH_WARN(
      "`", op.operator_name(), "` wrote a deferred tensor that has been written ", kRepeatsToWarn,
      " times since deferred_init, probably in every step of a loop. Each write is recorded, and all of them are "
      "replayed when a real tensor needs the value. Materialize the tensor before the loop: with its module or "
      "by materialize_tensor(); if it is the state of an optimizer, by materialize_module(module, optimizer=...).");
}

// Returns true for a factory that a constructor calls. Real kernels and the handlers of modes call factories with the
// key excluded.
bool isFactoryOfDeferred(const OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit) &&
         !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::DeferredInit) && isFactory(op, arguments);
}

bool haveDeferred(c10::ArrayRef<IValue> arguments) {
  return hasTensor(arguments, [](const Tensor& tensor) { return valueOf(tensor) != nullptr; });
}

// Handles one call. csrc/README.md lists the steps.
class RecordedCall {
 public:
  RecordedCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
      : op_{op},
        keys_{keys},
        stack_{stack},
        num_arguments_{op.schema().arguments().size()},
        bottom_{stack.size() - num_arguments_} {}

  void carryOut(RecorderOutcome outcome) {
    switch (outcome) {
      case RecorderOutcome::kDecomposes:
        callComposite(op_, keys_ & kBelowDeferredInit, stack_);
        break;
      case RecorderOutcome::kPassesOn:
        passOn();
        break;
      case RecorderOutcome::kPassesOnBelow:
        passOnBelow();
        break;
      case RecorderOutcome::kLifts:
        stack_.back() = deferConstant(stack_.back().toTensor());
        break;
      case RecorderOutcome::kCommunicates:
        hooks().collectives.makeDeferredReal(op_, arguments());
        op_.callBoxed(stack_);
        break;
      case RecorderOutcome::kSynchronizes:
        hooks().collectives.synchronize(op_, stack_);
        break;
      case RecorderOutcome::kRunsForReal:
        callForReal(op_, keys_, stack_);
        break;
      case RecorderOutcome::kShows:
        showDeferred();
        break;
      case RecorderOutcome::kRunsAsFake:
        runAsFakeOrForReal();
        break;
      case RecorderOutcome::kRecords:
        record();
    }
  }

  // At the key `DeferredInit`, above autograd: NOTE [Recording below autograd].
  RecorderOutcome decideAboveAutograd() {
    // A composite operator is recorded as the operators that it calls, which arrive here again. So values that it reads
    // (`is_nonzero`, `one_hot`) are computed when needed, and its draws are handled as draws.
    if (compositeKernelOf(op_)) {
      return setsTensor() ? RecorderOutcome::kShows : RecorderOutcome::kDecomposes;
    }
    inspectArguments();
    if (isPythonsFirst()) {
      return RecorderOutcome::kPassesOn;
    }
    if (!isAboutDeferred()) {
      return RecorderOutcome::kPassesOnBelow;
    }
    if (isConstant()) {
      return isSharedMemory() ? RecorderOutcome::kPassesOnBelow : RecorderOutcome::kLifts;
    }
    switch (hooks().collectives.of(op_)) {
      case Communication::kCollective:
        return RecorderOutcome::kCommunicates;
      case Communication::kSynchronizes:
        return RecorderOutcome::kSynchronizes;
      default:
        return RecorderOutcome::kPassesOn;
    }
  }

  // At the key `Fake`, below autograd.
  RecorderOutcome decideBelowAutograd() {
    inspectArguments();
    switch (hooks().collectives.of(op_)) {
      case Communication::kNone:
        break;
      case Communication::kWaits:
        return RecorderOutcome::kRunsAsFake;  // deferred tensors have no pending communication
      case Communication::kSynchronizes:
        return RecorderOutcome::kSynchronizes;
      case Communication::kCollective:
        return RecorderOutcome::kCommunicates;
    }
    if (showsDeferred()) {
      return RecorderOutcome::kShows;
    }
    if (mustRunForReal()) {
      return RecorderOutcome::kRunsForReal;
    }
    return leavesNothingToRecord() ? RecorderOutcome::kRunsAsFake : RecorderOutcome::kRecords;
  }

 private:
  // The written storages, and their indices in `OpNode::written()`.
  using Writes = std::vector<std::pair<c10::Storage, std::size_t>>;

  c10::ArrayRef<IValue> arguments() const {
    return topOf(stack_, num_arguments_);
  }

  // The user's mode or subclass decides what the call does. The operators that it calls are recorded instead of the
  // call.
  bool isPythonsFirst() const {
    return has_python_ || (c10::impl::TorchDispatchModeTLS::any_modes_set() &&
                           !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python));
  }

  void inspectArguments() {
    for (const auto i : c10::irange(num_arguments_)) {
      forEachTensor(torch::jit::peek(stack_, i, num_arguments_),
                    [&](const Tensor& tensor) { inspectTensor(tensor, writesArgument(op_, stack_, i)); });
    }
    if (has_deferred_ && has_foreign_fake_) {
      hooks().owners.refuseToMix(op_, arguments());
    }
  }

  void inspectTensor(const Tensor& tensor, bool is_written) {
    has_python_ = has_python_ || tensor.key_set().has(DispatchKey::Python);
    if (tensor.key_set().has(DispatchKey::Fake)) {
      dropStaleKeys(tensor);
      has_foreign_fake_ = has_foreign_fake_ || (isFakeKeyShared() && hooks().owners.isForeign(tensor));
    }
    if (!isFake(tensor)) {
      writes_real_ = writes_real_ || is_written;
    } else if (valueOf(tensor) != nullptr) {
      has_deferred_ = true;
      writes_deferred_ = writes_deferred_ || is_written;
    } else {
      has_unrecorded_fake_ = true;
    }
  }

  bool isAboutDeferred() const {
    return has_deferred_ || (!has_unrecorded_fake_ && !has_foreign_fake_ && isFactoryOfDeferred(op_, arguments()) &&
                             !isMadeByFakeTensorMode());
  }

  // `MetaConverter` (meta_utils.py) disables the handlers of `__torch_dispatch__` while it makes a meta tensor for the
  // tensor that it converts.
  bool isMadeByFakeTensorMode() const {
    return isInKernelOfFakeTensorMode() ||
           (c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python) && outputDevice(op_, stack_).is_meta());
  }

  bool isConstant() const {
    return !has_deferred_ && isLiftFresh(op_);
  }

  // Other code may write or read shared memory, so such a tensor stays real. Memory from `torch.from_numpy()`,
  // `torch.frombuffer()` and DLPack has no allocator. `torch.tensor(storage)` puts the constant on the given storage
  // (`internal_new_from_data()`, tensor_new.cpp), which the caller also holds.
  bool isSharedMemory() const {
    const Tensor& constant = torch::jit::peek(stack_, 0, num_arguments_).toTensor();
    if (!constant.has_storage()) {
      return true;
    }
    const c10::Storage& storage = constant.storage();
    return storage.allocator() == nullptr || storage.use_count() > 1;
  }

  // `set_(source, offset, size, stride)` calls the operator that takes a storage, which has no keys.
  bool setsTensor() {
    if (op_.schema().name() != "aten::set_" || !torch::jit::peek(stack_, 1, num_arguments_).isTensor()) {
      return false;
    }
    inspectArguments();
    return showsDeferred();
  }

  // `set_()` writes nothing: the tensor shows another storage, and is deferred from now on.
  bool showsDeferred() const {
    return has_deferred_ && writes_real_ && op_.schema().name() == "aten::set_";
  }

  // Writing a deferred tensor into a real one must happen immediately, because the real one shows it at once. For an
  // operator without a Meta kernel, as in a program without Python, only a real run shows what it returns.
  bool mustRunForReal() const {
    return !has_unrecorded_fake_ && (needsValues(op_, stack_) || (has_deferred_ && (writes_real_ || isCheck())) ||
                                     !op_.hasComputedKernelForDispatchKey(DispatchKey::Meta));
  }

  // `_linalg_check_errors`, `_assert_async` and similar operators, and some custom ones, have no result but an error,
  // which eager construction would raise here. No value depends on them, so recorded ones would never run.
  bool isCheck() const {
    return op_.schema().returns().empty() && !writes_deferred_ && !writes_real_ &&
           op_.schema().name() != "aten::_assert_tensor_metadata" &&  // checks only metadata, which fakes have
           !isOnMissingDevice();
  }

  // Values cannot be read on a fake device.
  bool isOnMissingDevice() const {
    return hasTensor(arguments(), [](const Tensor& tensor) { return hooks().devices.isMissing(tensor.device()); });
  }

  // An operator that only makes views writes nothing: the views show existing storages.
  bool leavesNothingToRecord() const {
    return (has_unrecorded_fake_ && !writes_deferred_) || onlyMakesViews(op_);
  }

  // The key `Fake` routes factories, whose arguments do not carry it, to the handler of fakes.
  void passOn() {
    op_.redispatchBoxed((keys_ & kBelowDeferredInit) | kFake, &stack_);
  }

  void passOnBelow() {
    const c10::impl::ExcludeDispatchKeyGuard guard{kDeferredInit};
    op_.redispatchBoxed(keys_ & kBelowDeferredInit, &stack_);
  }

  // The same as `.data = deferred`. The real kernel would compare the memory of the storages (`checkSetStorage()`,
  // Resize.h).
  void showDeferred() {
    const Tensor self = torch::jit::peek(stack_, 0, num_arguments_).toTensor();
    const Tensor source = torch::jit::peek(stack_, 1, num_arguments_).toTensor();
    TORCH_CHECK(self.dtype() == source.dtype(), "Could not set tensor of type ", source.dtype().name(),
                " to a tensor of type ", self.dtype().name());
    TORCH_CHECK(self.device() == source.device(), "Attempted to set the storage of a tensor on device \"",
                self.device(), "\" to a storage on different device \"", source.device(),
                "\".  This is no longer allowed; the devices must match.");
    const auto shown = source.unsafeGetTensorImpl()->shallow_copy_and_detach(/*version_counter=*/0, true);
    OpenTensorImpl::keysOf(*shown) = (shown->key_set() - kLazyBits) | (self.key_set() & kLazyBits);  // unchanged
    if (constexpr std::size_t kWithGeometry = 5; num_arguments_ == kWithGeometry) {
      const auto argument = [this](std::size_t i) { return torch::jit::peek(stack_, i, num_arguments_); };
      const std::vector<std::int64_t> sizes = argument(3).toIntVector();
      const std::vector<std::int64_t> strides = argument(4).toIntVector();
      if (strides.empty()) {
        shown->set_sizes_contiguous(sizes);
        shown->set_storage_offset(argument(2).toInt());
      } else {
        shown->set_sizes_and_strides(sizes, strides, argument(2).toInt());
      }
    }
    self.unsafeGetTensorImpl()->shallow_copy_from(shown);
    torch::jit::drop(stack_, num_arguments_ - 1);
  }

  void runAsFake() {
    const RecordingGuard recording{/*can_run_for_real=*/!has_unrecorded_fake_};
    const c10::impl::ExcludeDispatchKeyGuard exclude{kDeferredInit};
    const FakeFactoriesGuard include;
    op_.redispatchBoxed((keys_ & kBelowDeferredInit) | kFake, &stack_);
  }

  // Returns false if the fake call is refused as not implemented: then a real run shows what it returns.
  bool tryRunAsFake() {
    try {
      runAsFake();
      return true;
    } catch (const RefusedOnCudaError&) {
      throw;
    } catch (const c10::NotImplementedError&) {
      return false;
    } catch (const std::exception& error) {
      // Meta kernels of custom operators raise arbitrary errors: `torch.library.custom_op` always registers one, whose
      // message refers to `register_fake`. If the call itself is wrong, running it for real raises the error.
      if (!isCustom(op_) || interpreter().isInterrupt(error)) {
        throw;
      }
      return false;
    }
  }

  // A fake without a record has no values for a real run.
  void runAsFakeOrForReal() {
    if (has_unrecorded_fake_) {
      runAsFake();
      return;
    }
    const Stack called = arguments().vec();
    if (!tryRunAsFake()) {
      fallBackToRealRun(called);
    }
  }

  void fallBackToRealRun(const Stack& called) {
    stack_.resize(bottom_);  // remove what the failed call has left
    stack_.insert(stack_.end(), called.begin(), called.end());
    callForReal(op_, keys_, stack_);
  }

  void record() {
    const std::optional<at::Generator> generator = this->generator();
    const std::vector<PendingWrite> written = writtenArguments();
    // Both are taken before the call, which may change the metadata of its arguments.
    const auto node = std::make_shared<OpNode>(op_, stack_);
    const Stack called = arguments().vec();
    try {
      if (!tryRunAsFake()) {
        fallBackToRealRun(called);
        return;
      }
    } catch (const c10::Error& error) {
      // Raised when the version is counted, which PyTorch's kernels do after the write (`ADInplaceOrViewType.cpp`): the
      // real tensor has its new value then.
      if (isWriteToInferenceTensor(error)) {
        noteDraws(node, generator, called);
        noteWrites(node, written, {});
      }
      throw;
    }
    noteDraws(node, generator, called);
    noteWrites(node, written, returnedTensors(topOf(stack_, op_.schema().returns().size())));
  }

  void noteDraws(const std::shared_ptr<OpNode>& node,
                 const std::optional<at::Generator>& generator,
                 const Stack& called) const {
    if (generator) {
      node->setTape(takeDraws(*node, *generator, called));
    }
  }

  std::vector<PendingWrite> writtenArguments() const {
    std::vector<PendingWrite> written;
    std::uint32_t position = 0;
    for (const auto i : c10::irange(num_arguments_)) {
      const auto visit = [&](const Tensor& tensor) {
        const auto writes_too = [&tensor](const PendingWrite& other) {
          return isSameStorage(other.storage, tensor.storage());
        };
        if (writesArgument(op_, stack_, i) && valueOf(tensor) != nullptr &&
            std::none_of(written.begin(), written.end(), writes_too)) {
          written.push_back({position, tensor, tensor.storage(), tensor.storage().nbytes()});
        }
        ++position;
      };
      forEachTensor(torch::jit::peek(stack_, i, num_arguments_), visit);
    }
    return written;
  }

  // Returns the generator that the operator draws from. Meta tensors draw nothing.
  std::optional<at::Generator> generator() const {
    if (!drawsNumbers(op_)) {
      return std::nullopt;
    }
    const c10::Device device = outputDevice(op_, stack_);
    const int position = generatorArgument(op_.schema());
    if (position >= 0 && !device.is_meta()) {
      const IValue& given = torch::jit::peek(stack_, toSize(position), num_arguments_);
      if (!given.isNone()) {
        return given.toGenerator();
      }
    }
    const at::Generator generator = defaultGenerator(device);
    return generator.defined() ? std::optional{generator} : std::nullopt;
  }

  // Moves the generator past the numbers that the operator would draw, and returns the previous position. The lock
  // keeps threads that record from interleaving.
  TapePositionPtr takeDraws(const OpNode& node, const at::Generator& generator, const Stack& called) const {
    const Tape& tape = tapeOf(generator.device().type());
    {
      const Locked lock{LockRank::kDraws};
      if (auto position = tape.takeDrawsOf(op_, called, generator)) {
        return position;
      }
    }
    TORCH_CHECK(!hooks().devices.isMissing(generator.device()), "`", op_.operator_name(),
                "` draws from the generator of ", generator.device(),
                ". The number of draws is known only after a run, and this machine has no "
                "CUDA device to run it on. Construct the model on the CPU and let materialize_module() place it.");
    const Locked replay{LockRank::kReplay};  // the call may read deferred tensors
    const Locked lock{LockRank::kDraws};
    const auto position = tape.positionOf(generator);
    callInScratch(node);
    position->noteEnd(generator);
    return position;
  }

  // The node is complete before a value refers to it: other threads may use it from then on.
  void noteWrites(const std::shared_ptr<OpNode>& node,
                  const std::vector<PendingWrite>& arguments,
                  c10::ArrayRef<Tensor> results) const {
    Writes writes;
    for (const PendingWrite& argument : arguments) {
      addWrittenArgument(*node, argument, writes);
    }
    for (const auto i : c10::irange(results.size())) {
      addResult(*node, results, i, writes);
    }
    bool grows = false;
    for (const auto& [storage, output] : writes) {
      const WrittenStorage& written = node->written()[output];
      const auto value = std::make_shared<StorageValue>(node, output, storage);
      if (written.is_argument) {
        value->setRepeats(repeatsAfterConstruction(storage, written.geometry()));
      }
      setValue(storage, value);
      grows = grows || value->repeats() == kRepeatsToWarn;
    }
    if (grows) {
      warnOfGrowth(op_);
    }
  }

  void addWrittenArgument(OpNode& node, const PendingWrite& argument, Writes& writes) const {
    const bool changes_metadata_only = op_.hasTag(at::Tag::inplace_view);
    const bool was_resized = argument.tensor.storage().nbytes() != argument.nbytes;
    // Of `t_`, `set_`, `as_strided_` and similar operators, only `resize_` may write the storage.
    if (changes_metadata_only && (!was_resized || !isSameStorage(argument.storage, argument.tensor.storage()))) {
      return;
    }
    const bool is_resized = was_resized && !changes_metadata_only;
    writes.emplace_back(argument.storage, node.addWritten({argument.position, /*is_argument=*/true, is_resized,
                                                           SharedGeometry::of(argument.tensor)}));
  }

  // Adds the result at `position` if it is on a new storage.
  static void addResult(OpNode& node, c10::ArrayRef<Tensor> results, std::size_t position, Writes& writes) {
    const Tensor& result = results[position];
    const auto is_on = [&result](const auto& write) { return isSameStorage(write.first, result.storage()); };
    if (result.defined() && isFake(result) && result.has_storage() && provenanceOf(result.storage()) == nullptr &&
        std::none_of(writes.begin(), writes.end(), is_on)) {
      writes.emplace_back(result.storage(),
                          node.addWritten({static_cast<std::uint32_t>(position), /*is_argument=*/false,
                                           /*was_resized=*/false, SharedGeometry::of(result)}));
    }
  }

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const std::size_t num_arguments_;
  const std::size_t bottom_;  // where the arguments begin
  bool has_python_ = false;
  bool has_deferred_ = false;
  bool writes_deferred_ = false;
  bool writes_real_ = false;
  // A fake without a record: results that depend on it can be faked, but not materialized.
  bool has_unrecorded_fake_ = false;
  // NOTE [Two owners of the Fake key]
  bool has_foreign_fake_ = false;
};

}  // namespace

RecorderOutcome predictRecorder(const OperatorHandle& op,
                                DispatchKeySet keys,
                                const Stack& arguments,
                                bool is_below_autograd) {
  Stack stack = arguments;
  RecordedCall call{op, keys, stack};
  return is_below_autograd ? call.decideBelowAutograd() : call.decideAboveAutograd();
}

void deferredInitFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  translatingFailures([&] {
    RecordedCall call{op, keys, *stack};
    call.carryOut(call.decideAboveAutograd());
  });
}

void setHandlersRecorder() noexcept {
  HandlersRecorder& recorder = hooks().recorder;
  recorder.record = [](const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    translatingFailures([&] {
      RecordedCall call{op, keys, *stack};
      call.carryOut(call.decideBelowAutograd());
    });
  };
  recorder.concerns = [](const OperatorHandle& op, const Stack& stack) {
    const auto arguments = argumentsOf(op, stack);
    return (haveDeferred(arguments) || isFactoryOfDeferred(op, arguments)) && !compositeKernelOf(op);
  };
}

}  // namespace torchext
