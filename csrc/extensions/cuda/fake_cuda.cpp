#include "fake_cuda.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/fake/meta/meta_call.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../support/autograd.h"
#include "philox.h"
#include "virtual_table.h"

namespace torchext {

using c10::DeviceIndex;
using c10::DispatchKey;
using torch::profiler::impl::ProfilerVoidEventStub;

namespace {

thread_local DeviceIndex visible_count = 0;
thread_local DeviceIndex current_device = 0;

// The device before the last `exchangeDevice()`, if that set the current device.
thread_local std::optional<DeviceIndex> left_device;

// Returns one object for equal descriptions.
const GpuDescription* interned(GpuDescription gpu) {
  const auto is_before = [](const GpuDescription& a, const GpuDescription& b) { return a.fields() < b.fields(); };
  // Leaked: any thread may hold a pointer to one.
  static auto* descriptions = new std::set<GpuDescription, decltype(is_before)>{is_before};
  const Locked lock{LockRank::kGpus};
  return &*descriptions->insert(std::move(gpu)).first;
}

// Describes the devices of this thread. Null outside of fake_mode().
thread_local const GpuDescription* visible_gpu = nullptr;

// The last description set by any thread.
std::atomic<const GpuDescription*> latest_gpu{nullptr};

// The number of times that devices became visible while no thread had any.
std::atomic<std::uint64_t> generation{0};
std::atomic<std::uint64_t> initialized_generation{0};

// The largest number of devices of any fake_mode() so far.
std::atomic<DeviceIndex> largest_count{0};

// The number of live guards in the process.
std::atomic<int> live_guards{0};

// Raises "invalid device ordinal" if `device` is a CUDA device that this thread does not have or, on a machine with
// CUDA devices, that does not exist.
void checkFakeCudaDevice(c10::Device device) {
  const int count = hasRealCuda() ? at::detail::getCUDAHooks().deviceCount() : visible_count;
  TORCH_CHECK(!device.is_cuda() || count == 0 || device.index() < count, "CUDA error: invalid device ordinal: ", device,
              " does not exist: ", hasRealCuda() ? std::string{"this machine"} : c10::str("fake_mode(gpu=", count, ")"),
              " has the devices cuda:0 to cuda:", count - 1, ".");
}

// The guard of fake CUDA devices. It has nothing to synchronize and no streams to switch.
class NoCudaGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
 public:
  c10::Device exchangeDevice(c10::Device device) const override {
    checkFakeCudaDevice(device);
    const c10::Device previous = getDevice();
    if (device.has_index()) {
      uncheckedSetDevice(device);
      left_device = previous.index();
    }
    return previous;
  }

  c10::Device getDevice() const override {
    return {c10::kCUDA, current_device};
  }

  void setDevice(c10::Device device) const override {
    checkFakeCudaDevice(device);
    uncheckedSetDevice(device);
  }

  // Like `cudaSetDevice()`, keeps the current device if the new one does not exist.
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && (visible_count == 0 || device.index() < visible_count)) {
      current_device = device.index();
      left_device.reset();
    }
  }

  // Returns one stream for all devices. For different streams, the autograd engine would call `recordDataPtrOnStream()`
  // with the memory of gradients (`record_stream_any_impl()`, input_buffer.cpp), which fakes do not have. Does not
  // check the device: autograd calls this where an exception would end the process.
  c10::Stream getStream(c10::Device /*device*/) const noexcept override {
    return c10::Stream{c10::Stream::DEFAULT, {c10::kCUDA, 0}};
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return c10::Stream{c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), newFakeStream()};
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }

  // Consistent with `FakeEvent` (torchext/fake/cuda/streams.py): one millisecond passes between two events, so that
  // programs may divide by the elapsed time.
  double elapsedTime(void* first, void* second, DeviceIndex /*device*/) const override {
    return static_cast<double>(reinterpret_cast<std::intptr_t>(second) - reinterpret_cast<std::intptr_t>(first));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }

  // The autograd engine enters the stream of each node (`c10::StreamGuard`), and with it the stream's device. All
  // devices share one stream here, so this restores the previous device for user hooks and functions in a backward
  // pass.
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    if (left_device && stream.id() == 0) {
      uncheckedSetDevice({c10::kCUDA, *left_device});
    }
    return stream;
  }

  DeviceIndex deviceCount() const noexcept override {
    return visible_count;
  }

  // An event is its sequence number.
  void record(void** event,
              const c10::Stream& /*stream*/,
              DeviceIndex /*device_index*/,
              c10::EventFlag /*flag*/) const override {
    static std::atomic<std::intptr_t> count{0};
    *event = reinterpret_cast<void*>(++count);  // NOLINT(performance-no-int-to-ptr)
  }

  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}

  bool queryEvent(void* /*event*/) const override {
    return true;
  }

  void synchronizeEvent(void* /*event*/) const override {}

  void synchronizeDevice(DeviceIndex device_index) const override {
    checkFakeCudaDevice({c10::kCUDA, device_index});
  }

  void recordDataPtrOnStream(const c10::DataPtr& /*data*/, const c10::Stream& /*stream*/) const override {}
};

