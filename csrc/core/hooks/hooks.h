#pragma once

// NOTE [Hooks]
//
// The core does not include its extensions. It calls the hooks in this header, and each extension sets those that it
// implements. There are three forms. An object that no extension sets is the class below, whose functions do nothing:
// one virtual call. A list is empty, and a pointer is null: one comparison. The core also works without extensions, but
// refuses more calls and is slower. Some errors are missing then, and calls on other ranks are ordinary calls.
//
// Hooks are set while the library is loaded (`extensions/registration.cpp`), and never change afterwards, so no lock
// guards them. The core calls them on any thread that runs operators, with and without the lock of the interpreter, and
// holds none of our locks unless a comment names one. The error of a hook ends the call as an error of its kernel
// would.

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
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

// Handles some calls on fakes instead of the Meta kernels. A call that is not in the cache, and for which no earlier
// outcome applies (`FakeOutcome`), is offered to the handlers in the order in which they were added. Predictions and
// checks of hits call `decide()` without `run()`.
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

// Returns a follower of the call, or null. Called for each boxed call, hits included; unboxed kernels repeat what their
// calls need. `decomposes()` returns whether the operators that it consists of will be called instead.
using FollowCall = std::unique_ptr<CallFollower> (*)(const c10::OperatorHandle& op,
                                                     const torch::jit::Stack& stack,
                                                     c10::function_ref<bool()> decomposes);

// Returns the key of a kernel of `op` that runs on the fakes themselves, so that the operators that it calls are faked.
using DecomposeCall = std::optional<c10::DispatchKey> (*)(const c10::OperatorHandle& op, Arguments arguments);

// The values that some fakes have, although they have no memory.
class FakeValues {
 public:
  constexpr FakeValues() = default;
  C10_DISABLE_COPY_AND_ASSIGN(FakeValues);

  // Returns true if the storage of `fake` has values. Called for each fake among the arguments of each call.
  virtual bool has(const at::Tensor& /*fake*/) const noexcept {
    return false;
  }

  // Returns true for a real tensor whose values a kernel may check. Called like `has()`.
  virtual bool mayBeChecked(const at::Tensor& /*real*/) const noexcept {
    return false;
  }

  // Returns true if any call may read values now.
  virtual bool areAssumed() const noexcept {
    return false;
  }

  // Replaces arguments whose values determine shapes by equivalent ones whose shapes do.
  virtual void prepare(const c10::OperatorHandle& /*op*/, torch::jit::Stack& /*stack*/, bool /*is_prediction*/) const {}

  // Returns true if the call reads values, and all that it reads are known: then it skips the cache.
  virtual bool areRead(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) const {
    return false;
  }

  // Returns true if the call makes values without reading any.
  virtual bool areMade(const c10::OperatorHandle& /*op*/,
                       Arguments /*arguments*/,
                       Arguments /*results*/,
                       bool /*has_fake*/) const {
    return false;
  }

  // Gives results and written arguments their values, or raises the error that the known values cause.
  virtual void follow(const c10::OperatorHandle& /*op*/,
                      Arguments /*arguments*/,
                      Arguments /*results*/,
                      const ArgumentFacts& /*facts*/,
                      bool /*are_made*/) const {}

  // Called if the call was refused because it reads values. Replaces its arguments by its results, if it can.
  virtual bool answer(const c10::OperatorHandle& /*op*/, torch::jit::Stack& /*stack*/) const {
    return false;
  }

  // Gives the new fake `fake` the values of `source`: the constant that it was made of, with which it then shares
  // memory, or the tensor that it is a copy of.
  virtual void share(const at::Tensor& /*fake*/, const at::Tensor& /*source*/) const {}
  virtual void copy(const at::Tensor& /*fake*/, const at::Tensor& /*source*/) const {}

  // Makes the values of fakes unknown: other code has written them.
  virtual void forget(const c10::IValue& /*fakes*/) const {}

 protected:
  ~FakeValues() = default;
};

// Recomputes hits of the cache, for tests.
class HitChecks {
 public:
  constexpr HitChecks() = default;
  C10_DISABLE_COPY_AND_ASSIGN(HitChecks);

  // Returns true if the next hit on this thread must be checked.
  virtual bool areDue() const {
    return false;
  }
  // Raises an error unless `recompute()` returns `remembered`, the description of the cached results.
  virtual void check(const c10::OperatorHandle& /*op*/,
                     const std::string& /*remembered*/,
                     c10::function_ref<std::string()> /*recompute*/) const {}

