#pragma once

// NOTE [Hooks]
//
// The core does not include its extensions. It calls the hooks in this header, and each extension sets those that it
// implements. Without extensions, a function does nothing or has the default that is given here, a list is empty, and a
// pointer is null: one comparison. The core also works without extensions, but refuses more calls and is slower. Then
// some errors are missing, metadata may differ from those of real tensors, and calls on other ranks are ordinary calls.
//
// Hooks are set while the library is loaded (`extensions/registration.cpp`), so no lock guards them. Only functions may
// also be set later, once. The core calls them on any thread that runs operators, with and without the lock of the
// interpreter, and holds none of our locks unless a comment names one. The error of a hook ends the call as an error of
// its kernel would.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>
#include <torchext/macros.h>

namespace torchext {

using Arguments = c10::ArrayRef<c10::IValue>;

// A function that an extension sets, or a default. Calling it without either does nothing, and returns a
// value-initialized result.
template <typename Function>
class Hook;

template <typename Result, typename... Parameters>
class Hook<Result(Parameters...)> {
 public:
  using Pointer = Result (*)(Parameters...);

  constexpr Hook() = default;
  explicit constexpr Hook(Pointer function) : function_{function} {}

  void operator=(Pointer function) noexcept {  // NOLINT(*-unconventional-assign-operator)
    function_ = function;
  }
  explicit operator bool() const noexcept {
    return function_ != nullptr;
  }
  Result operator()(Parameters... parameters) const {
    const Pointer function = function_.load(std::memory_order_relaxed);
    return function == nullptr ? Result() : function(std::forward<Parameters>(parameters)...);
  }

 private:
  std::atomic<Pointer> function_{nullptr};
};

// ---- Calls on fakes ----

// Properties of the arguments of a call that the handler of the `Fake` key has determined.
struct ArgumentFacts {
  bool has_fake = false;
  bool has_value = false;    // FakeValues::has() is true for one
  bool has_checked = false;  // FakeValues::mayBeChecked() is true for one
};

// The decision of a `CallHandler` to handle a call, or to refuse it.
struct HandledCall {
  // The effect on the route of the call: it ends, calls other operators, or continues to the next key.
  enum class Effect : std::uint8_t { kComputes, kDecomposes, kPassesOn };

  std::exception_ptr refusal = nullptr;
  Effect effect = Effect::kComputes;
  const char* description = "";  // for `inspect.route`
};

// Handles some calls on fakes instead of the Meta kernels. A call that the cache does not answer, and for which no
// earlier outcome applies (`FakeOutcome`), is offered to the handlers in the order in which they were added.
// Predictions and checks of hits call `decide()` without `run()`.
class CallHandler {
 public:
  constexpr CallHandler() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CallHandler);

  // Returns nothing for a call that it does not handle. Runs and changes nothing.
  virtual std::optional<HandledCall> decide(const c10::OperatorHandle& op,
                                            const torch::jit::Stack& stack,
                                            const ArgumentFacts& facts) const = 0;

  // Replaces the arguments on top of `stack` by the results. `below` are the keys below `Fake`.
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack& stack) const = 0;

 protected:
  ~CallHandler() = default;
};

// Follows one call, from the arguments to the results or the error.
class CallFollower {
 public:
  CallFollower() = default;
  C10_DISABLE_COPY_AND_ASSIGN(CallFollower);
  virtual ~CallFollower() = default;

  // The results are on top of `stack`.
  virtual void finish(const torch::jit::Stack& stack) = 0;
  virtual void fail() noexcept {}
};

// Returns a follower of the call, or null. Called for each boxed call that the handler does not pass on, hits included;
// unboxed kernels repeat what their calls need. `decomposes()` returns whether the operators that it consists of will
// be called instead.
using FollowCall = std::unique_ptr<CallFollower> (*)(const c10::OperatorHandle& op,
                                                     const torch::jit::Stack& stack,
                                                     c10::function_ref<bool()> decomposes);

// Returns the key of a kernel of `op` that runs on the fakes themselves, so that the operators that it calls are faked.
using DecomposeCall = std::optional<c10::DispatchKey> (*)(const c10::OperatorHandle& op, Arguments arguments);