// Replacements for functions of the CUDA hooks. The autograd engine calls the first two.
// `torch._C._get_accelerator()` calls the third to name the device of the default mesh of `fully_shard()`. The original
// of the last one would make recurrent networks run cuDNN's kernels on a build that has them (`cudnn_is_acceptable()`),
// and those call CUDA.
namespace cuda_hooks {

using Hooks = at::CUDAHooksInterface;

bool (*original_is_built)(const Hooks*) = nullptr;
bool (*original_is_available)(const Hooks*) = nullptr;
bool (*original_has_primary_context)(const Hooks*, DeviceIndex) = nullptr;
void (*original_init)(const Hooks*) = nullptr;
const at::Generator& (*original_get_default_generator)(const Hooks*, DeviceIndex) = nullptr;
at::Generator (*original_get_new_generator)(const Hooks*, DeviceIndex) = nullptr;

DeviceIndex orCurrent(DeviceIndex device) {
  return device < 0 ? current_device : device;
}

// PyTorch calls it before it requests a generator.
void init(const Hooks* hooks) {
  if (visible_count == 0) {
    original_init(hooks);
  }
}

const at::Generator& getDefaultGenerator(const Hooks* hooks, DeviceIndex device) {
  return visible_count > 0 ? defaultFakeCudaGenerator(orCurrent(device))
                           : original_get_default_generator(hooks, device);
}

at::Generator getNewGenerator(const Hooks* hooks, DeviceIndex device) {
  return visible_count > 0 ? newFakeCudaGenerator(orCurrent(device)) : original_get_new_generator(hooks, device);
}

bool isBuilt(const Hooks* hooks) {
  return visible_count > 0 || original_is_built(hooks);
}

bool hasPrimaryContext(const Hooks* hooks, DeviceIndex device) {
  return visible_count > 0 ? device < visible_count : original_has_primary_context(hooks, device);
}

bool isAvailable(const Hooks* hooks) {
  return visible_count > 0 || original_is_available(hooks);
}

bool compiledWithCuDNN(const Hooks* /*hooks*/) {
  return false;
}

void replace() {
  constexpr std::size_t kCapacity = 64;
  auto& object = const_cast<Hooks&>(at::detail::getCUDAHooks());  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  // Leaked: the hooks live as long as the process.
  static auto* table = new VirtualTable<kCapacity>{&object, tableSizeOf<Hooks>()};
  original_is_built = table->replace(slotOf(&Hooks::isBuilt), &isBuilt);
  original_has_primary_context = table->replace(slotOf(&Hooks::hasPrimaryContext), &hasPrimaryContext);
  original_is_available = table->replace(slotOf(&Hooks::isAvailable), &isAvailable);
  original_init = table->replace(slotOf(&Hooks::init), &init);
  original_get_default_generator = table->replace(slotOf(&Hooks::getDefaultGenerator), &getDefaultGenerator);
  original_get_new_generator = table->replace(slotOf(&Hooks::getNewGenerator), &getNewGenerator);
  table->replace(slotOf(&Hooks::compiledWithCuDNN), &compiledWithCuDNN);
  table->installInto(&object);
}

}  // namespace cuda_hooks

void allocateFake(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  // PyTorch lets this thread name CUDA devices while another thread is in fake_mode().
  TORCH_CHECK_NOT_IMPLEMENTED(visible_count > 0 || live_guards == 0,
                              "There is no CUDA device, and this thread has no fake CUDA devices because it is not in "
                              "fake_mode(gpu=...). Threads do not inherit blocks: wrap the thread's function in "
                              "torchext.fake.inherit_blocks(), or start the thread within "
                              "torchext.fake.threads_inherit_blocks().");
  runOnMeta(op, *stack);
}

// Composite operators allocate on the device of their arguments, also outside of blocks that make factories fake. Then
// their calls of `empty()` reach these kernels of the missing backend.
void registerAllocation(torch::Library& library) {
  // On a build with CUDA this replaces kernels that could only fail. PyTorch warns about it.
  const NoWarnings no_warnings;
  implement<&allocateFake>(library, {"empty.memory_format", "empty_strided"});
}

