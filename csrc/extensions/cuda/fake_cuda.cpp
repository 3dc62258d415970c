#include "fake_cuda.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>

#include "../../core/fake/calls/recording.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../support/autograd.h"
#include "attention.h"
#include "generators.h"
#include "streams.h"
#include "virtual_table.h"

namespace torchext {

using c10::DeviceIndex;
using c10::DispatchKey;
using torch::profiler::impl::ProfilerVoidEventStub;

namespace {

FakeCudaAllocation fake_cuda_allocation = nullptr;

thread_local DeviceIndex visible_count = 0;
thread_local DeviceIndex current_device = 0;

// The device before the last `exchangeDevice()`, if that set the current device.
thread_local std::optional<DeviceIndex> left_device;

auto asTuple(const GpuDescription& gpu) {
  return std::tie(gpu.name, gpu.total_memory, gpu.is_limited, gpu.context_memory, gpu.major, gpu.minor,
                  gpu.multiprocessors, gpu.max_threads_per_multiprocessor, gpu.shared_memory_per_block_optin,
                  gpu.l2_cache);
}

// Returns one object for equal descriptions.
const GpuDescription* interned(GpuDescription gpu) {
  // Leaked: any thread may hold a pointer to one.
  static auto* descriptions = new std::deque<GpuDescription>;
  const Locked lock{LockRank::kGpus};
  for (const GpuDescription& known : *descriptions) {
    if (asTuple(known) == asTuple(gpu)) {
      return &known;
    }
  }
  descriptions->push_back(std::move(gpu));
  return &descriptions->back();
}

const GpuDescription* defaultGpu() {
  static const GpuDescription* gpu = interned({});
  return gpu;
}

// Describes the devices of this thread. Null outside of fake_mode().
thread_local const GpuDescription* visible_gpu = nullptr;

// The last description set by any thread.
std::atomic<const GpuDescription*> latest_gpu{nullptr};

// The number of times that devices became visible while no thread had any.
std::atomic<std::uint64_t> generation{0};
std::atomic<std::uint64_t> initialized_generation{0};

const GpuDescription* currentGpu() {
  if (visible_gpu != nullptr) {
    return visible_gpu;
  }
  const GpuDescription* latest = latest_gpu;
  return latest == nullptr ? defaultGpu() : latest;
}

// The largest number of devices of any fake_mode() so far.
std::atomic<DeviceIndex> largest_count{0};

// The number of live guards in the process.
std::atomic<int> live_guards{0};

// The guard of fake CUDA devices. It has nothing to synchronize and no streams to switch.
class NoCudaGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }

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

  // Returns one stream for all devices: see streams.h. Does not check the device: autograd calls this where an
  // exception would end the process.
  c10::Stream getStream(c10::Device /*device*/) const override {
    return c10::Stream{c10::Stream::DEFAULT, {c10::kCUDA, 0}};
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return c10::Stream{c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), newFakeStream()};
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }

  // All dtypes, as `DeviceCapability` has by default and for CUDA.
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {};
  }

  // Consistent with `FakeEvent` (torchext/fake/cuda_streams.py): one millisecond passes between two events, so that
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
  c10::Stream exchangeStream(c10::Stream stream) const override {
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

  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream& /*stream*/) const override {}

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
                              "torchext.fake.carry_blocks(), or start the thread within "
                              "torchext.fake.carry_blocks_to_threads().");
  fake_cuda_allocation(op, *stack);
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

// Called for each block: FakeTensorMode registers its own guard if the current one has no devices
// (`ensureCUDADeviceGuardSet()`).
void registerGuard() {
  // Leaked: any thread may hold a pointer to it.
  static const auto* guard = new NoCudaGuard;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)] = guard;
}

void standInForCuda() {
  static const bool done = [] {
    cuda_hooks::replace();
    // Leaked: fakes outlive the block that made them.
    static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    registerAllocation(*library);
    registerOwnKernels(*library);
    chooseAttentionOnFakeCuda();
    standInForCudaProfiler();
    return true;
  }();
  static_cast<void>(done);
  registerGuard();
}

}  // namespace

void setFakeCudaAllocation(FakeCudaAllocation allocation) noexcept {
  fake_cuda_allocation = allocation;
}

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
  return *currentGpu();
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
    describeFakeGpu(*defaultGpu());
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

void checkFakeCudaDevice(c10::Device device) {
  const int count = hasRealCuda() ? at::detail::getCUDAHooks().deviceCount() : visible_count;
  TORCH_CHECK(!device.is_cuda() || count == 0 || device.index() < count, "CUDA error: invalid device ordinal: ", device,
              " does not exist: ", hasRealCuda() ? std::string{"this machine"} : c10::str("fake_mode(gpu=", count, ")"),
              " has the devices cuda:0 to cuda:", count - 1, ".");
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

const OperatorSet isComposed{
    "are composed of others on CUDA, where their kernels allocate temporary buffers and read no values",
    {"aten::_euclidean_dist", "aten::_trilinear", "aten::affine_grid_generator",
     "aten::binary_cross_entropy_with_logits", "aten::block_diag", "aten::count_nonzero", "aten::dist", "aten::isinf",
     "aten::logcumsumexp", "aten::masked_scatter", "aten::norm.Scalar", "aten::norm.ScalarOpt_dtype",
     "aten::soft_margin_loss_backward", "aten::soft_margin_loss_backward.grad_input"},
    Overloads::kNamed};

}  // namespace

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

namespace {

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

}  // namespace

void standInForCudaProfiler() {
  // Leaked: threads that profile hold a pointer to it.
  static auto* stubs = new NoEvents;
  torch::profiler::impl::registerCUDAMethods(stubs);
}

}  // namespace torchext