// The values that some fakes have, although they have no memory.
struct FakeValues {
  // Returns true if the storage of `fake` has values. Called for each fake among the arguments of each call.
  Hook<bool(const at::Tensor& fake)> has;

  // Returns true for a real tensor whose values a kernel may check. Called like `has()`.
  Hook<bool(const at::Tensor& real)> mayBeChecked;

  // Returns true if any call may read values now.
  Hook<bool()> areAssumed;

  // Replaces arguments whose values determine shapes by equivalent ones whose shapes do.
  Hook<void(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool is_prediction)> prepare;

  // Returns true if the call reads values, and all that it reads are known: then it skips the cache.
  Hook<bool(const c10::OperatorHandle& op, const torch::jit::Stack& stack)> areRead;

  // Returns true if the call makes values without reading any.
  Hook<bool(const c10::OperatorHandle& op, Arguments arguments, Arguments results, bool has_fake)> areMade;

  // Gives results and written arguments their values, or raises the error that the known values cause.
  Hook<void(
      const c10::OperatorHandle& op, Arguments arguments, Arguments results, const ArgumentFacts& facts, bool are_made)>
      follow;

  // Called if the call was refused because it reads values. Replaces its arguments by its results, if it can.
  Hook<bool(const c10::OperatorHandle& op, torch::jit::Stack& stack)> answer;

  // Gives the new fake `fake` the values of `source`: the constant that it was made of, with which it then shares
  // memory, or the tensor that it is a copy of.
  Hook<void(const at::Tensor& fake, const at::Tensor& source)> share;
  Hook<void(const at::Tensor& fake, const at::Tensor& source)> copy;

  // Makes the values of fakes unknown: other code has written them.
  Hook<void(const c10::IValue& fakes)> forget;
};

class ResultRecipe;

// Returns null if the call is not answered by a Meta kernel any more, or has results that cannot be remembered.
using RecomputeRecipe = c10::function_ref<std::shared_ptr<const ResultRecipe>()>;

// Recomputes hits of the cache, for tests.
struct HitChecks {
  // Returns true if the next hit on this thread must be checked.
  Hook<bool()> areDue;
  // Raises an error unless `recompute()` returns a recipe equal to `remembered`.
  Hook<void(const c10::OperatorHandle& op, const ResultRecipe& remembered, RecomputeRecipe recompute)> check;
};

// NOTE [Layouts]
//
// A fake is a strided tensor on a storage without memory. Sparse fakes consist of such fakes, their members, and have
// no storage. All other kinds of tensors (nested, quantized, MKL-DNN) have no fakes. Calls on them are refused before
// they are decomposed; only `lift_fresh` and `pin_memory` have been handled before. Calls on sparse tensors have a
// `CallHandler`. It runs calls whose results do not depend on the layout on the Meta kernels, where a contiguous meta
// tensor of the same sizes stands for each sparse argument (`Shadows`).
struct Layouts {
  // Returns true for a sparse tensor, real or fake.
  Hook<bool(const at::TensorBase& tensor)> isSparse;
  // Returns true for a sparse tensor whose values are fake, with or without the `Fake` key. Accepts any tensor.
  Hook<bool(const at::TensorBase& tensor)> isSparseFake;
  // Returns the strided members of a sparse tensor.
  Hook<std::vector<at::Tensor>(const at::Tensor& sparse)> membersOf;
  // Returns a fake like a sparse tensor, or an undefined tensor for a strided one. Raises NotImplementedError for a
  // layout without fakes.
  Hook<at::Tensor(const at::Tensor& tensor)> fakeLike;
  // Raises UnsupportedOperatorError if the call takes or makes a tensor of a layout without fakes.
  Hook<void(const c10::OperatorHandle& op, const torch::jit::Stack& stack)> refuse;
};

// ---- Memory ----

// The memory that the kernel of a call allocates in addition to its results. Only the counter interprets it.
class KernelScratch {
 public:
  KernelScratch() = default;
  C10_DISABLE_COPY_AND_ASSIGN(KernelScratch);
  virtual ~KernelScratch() = default;

  // Returns a text that distinguishes it from others.
  virtual std::string describe() const = 0;
};

// Counts the memory of fake storages: NOTE [Counting memory by storage]. Null without an extension.
class MemoryCounter {
 public:
  MemoryCounter() = default;
  C10_DISABLE_COPY_AND_ASSIGN(MemoryCounter);