 protected:
  ~HitChecks() = default;
};

// A layout other than strided: NOTE [Layouts].
class LayoutHandler {
 public:
  constexpr LayoutHandler() = default;
  C10_DISABLE_COPY_AND_ASSIGN(LayoutHandler);

  // Functions on tensors. The last three are called only for tensors of this layout.

  // Returns true for a tensor of this layout, real or fake. Always returns false for layouts without fakes, and for
  // those whose tensors are strided tensors on a storage.
  virtual bool has(const at::TensorBase& /*tensor*/) const noexcept {
    return false;
  }

  // Raises NotImplementedError if `tensor` cannot be copied as a fake because of its layout.
  virtual void checkCanBeFaked(const at::Tensor& /*tensor*/) const {}

  virtual bool isFake(const at::TensorBase& /*tensor*/) const {
    return false;
  }

  // Returns the strided members of `tensor`.
  virtual std::vector<at::Tensor> membersOf(const at::Tensor& /*tensor*/) const {
    return {};
  }

  // Returns a fake like `tensor` with the given members: as many fakes as `tensor` has members. It has the dtype and
  // device of its values, carries the `Fake` key, and shares the storages of the members. Calls neither the dispatcher
  // nor a mode.
  virtual at::Tensor fakeOf(const at::Tensor& /*tensor*/, at::ArrayRef<at::Tensor> /*members*/) const {
    return {};
  }

  // Functions on calls with fakes, whose arguments are on top of a stack.

  // Raises UnsupportedOperatorError if the call takes or makes a tensor of this layout, and the layout has no fakes.
  virtual void refuse(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) const {}

  // Returns true if the call takes or makes a tensor of this layout.
  virtual bool concerns(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/) const {
    return false;
  }

  // Raises predictable errors of a call that concerns the layout, before any kernel runs.
  //
  // Must raise c10::NotImplementedError while isRecording() (recording.h) if an argument or a result has no storage.
  // The recorder of deferred_init records the values of storages, so it could not materialize such a result. It catches
  // this error and, where possible, runs the call for real.
  virtual void check(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) const {}

  // Replaces the arguments of a checked call by its results. Every fake result must carry the `Fake` key; otherwise
  // calls on it would not reach our handler. PyTorch's kernels do not add the key to tensors made from fake members.
  virtual void run(const c10::OperatorHandle& /*op*/, torch::jit::Stack& /*stack*/) const {}

 protected:
  ~LayoutHandler() = default;
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

// Trials of calls on small real tensors, which raise the errors of real kernels and correct the results of Meta
// kernels.
class KernelTrials {
 public:
  constexpr KernelTrials() = default;
  C10_DISABLE_COPY_AND_ASSIGN(KernelTrials);

  // Return the results of a trial, or raise the error of the real call. `meta_results` are those of the Meta kernel,
  // followed by the arguments that it has changed.
  virtual RealResults refuse(const c10::OperatorHandle& /*op*/,
                             Arguments /*arguments*/,
                             Arguments /*meta_results*/) const {
    return {};
  }
  virtual RealResults refuse(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/) const {
    return {};
  }
  // The same for calls that are small, or cheap to try.
  virtual RealResults refuseIfSmall(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/) const {
    return {};
  }
  virtual void refuseIfCheap(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/) const {}

  // Raises the error of real tensors for a call that writes overlapping memory.
  virtual void refuseOverlap(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) const {}

  // Correct the results of the Meta kernel, on top of `stack`: all metadata, or only strides.
  virtual void correct(const RealResults& /*real*/,
                       const c10::OperatorHandle& /*op*/,
                       torch::jit::Stack& /*stack*/) const {}
  virtual void correctStrides(const RealResults& /*real*/,
                              const c10::OperatorHandle& /*op*/,
                              torch::jit::Stack& /*stack*/) const {}
  // Returns the strides of `meta` if `real` is the result of a smaller call.
  virtual c10::DimVector stridesLike(const at::Tensor& /*real*/, const at::Tensor& meta) const {
    return c10::DimVector(meta.strides());
  }