void raiseNoDevice(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": there is no CUDA device to run it on.");
}

// NOTE [Composite, but not on CUDA]
//
// A few operators are composite, but also have CUDA kernels and derivatives. This changes the tensors that are saved
// for backward and the allocations. In a build without CUDA, the dispatcher finds only the composite, also on the
// autograd keys. These CUDA kernels, which always raise, make the dispatcher find the same entries as in a build with
// CUDA, so that our handler does not treat the operators as composite.
void registerOwnKernels(torch::Library& library) {
  for (const char* name : {"_fused_rms_norm", "mish_backward", "silu_backward"}) {
    const auto op = c10::Dispatcher::singleton().findOp({std::string{"aten::"} + name, ""});
    if (op && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&raiseNoDevice>());
    }
  }
}

// Makes a profile with `ProfilerActivity.CUDA` record no time on fake CUDA devices. Without CUPTI the profiler records
// an event before and after each operator, by functions that raise an error in a build without CUDA.
class NoEvents final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* /*event*/, std::int64_t* cpu_ns) const override {
    if (device != nullptr) {
      *device = 0;
    }
    if (cpu_ns != nullptr) {
      *cpu_ns = 0;
    }
  }

  float elapsed(const ProfilerVoidEventStub* /*first*/, const ProfilerVoidEventStub* /*second*/) const override {
    return 0;
  }

  void mark(const char* /*name*/) const override {}
  void rangePush(const char* /*name*/) const override {}
  void rangePop() const override {}
  bool enabled() const override {
    return true;
  }
  void onEachDevice(std::function<void(int)> /*visit*/) const override {}
  void synchronize() const override {}
};

// NOTE [Composed on CUDA]
//
// Some differentiable operators have one kernel for all devices (`CompositeExplicitAutograd`), which calls other
// operators: `aten::_trilinear` multiplies slice by slice. These operators allocate temporary buffers. A rule for the
// whole operator (NOTE [Allocations of kernels]) could only repeat their allocations. So on fake CUDA devices this
// kernel runs on the fakes, and the operators that it calls are faked. Elsewhere, the operator's own Meta kernel
// determines the results directly. The recorder of deferred_init needs the whole operator.

const OperatorSet isComposed{
    "are composed of others on CUDA, where their kernels allocate temporary buffers and read no values",
    {"aten::_euclidean_dist", "aten::_trilinear", "aten::affine_grid_generator",
     "aten::binary_cross_entropy_with_logits", "aten::block_diag", "aten::count_nonzero", "aten::dist", "aten::isinf",
     "aten::logcumsumexp", "aten::masked_scatter", "aten::norm.Scalar", "aten::norm.ScalarOpt_dtype",
     "aten::soft_margin_loss_backward", "aten::soft_margin_loss_backward.grad_input"},
    Overloads::kNamed};

// Returns the key of the kernel that a call of `op` runs on the fakes, if it is such an operator and is called on CUDA.
std::optional<DispatchKey> composedKernelOnCuda(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_on_cuda = [](const at::Tensor& tensor) { return tensor.is_cuda(); };
  if (isComposed(op) && !isRecording() && hasTensor(arguments, is_on_cuda)) {
    for (const DispatchKey key :
         {DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional}) {
      if (op.hasKernelForDispatchKey(key)) {
        return key;
      }
    }
  }
  return std::nullopt;
}

void standInForCuda() {
  static const bool done = [] {
    cuda_hooks::replace();
    torch::Library& library = permanentLibrary(c10::DispatchKey::CUDA);
    registerAllocation(library);
    registerOwnKernels(library);
    chooseAttentionOnFakeCuda();
    torch::profiler::impl::registerCUDAMethods(new NoEvents);  // leaked: threads that profile hold a pointer to it
    return true;
  }();
  static_cast<void>(done);
  static const auto* guard = new NoCudaGuard;  // leaked: any thread may hold a pointer to it
  // For each block: FakeTensorMode registers its own guard if the current one has no devices
  // (`ensureCUDADeviceGuardSet()`).
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)] = guard;
}

}  // namespace

bool hasRealCuda() {
  static const bool has_devices = at::detail::getCUDAHooks().deviceCount() > 0;
  return has_devices;
}

DeviceIndex largestFakeCudaDeviceCount() noexcept {
  return largest_count;
}

DeviceIndex fakeCudaDeviceCount() noexcept {
  return visible_count;
}