  // Returns true if storages that are now made on `device` must be counted.
  virtual bool counts(c10::Device device) const noexcept = 0;

  // Allocates `nbytes`, which must not be 0, for a storage with its last label, or 0 if it has no label. Returns the
  // argument of `free()`. Throws c10::OutOfMemoryError.
  virtual void* allocate(std::size_t nbytes, c10::Device device, std::uint8_t label) = 0;
  // Called in destructors of storages, with any lock held that the thread holds.
  virtual void free(void* allocation) noexcept = 0;

  // Called with the lock `kStorages` held. Returns the allocation's address, or 0 on devices whose addresses are not
  // simulated.
  virtual std::uintptr_t addressOf(const void* allocation) const noexcept = 0;

  // Records that the allocation is also used on `stream`.
  virtual void recordStream(const c10::Storage& storage, c10::StreamId stream) = 0;

  // Returns the memory that the kernel for a call with these results allocates in addition, or null if there is no such
  // memory.
  virtual std::shared_ptr<const KernelScratch> scratchOf(const c10::OperatorHandle& op,
                                                         Arguments arguments,
                                                         Arguments results) = 0;

  // Returns true if `observe()` looks at the arguments of calls of `op`.
  virtual bool observes(const c10::OperatorHandle& op) const = 0;

  // Derives the purpose of storages from the tensors that a call reads and writes: NOTE [Categories of memory]. Cheap
  // while no tracker is open.
  virtual void observe(const c10::OperatorHandle& op, Arguments arguments, Arguments results) = 0;

  // Simulates the allocations of the kernel of `op`: allocates its temporary buffers and `results` in the kernel's
  // order, and frees the temporary buffers. `scratch` may be null.
  virtual void runKernel(const c10::OperatorHandle& op, const KernelScratch* scratch, Arguments results) = 0;

 protected:
  ~MemoryCounter() = default;
};

// The device for counting pinned host memory, which has a separate allocator.
inline const c10::Device kPinnedMemory{c10::kCPU, 0};

// ---- Calls on the Meta kernels ----

// The results of a trial of a call on small real tensors.
struct RealResults {
  // The returned values, followed by those of the written arguments that have changed, with None in place of the
  // others. Empty if there was no trial.
  torch::jit::Stack values;
  bool has_sizes = false;  // whether the trial had the sizes of the call
  std::vector<c10::Warning> warnings{};
  bool are_new = false;  // whether all values are plain tensors, each alone on a storage of its size
};

// Why a call is tried out. This limits how much a trial may cost.
enum class TrialReason : std::uint8_t {
  kMetaKernelAccepts,
  kMetaKernelRefuses,  // or does not determine the shape of a resized argument
  kInsteadOfPython,    // before a Meta kernel that exists only in Python
  kNeedsValues,        // the call will be refused because it needs values
};

// Trials of calls on small real tensors, which raise the errors of real kernels and correct the results of Meta
// kernels.
struct KernelTrials {
  // Returns the results of a trial, or raises the error of the real call. After a Meta kernel, `meta_results` are its
  // results, followed by the arguments that it has changed.
  Hook<RealResults(TrialReason reason, const c10::OperatorHandle& op, Arguments arguments, Arguments meta_results)>
      tryOut;

  // Raises the error of real tensors for a call that writes overlapping memory.
  Hook<void(const c10::OperatorHandle& op, const torch::jit::Stack& stack)> refuseOverlap;

  // Correct the results of the Meta kernel, on top of `stack`: all metadata, or only strides.
  Hook<void(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack)> correct;
  Hook<void(const RealResults& real, const c10::OperatorHandle& op, torch::jit::Stack& stack)> correctStrides;
  // Returns the strides of `meta` if `real` is the result of a smaller call.
  Hook<c10::DimVector(const at::Tensor& real, const at::Tensor& meta)> stridesLike{
      [](const at::Tensor& /*real*/, const at::Tensor& meta) { return c10::DimVector(meta.strides()); }};