  // For an operator without a Meta kernel: whether its CPU kernel may run on zeros, and the fakes that result.
  virtual bool mayRunOnZeros(const c10::OperatorHandle& /*op*/, const torch::jit::Stack& /*stack*/) const {
    return false;
  }
  virtual std::optional<torch::jit::Stack> runOnZeros(const c10::OperatorHandle& /*op*/,
                                                      const torch::jit::Stack& /*stack*/,
                                                      c10::Device /*device*/) const {
    return std::nullopt;
  }

 protected:
  ~KernelTrials() = default;
};

// How the kernels of a device differ from the Meta kernels.
class DeviceKernels {
 public:
  constexpr DeviceKernels() = default;
  C10_DISABLE_COPY_AND_ASSIGN(DeviceKernels);

  // For operators that have no Meta kernel, or one that returns other metadata: computes the results on the meta
  // device.
  virtual bool replaces(const c10::OperatorHandle& /*op*/) const {
    return false;
  }
  virtual void runReplacement(const c10::OperatorHandle& /*op*/, torch::jit::Stack& /*stack*/) const {}

  // Calls the kernel of `op` on the meta device by `call`. May replace arguments that it does not accept, and correct
  // the results.
  virtual void callMeta(const c10::OperatorHandle& /*op*/,
                        torch::jit::Stack& stack,
                        c10::function_ref<void(torch::jit::Stack& stack)> call) const {
    call(stack);
  }

  // Raises the error of the device's kernel for the dtypes of a call.
  virtual void refuseDtypes(const c10::OperatorHandle& /*op*/,
                            Arguments /*arguments*/,
                            Arguments /*results*/,
                            c10::Device /*device*/) const {}

  // Returns true if the layout of the results on CUDA is that on the CPU.
  virtual bool hasLayoutOfCpu(const c10::OperatorHandle& /*op*/) const {
    return false;
  }
  // Corrects the results of the Meta kernel, which are still on the meta device.
  virtual void correct(const c10::OperatorHandle& /*op*/,
                       Arguments /*arguments*/,
                       c10::Device /*device*/,
                       torch::jit::Stack& /*results*/) const {}

  // Gives the fakes in `results` the properties that Meta kernels do not determine.
  virtual void complete(const c10::OperatorHandle& /*op*/,
                        Arguments /*arguments*/,
                        torch::jit::Stack& /*results*/) const {}

  // Returns true if kernels on CUDA compare the devices of all arguments, numbers included.
  virtual bool compareDevices(const c10::OperatorHandle& /*op*/) const {
    return false;
  }

 protected:
  ~DeviceKernels() = default;
};

// Devices that fakes may claim although they do not exist.
class FakeDevices {
 public:
  constexpr FakeDevices() = default;
  C10_DISABLE_COPY_AND_ASSIGN(FakeDevices);

  // Returns the number of such CUDA devices on this thread, and an address that is equal for equal devices.
  virtual c10::DeviceIndex count() const noexcept {
    return 0;
  }
  virtual const void* description() const noexcept {
    return nullptr;
  }
  // Raises "invalid device ordinal" if the device is neither real nor one of them.
  virtual void check(c10::Device /*device*/) const {}
  // Returns true for a device without kernels to compute on it. May be called with `kReplay` held.
  virtual bool isMissing(c10::Device /*device*/) const {
    return false;
  }

 protected:
  ~FakeDevices() = default;
};

// How an operator communicates with other processes.
enum class Communication : std::uint8_t {
  kNone,
  kWaits,         // waits for the end of a collective
  kSynchronizes,  // synchronizes processes without communicating values
  kCollective,
};

// Collectives, which cannot be recorded and made later, because other processes wait for them now.
class Collectives {
 public:
  constexpr Collectives() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Collectives);

  virtual Communication of(const c10::OperatorHandle& /*op*/) const {
    return Communication::kNone;
  }
  // Makes the deferred tensors among the arguments real. Raises an error, before changing anything, if there are other
  // fakes.
  virtual void makeDeferredReal(const c10::OperatorHandle& /*op*/, Arguments /*arguments*/) const {}
  // Makes the processes wait for each other, although the tensor on top of `stack` is fake.
  virtual void synchronize(const c10::OperatorHandle& /*op*/, torch::jit::Stack& /*stack*/) const {}

 protected:
  ~Collectives() = default;
};

// ---- Recordings ----

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
class PartRules {
 public:
  constexpr PartRules() = default;
  C10_DISABLE_COPY_AND_ASSIGN(PartRules);