const GpuDescription& fakeGpu() {
  static const GpuDescription* by_default = interned({});
  const GpuDescription* latest = visible_gpu != nullptr ? visible_gpu : latest_gpu.load();
  return latest == nullptr ? *by_default : *latest;
}

void describeFakeGpu(GpuDescription gpu) {
  visible_gpu = interned(std::move(gpu));
  latest_gpu = visible_gpu;
}

std::uint64_t fakeCudaGeneration() noexcept {
  return generation;
}

bool isFakeCudaInitialized() noexcept {
  return initialized_generation == generation;
}

void setFakeCudaInitialized() noexcept {
  initialized_generation = generation.load();
}

FakeCudaGuard::FakeCudaGuard(DeviceIndex count)
    : previous_count_{visible_count}, previous_device_{current_device}, previous_gpu_{visible_gpu} {
  if (hasRealCuda()) {
    return;
  }
  standInForCuda();
  if (live_guards++ == 0) {
    ++generation;
  }
  visible_count = count;
  if (visible_gpu == nullptr) {
    describeFakeGpu({});
  }
  if (current_device >= count) {
    current_device = 0;
  }
  DeviceIndex largest = largest_count;
  while (largest < count && !largest_count.compare_exchange_weak(largest, count)) {
  }
}

FakeCudaGuard::~FakeCudaGuard() {
  if (hasRealCuda()) {
    return;
  }
  --live_guards;
  visible_count = previous_count_;
  current_device = previous_device_;
  visible_gpu = previous_gpu_;
}

FakeCudaBackwardGuard::FakeCudaBackwardGuard()
    : gpu_{fakeGpu()},
      devices_{visible_count > 0 ? visible_count : largest_count.load()},
      exceptions_{std::uncaught_exceptions()},
      multithreading_{c10::AutogradState::get_tls_state().get_multithreading_enabled()} {
  describeFakeGpu(gpu_);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

// A real device has a queue on a PyTorch thread, which discards the remaining tasks after an error.
FakeCudaBackwardGuard::~FakeCudaBackwardGuard() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(multithreading_);
  if (std::uncaught_exceptions() > exceptions_ && !isRunningBackward()) {
    dropUnfinishedBackward();
  }
}

void registerFakeCuda() {
  Hooks& all = hooks();
  all.devices.count = &fakeCudaDeviceCount;
  all.devices.description = []() -> const void* { return &fakeGpu(); };
  all.devices.check = &checkFakeCudaDevice;
  all.devices.isMissing = [](c10::Device device) { return device.is_cuda() && !hasRealCuda(); };
  all.decompositions.add(&composedKernelOnCuda);
  all.followers.add(&followFakeCudaDraws);
}

namespace {

// The size of a stream pool in PyTorch (`kStreamsPerPool`, CUDAStream.cpp).
constexpr unsigned kStreams = 32;

thread_local std::array<c10::StreamId, kMaxFakeCudaDevices> current_streams{};

std::atomic<std::int64_t>* counterOf(c10::DeviceIndex device, c10::StreamId stream) noexcept {
  static std::array<std::atomic<std::int64_t>, kMaxFakeCudaDevices*(kStreams + 1)> counters{};
  if (device < 0 || stream < 0 || toSize(device) >= kMaxFakeCudaDevices || toSize(stream) > kStreams) {
    return nullptr;
  }
  return &counters.at(toSize(device) * (kStreams + 1) + toSize(stream));
}

}  // namespace

c10::StreamId currentFakeStream(c10::DeviceIndex device) noexcept {
  return device >= 0 && toSize(device) < kMaxFakeCudaDevices ? current_streams[toSize(device)] : 0;
}

void setCurrentFakeStream(c10::DeviceIndex device, c10::StreamId stream) {
  TORCH_CHECK(device >= 0 && toSize(device) < kMaxFakeCudaDevices,
              "CUDA error: invalid device ordinal: ", static_cast<int>(device), ".");
  current_streams[toSize(device)] = stream;
}

void countWork(c10::DeviceIndex device) noexcept {
  if (auto* counter = counterOf(device, currentFakeStream(device))) {
    counter->fetch_add(1, std::memory_order_relaxed);
  }
}

std::int64_t workOn(c10::DeviceIndex device, c10::StreamId stream) noexcept {
  const auto* counter = counterOf(device, stream);
  return counter == nullptr ? 0 : counter->load(std::memory_order_relaxed);
}

c10::StreamId newFakeStream() noexcept {
  static std::atomic<unsigned> count{0};
  return static_cast<c10::StreamId>(count++ % kStreams) + 1;
}

}  // namespace torchext