  // For an operator without a Meta kernel, or with one that refuses what the CPU kernel accepts: whether its CPU kernel
  // may run on zeros, and the recipe of the call on `device`, or null if the kernel fails on zeros.
  Hook<bool(const c10::OperatorHandle& op, const torch::jit::Stack& stack)> mayRunOnZeros;
  Hook<std::shared_ptr<ResultRecipe>(const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::Device device)>
      describeOnZeros;
};

using CallOnStack = c10::function_ref<void(torch::jit::Stack& stack)>;

// How the kernels of a device differ from the Meta kernels.
struct DeviceKernels {
  // Returns true if `callMeta()` computes the results itself: there may be no Meta kernel.
  Hook<bool(const c10::OperatorHandle& op)> replaces;

  // Calls the kernel of `op` on the meta device by `call`. May replace arguments that it does not accept, and correct
  // the results. A result on another device is on that device.
  Hook<void(const c10::OperatorHandle& op, torch::jit::Stack& stack, CallOnStack call)> callMeta{
      [](const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack, CallOnStack call) { call(stack); }};

  // Raises the error of the device's kernel for the dtypes of a call.
  Hook<void(const c10::OperatorHandle& op, Arguments arguments, Arguments results, c10::Device device)> refuseDtypes;

  // Returns true if the layout of the results on CUDA is that on the CPU.
  Hook<bool(const c10::OperatorHandle& op)> hasLayoutOfCpu;
  // Corrects the results of the Meta kernel, which are still on the meta device. May put fakes in their place.
  Hook<void(const c10::OperatorHandle& op, Arguments arguments, c10::Device device, torch::jit::Stack& results)>
      correct;

  // Completes the results of the Meta kernel, which are on the meta device, after all checks and other corrections.
  Hook<void(const c10::OperatorHandle& op, Arguments arguments, c10::Device device, torch::jit::Stack& results)>
      complete;

  // Returns true if kernels on CUDA compare the devices of all arguments, numbers included.
  Hook<bool(const c10::OperatorHandle& op)> compareDevices;
};

// Devices that fakes may claim although they do not exist.
struct FakeDevices {
  // Returns the number of such CUDA devices on this thread, and an address that is equal for equal devices.
  Hook<c10::DeviceIndex()> count;
  Hook<const void*()> description;
  // Raises "invalid device ordinal" if the device is neither real nor one of them.
  Hook<void(c10::Device device)> check;
  // Returns true for a device without kernels to compute on it. May be called with `kReplay` held.
  Hook<bool(c10::Device device)> isMissing;
};

// How an operator communicates with other processes.
enum class Communication : std::uint8_t {
  kNone,
  kWaits,         // waits for the end of a collective
  kSynchronizes,  // synchronizes processes without communicating values
  kCollective,
};

// Collectives, which cannot be recorded and made later, because other processes wait for them now.
struct Collectives {
  Hook<Communication(const c10::OperatorHandle& op)> of;
  // Makes the deferred tensors among the arguments real. Raises an error, before changing anything, if there are other
  // fakes.
  Hook<void(const c10::OperatorHandle& op, Arguments arguments)> makeDeferredReal;
  // Makes the processes wait for each other, although the tensor on top of `stack` is fake.
  Hook<void(const c10::OperatorHandle& op, torch::jit::Stack& stack)> synchronize;
};

// ---- Recordings ----

// NOTE [Calls of handlers]
//
// The handler of `Fake` passes calls that concern deferred tensors to the recorder, which calls the handler again to
// run them as fakes: NOTE [Recording below autograd]. This includes calls from the `__torch_dispatch__` of a mode or a
// subclass, which do not reach the key `DeferredInit`: `pythonFallback()` excludes all keys above `Python` on the
// thread while `__torch_dispatch__` runs (PythonFallbackKernel.cpp).

// The recorder's functions for such calls. Null as long as no deferred tensor has existed. Not set by an extension, but
// with the key `DeferredInit`.
struct HandlersRecorder {
  // Returns true if the call of `op` with the arguments on top of `stack` concerns deferred tensors.
  Hook<bool(const c10::OperatorHandle& op, const torch::jit::Stack& stack)> concerns;
  // Handles such a call.
  Hook<void(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack)> record;
};

class OpNode;
class PartsMemory;
class ReplayPlan;
class StorageValue;
class Tape;
struct Demand;
struct Geometry;
struct LiveGraph;
struct PlannedOperator;