  // A pure function of the call. Takes at most a microsecond.
  virtual PartRule ruleOf(const OpNode& node) const = 0;
  // Returns one demand for each operator of `graph`. The wanted values are needed completely.
  virtual std::vector<Demand> demandsOf(const LiveGraph& graph) const = 0;
  // Returns the tensor argument that a call copies, element by element, to a storage that then holds nothing else, on
  // the same device and in the same dtype. Nothing for other calls.
  virtual std::optional<std::size_t> copiedArgument(const OpNode& node) const = 0;
  // Returns an estimate of the bytes that an operator allocates besides its results.
  virtual std::size_t workspaceOf(const ReplayPlan& plan, const PlannedOperator& planned) const = 0;
  // Raises an internal error for an inconsistent plan, if plans are checked.
  virtual void check(const ReplayPlan& plan) const = 0;

  // Returns a tensor argument of the running operator, by its position, in the memory of the value that it reads.
  using ReadTensor = c10::function_ref<at::Tensor(std::size_t position, const Geometry& geometry)>;
  // Computes all parts in `memory` of the value that the operator writes. `generator` stands where a random fill
  // begins. Raises `PartsDiffer` if their bits would differ from those in the whole.
  virtual void run(const PlannedOperator& planned,
                   const PartsMemory& memory,
                   const at::Generator& generator,
                   ReadTensor read) const = 0;
  // Raises `PartsDiffer` if the bits of `result` may be wrong because `node` computed it for a part, or with strides
  // other than the recorded ones.
  virtual void checkIsExact(const OpNode& node, const at::Tensor& result) const = 0;

  // Returns true for a random fill that steps may follow: elementwise operators that run on each stretch of it while
  // that is in the processor's cache.
  virtual bool mayHaveSteps(const OpNode& fill) const = 0;
  // Returns the geometry of the result of `node` if it can run as a step on memory of the geometry `shown`, which its
  // first tensor argument must have; else nothing.
  virtual std::optional<Geometry> resultOfStep(const OpNode& node, const Geometry& shown) const = 0;
  // Returns true for a step that overwrites its input.
  virtual bool worksInPlace(const OpNode& step) const = 0;
  // Runs a fill, whose arguments are on `stack`, and its steps. Returns the storages with the results of the steps, or
  // nothing, without an effect, if the caller must call the fill.
  virtual std::optional<std::vector<c10::Storage>> fillWithSteps(const OpNode& fill,
                                                                 torch::jit::Stack& stack,
                                                                 const at::Generator& generator,
                                                                 c10::ArrayRef<const OpNode*> steps) const = 0;

 protected:
  ~PartRules() = default;
};

// Computes the random fill `op` with the arguments on `stack` if it can do so faster than PyTorch, with the same bits,
// and replaces them by the result. Returns false, without an effect, otherwise. Null without an extension. Called with
// `kReplay` held, and `kDraws` while recording.
using ReplayFill = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack, const at::Generator& generator);

// Returns memory of the CPU with arbitrary contents for a replay, `nbytes` of at least 64 KiB. Null without an
// extension: then PyTorch's allocator makes it.
using MakeMemory = c10::Storage (*)(std::size_t nbytes);

// Values that were computed for a read, from which later replays begin. Null without an extension: then each begins
// with the recorded operators. Called with `kReplay` held.
class ComputedValues {
 public:
  constexpr ComputedValues() = default;
  C10_DISABLE_COPY_AND_ASSIGN(ComputedValues);

  // Returns false for values that are too large to keep.
  virtual bool mayKeep(const StorageValue& value) const = 0;
  // Keeps `storage`, which must not be written again, as the bytes of `value`.
  virtual void keep(const StorageValue& value, c10::Storage storage) const = 0;

 protected:
  ~ComputedValues() = default;
};

// Returns true as long as memory has not changed. Reads it.
using IsUnchanged = std::function<bool()>;

// The values of real tensors that recorded operators read: NOTE [The value at recording time]. Null without an
// extension: then each tensor is copied. Called without locks, on any thread.
class ExternalValues {
 public:
  constexpr ExternalValues() = default;
  C10_DISABLE_COPY_AND_ASSIGN(ExternalValues);

  // Returns a storage that holds `bytes` from `offset` on, and that may be shared by equal tensors.
  virtual c10::Storage copyOf(const at::Tensor& bytes, std::size_t offset) const = 0;
  // The result keeps the memory of `tensor` alive, which must be strided and have memory.
  virtual IsUnchanged watch(const at::Tensor& tensor) const = 0;