// How an operator computes a part of its result with the bits of the whole.
enum class PartRule : std::uint8_t {
  kNone,       // runs as recorded, on tensors with the recorded strides and alignment
  kAnyLayout,  // runs as recorded, with the elements of its arguments anywhere in memory
  kElementwise,
  kConstant,       // makes a tensor of equal elements
  kConcatenation,  // `cat` and `stack`
  kPadding,
  kRandomFill,
};

// Computes parts of recorded values, and operators on stretches of random fills. Null without an extension: then a
// replay computes whole values. Called with the lock `kReplay` held.
struct PartRules {
  // A pure function of the call. Takes at most a microsecond.
  Hook<PartRule(const OpNode& node)> ruleOf;
  // Returns one demand for each operator of `graph`. The wanted values are needed completely.
  Hook<std::vector<Demand>(const LiveGraph& graph)> demandsOf;
  // Returns the tensor argument that a call copies, element by element, to a storage that then holds nothing else, on
  // the same device and in the same dtype. Nothing for other calls.
  Hook<std::optional<std::size_t>(const OpNode& node)> copiedArgument;
  // Raises an internal error for an inconsistent plan, if plans are checked.
  Hook<void(const ReplayPlan& plan)> check;

  // Returns a tensor argument of the running operator, by its position, in the memory of the value that it reads.
  using ReadTensor = c10::function_ref<at::Tensor(std::size_t position, const Geometry& geometry)>;
  // Computes all parts in `memory` of the value that the operator writes. `generator` stands where a random fill
  // begins. Raises `PartsDiffer` if their bits would differ from those in the whole.
  Hook<void(const PlannedOperator& planned, const PartsMemory& memory, const at::Generator& generator, ReadTensor read)>
      run;
  // Raises `PartsDiffer` if the bits of `result` may be wrong because `node` computed it for a part, or with strides
  // other than the recorded ones.
  Hook<void(const OpNode& node, const at::Tensor& result)> checkIsExact;

  // Plans which elementwise operators run on each stretch of a random fill, while that is in the processor's cache:
  // `PlannedOperator::steps`. `operators` are otherwise planned.
  Hook<void(std::vector<PlannedOperator>& operators)> planSteps;
  // Runs a fill, whose arguments are on `stack`, and its steps. Returns the storages with the results of the steps, or
  // nothing, without an effect, if the caller must call the fill.
  Hook<std::optional<std::vector<c10::Storage>>(
      const OpNode& fill, torch::jit::Stack& stack, const at::Generator& generator, c10::ArrayRef<const OpNode*> steps)>
      fillWithSteps;
};

// Computes the random fill `op` with the arguments on `stack` if it can do so faster than PyTorch, with the same bits,
// and replaces them by the result. Returns false, without an effect, otherwise. Called with `kReplay` held in a replay,
// and `kDraws` while recording.
using ReplayFill = Hook<bool(const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Generator& generator)>;

// Returns memory of the CPU with arbitrary contents for a replay, `nbytes` of at least 64 KiB. Without an extension,
// PyTorch's allocator makes it.
using MakeMemory = Hook<c10::Storage(std::size_t nbytes)>;

// Values that were computed for a read, from which later replays begin. Without an extension, each begins with the
// recorded operators. Called with `kReplay` held.
struct ComputedValues {
  // Returns false for values that are too large to keep.
  Hook<bool(const StorageValue& value)> mayKeep;
  // Keeps `storage`, which must not be written again, as the bytes of `value`.
  Hook<void(const StorageValue& value, c10::Storage storage)> keep;
};

// Returns true as long as memory has not changed. Reads it.
using IsUnchanged = std::function<bool()>;

// The values of real tensors that recorded operators read: NOTE [The value at recording time]. Null without an
// extension: then each tensor is copied. Called without locks, on any thread.
struct ExternalValues {
  // Returns a storage that holds `bytes` from `offset` on, and that may be shared by equal tensors.
  Hook<c10::Storage(const at::Tensor& bytes, std::size_t offset)> copyOf;
  // The result keeps the memory of `tensor` alive, which must be strided and have memory.
  Hook<IsUnchanged(const at::Tensor& tensor)> watch;
};

// Materializes tensors in another way. Returns false, without an effect, for the usual way. Null without an extension.
using MaterializeTensors = Hook<bool(at::ArrayRef<at::Tensor> tensors)>;

// ---- Guards ----

// Additions of extensions to the guards of the core, on the calling thread.
struct GuardAdditions {
  // Inference mode saves and restores whether the thread traces origins of inference tensors. Both raise nothing. Set
  // with the key of marked tensors, without which no thread traces: inference blocks are entered often.
  Hook<bool()> tracesOrigins;
  Hook<void(bool traces)> traceOrigins;
  // Called for each self-cleaning region. Without an extension, such a region is an error. `endCleaning()` raises
  // nothing.
  Hook<void()> beginCleaning;
  Hook<void()> endCleaning;
  // Called for an inference tensor that becomes a normal one.
  Hook<void(c10::TensorImpl& tensor)> onNormalTensor;
};

// ---- The `Fake` key ----

// Shares the `Fake` key with another owner. Null without an extension: then a key with an owner cannot be taken.
struct KeyOwners {
  // Shares the key, which has a fallback that is not ours. Called with the lock `kKeys` held.
  Hook<void()> share;
  // Called for each new fake storage after the key has been shared.
  Hook<void()> repair;
  // Prepare all operators, or one, for our fakes, after the key has been shared.
  Hook<void()> shareKernels;
  Hook<void(const c10::OperatorHandle& op)> shareKernelOf;
  // Returns true if `tensor` carries the key for another owner.
  Hook<bool(const at::TensorBase& tensor)> isForeign;
  // Raises the error for a call with our fakes and another owner's.
  Hook<void(const c10::OperatorHandle& op, Arguments arguments)> refuseToMix;
};

// Registers kernels for operators of `aten` on a key, when it is taken. Called once, with the lock `kKeys` held.
using RegisterKernels = void (*)(torch::Library& library);
// The same for a key.
using OnKeyTaken = void (*)();

// Code that relies on details of PyTorch, and its test: core/torch_internals/self_tests.h.
struct TestedPiece {
  const char* name;
  const char* relies_on;
  int verified;  // the newest release of PyTorch on which it was verified, such as 215 for 2.15
  bool (*passes)(bool is_broken);
  bool is_needed_by_all = true;
};

// ---- All hooks ----

// A few hooks of one kind, in the order in which they were added.
template <typename One>
class HookList {
 public:
  constexpr HookList() = default;

  void add(One hook) {
    TORCH_INTERNAL_ASSERT(size_ < hooks_.size());
    hooks_[size_++] = hook;
  }
  const One* begin() const noexcept {
    return hooks_.data();
  }
  const One* end() const noexcept {
    return hooks_.data() + size_;
  }

 private:
  std::array<One, 8> hooks_{};
  std::size_t size_ = 0;
};

struct Hooks {
  FakeValues values{};
  HitChecks hit_checks{};
  Layouts layouts{};
  KernelTrials trials{};
  DeviceKernels kernels{};
  FakeDevices devices{};
  Collectives collectives{};
  KeyOwners owners{};
  MemoryCounter* memory = nullptr;
  HandlersRecorder recorder{};
  PartRules parts{};
  ComputedValues computed_values{};
  ExternalValues external_values{};
  ReplayFill replay_fill{};
  MakeMemory make_memory{};
  MaterializeTensors materialize{};
  GuardAdditions guards{};
  // The kinds of generators, by device type. Null for copies of generators: NOTE [The tape of a generator].
  std::array<const Tape*, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> tapes{};
  HookList<const CallHandler*> handlers{};
  HookList<FollowCall> followers{};
  HookList<DecomposeCall> decompositions{};
  // The key of composites: NOTE [Composites that read memory].
  HookList<RegisterKernels> on_composites_key{};
  // The keys `Fake` and `DeferredInit`.
  HookList<OnKeyTaken> on_fake_key{};
  Hook<void()> on_deferred_init_key{};
  // Called before a fake gets lazy bits: conjugate, negative, zero. May be called again, and on several threads at
  // once.
  Hook<void(c10::DispatchKeySet bits)> on_lazy_bits{};
  HookList<const TestedPiece*> pieces{};
};

// Change it only while the library is loaded.
TORCHEXT_API Hooks& hooks() noexcept;

}  // namespace torchext