 protected:
  ~ExternalValues() = default;
};

// Materializes tensors in another way. Returns false, without an effect, for the usual way. Null without an extension.
using MaterializeTensors = bool (*)(at::ArrayRef<at::Tensor> tensors);

// ---- Marks ----

// Called for an inference tensor that becomes a normal one.
using OnNormalTensor = void (*)(c10::TensorImpl& tensor);

// ---- The `Fake` key ----

// Shares the `Fake` key with another owner. Null without an extension: then a key with an owner cannot be taken.
class KeyOwners {
 public:
  constexpr KeyOwners() = default;
  C10_DISABLE_COPY_AND_ASSIGN(KeyOwners);

  // Shares the key, which has a fallback that is not ours. Called with the lock `kKeys` held.
  virtual void share() const = 0;
  // Called for each new fake storage after the key has been shared.
  virtual void repair() const = 0;
  // Prepare all operators, or one, for our fakes, after the key has been shared.
  virtual void shareKernels() const = 0;
  virtual void shareKernelOf(const c10::OperatorHandle& op) const = 0;
  // Returns true if `tensor` carries the key for another owner.
  virtual bool isForeign(const at::TensorBase& tensor) const = 0;
  // Raises the error for a call with our fakes and another owner's.
  virtual void refuseToMix(const c10::OperatorHandle& op, Arguments arguments) const = 0;

 protected:
  ~KeyOwners() = default;
};

// Registers kernels for operators of `aten` on a key, when it is taken. Called once, with the lock `kKeys` held.
using RegisterKernels = void (*)(torch::Library& library);
// The same for a key.
using OnKeyTaken = void (*)();
// Called before a fake gets lazy bits: conjugate, negative, zero. May be called again, and on several threads at once.
using OnLazyBits = void (*)(c10::DispatchKeySet bits);

// Raises an error if a property of PyTorch does not hold that an extension relies on. Called before the first key is
// taken. `is_broken` makes a test fail, for tests of the tests.
using ExtensionTest = void (*)(bool (*is_broken)(std::string_view what) noexcept);

// ---- All hooks ----

// A few hooks of one kind, in the order in which they were added.
template <typename Hook>
class HookList {
 public:
  constexpr HookList() = default;

  void add(Hook hook) {
    TORCH_INTERNAL_ASSERT(size_ < hooks_.size());
    hooks_[size_++] = hook;
  }
  const Hook* begin() const noexcept {
    return hooks_.data();
  }
  const Hook* end() const noexcept {
    return hooks_.data() + size_;
  }
  bool empty() const noexcept {
    return size_ == 0;
  }

 private:
  std::array<Hook, 8> hooks_{};
  std::size_t size_ = 0;
};

struct Hooks {
  const FakeValues* values;
  const HitChecks* hit_checks;
  const KernelTrials* trials;
  const DeviceKernels* kernels;
  const FakeDevices* devices;
  const Collectives* collectives;
  const KeyOwners* owners = nullptr;
  MemoryCounter* memory = nullptr;
  const PartRules* parts = nullptr;
  ReplayFill replay_fill = nullptr;
  MakeMemory make_memory = nullptr;
  const ComputedValues* computed_values = nullptr;
  const ExternalValues* external_values = nullptr;
  MaterializeTensors materialize = nullptr;
  // The kinds of generators, by device type. Null for copies of generators: NOTE [The tape of a generator].
  std::array<const Tape*, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> tapes{};
  HookList<const LayoutHandler*> layouts{};
  HookList<const CallHandler*> handlers{};
  HookList<FollowCall> followers{};
  HookList<DecomposeCall> decompositions{};
  // The key of composites: NOTE [Composites that read memory].
  HookList<RegisterKernels> on_composites_key{};
  // The keys `Fake` and `DeferredInit`.
  HookList<OnKeyTaken> on_fake_key{};
  HookList<OnKeyTaken> on_deferred_init_key{};
  // The key of marked tensors. Without an extension that registers its fallback, it cannot be taken.
  HookList<OnKeyTaken> on_marks_key{};
  HookList<OnNormalTensor> on_normal_tensor{};
  HookList<OnLazyBits> on_lazy_bits{};
  HookList<ExtensionTest> self_tests{};
};

// Change it only while the library is loaded.
TORCHEXT_API Hooks& hooks() noexcept;

}  // namespace torchext
