#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/tensor_new.h>

#include "../core/fake/cache/result_recipe.h"
#include "../core/fake/fake.h"
#include "../core/fake/meta/meta_kernel.h"
#include "../core/fake/storage/fake_keys.h"
#include "../core/fake/storage/fake_storage.h"
#include "../core/hooks/hooks.h"
#include "../extensions/collectives/collectives.h"
#include "../extensions/composites/gradient_formulas.h"
#include "../extensions/cuda/fake_cuda.h"
#include "../extensions/cuda/philox.h"
#include "../extensions/dispatch/hit_checks.h"
#include "../extensions/kernels/device_kernels.h"
#include "../extensions/layouts/sparse_fakes.h"
#include "../extensions/values/known_values.h"
#include "../libraries/support/locks.h"
#include "../libraries/support/open_blocks.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

// A block of fake_mode(gpu=...).
class FakeCudaBlock {
 public:
  explicit FakeCudaBlock(std::int64_t count)
      : devices_{static_cast<c10::DeviceIndex>(count)}, lifted_{torch::utils::only_lift_cpu_tensors()} {
    const Locked lock{LockRank::kNamedCuda};
    if (num_blocks++ == 0) {
      torch::utils::set_requires_device_init(c10::kCUDA, false);
    }
    torch::utils::set_only_lift_cpu_tensors(true);
  }
  C10_DISABLE_COPY_AND_ASSIGN(FakeCudaBlock);
  ~FakeCudaBlock() {
    const Locked lock{LockRank::kNamedCuda};
    if (--num_blocks == 0) {
      torch::utils::set_requires_device_init(c10::kCUDA, true);
    }
    torch::utils::set_only_lift_cpu_tensors(lifted_);
  }

 private:
  const FakeCudaGuard devices_;
  // `torch.tensor()` moves its result to the device before it calls the dispatcher, unless this thread-local flag is
  // set (tensor_new.h).
  const bool lifted_;
  // On a machine without CUDA, PyTorch rejects the name of a CUDA device before any dispatch (`device_lazy_init()`).
  // The switch is process-wide, so the first block turns it off, and the last one on.
  static inline std::size_t num_blocks = 0;
};

// Returns the owner that must leave the block. On a machine with CUDA devices, does nothing and returns nullopt.
std::optional<BlockOwner> enterFakeCuda(std::int64_t count) {
  if (hasRealCuda()) {
    return std::nullopt;
  }
  const BlockOwner owner = newBlockOwner();
  OpenGuards<FakeCudaBlock>::enter(owner, count);
  return owner;
}

void leaveFakeCuda(BlockOwner owner) {
  OpenGuards<FakeCudaBlock>::leave(owner, "fake_mode(gpu=...)");
}

// In the order of the members of GpuDescription. The result lets another thread describe the same devices.
auto describedGpu() {
  return std::apply([](const auto&... fields) { return std::tuple{fields...}; }, fakeGpu().fields());
}

void describe(decltype(describedGpu()) fields) {
  std::apply([](auto&... field) { describeFakeGpu({std::move(field)...}); }, fields);
}

// Returns true if calls on this thread bypass the `Fake` key because a `__torch_dispatch__` makes them: PyTorch
// excludes all keys above `Python` while it runs, and before 2.13 `Fake` was one of them.
bool isHiddenFromPythonHandler() {
  // Only PyTorch's handler of `Python` excludes the key of composites: it excludes all keys above its own.
  return kBelowFake.has(c10::DispatchKey::Python) && c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Fake) &&
         c10::impl::tls_is_dispatch_key_excluded(kCompositesKey);
}

// Calls `function`, possibly from a handler of `__torch_dispatch__`, with operators dispatched through the `Fake` key
// again. The key stays hidden from a Python Meta kernel of a fake tensor, which runs below it.
pybind11::object callFromHandler(const pybind11::function& function,
                                 const pybind11::args& args,
                                 const pybind11::kwargs& kwargs) {
  if (!isHiddenFromPythonHandler() || deviceOfMetaCall()) {
    return function(*args, **kwargs);
  }
  c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Fake, false);
  const auto hide_again =
      c10::make_scope_exit([] { c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Fake, true); });
  return function(*args, **kwargs);
}

// Returns the device type that the running Meta kernel computes for.
std::optional<std::string> metaCallDevice() {
  const auto device = deviceOfMetaCall();
  return device ? std::optional{c10::DeviceTypeName(device->type(), /*lower_case=*/true)} : std::nullopt;
}

// Warns from C++, so that `HeldWarnings` records the warning.
void warnOfMetaKernel(const std::string& message) {
  TORCH_WARN(message);
}

// Returns the strided tensors that make up `tensor`. Empty if `tensor` is strided, or its layout has no fake tensors.
std::vector<at::Tensor> layoutMembers(const at::Tensor& tensor) {
  return hooks().layouts.isSparse(tensor) ? hooks().layouts.membersOf(tensor) : std::vector<at::Tensor>{};
}

at::Tensor fakeLikeWithValue(const at::Tensor& tensor) {
  at::Tensor fake = fakeLike(tensor);
  if (tensor.layout() == c10::kStrided) {
    copyValue(fake, tensor);
  }
  return fake;
}

std::optional<std::tuple<at::Tensor, at::Tensor>> knownParts(const at::Tensor& fake) {
  const auto parts = partsOf(fake);
  return parts ? std::optional{std::tuple{parts->values, parts->written}} : std::nullopt;
}

auto cacheInfo() {
  const CacheInfo info = metadataCache().info();
  return std::tuple{info.hits, info.misses, info.uncacheable, info.size, info.capacity};
}

}  // namespace

void bindFake(pybind11::module_& module) {
  bindBlock<FakeModeGuard>(module, "enter_fake_mode", "leave_fake_mode", "fake_mode()");
  bind(module, "are_factories_fake", areFactoriesFake);
  bind(module, "enter_fake_cuda", enterFakeCuda);
  bind(module, "leave_fake_cuda", leaveFakeCuda);
  bind(module, "fake_cuda_devices", []() -> std::int64_t { return fakeCudaDeviceCount(); });
  bind(module, "set_fake_cuda_initialized", setFakeCudaInitialized);
  bind(module, "largest_fake_cuda_devices", []() -> std::int64_t { return largestFakeCudaDeviceCount(); });
  bind(module, "describe_fake_gpu", describe);
  bind(module, "default_fake_cuda_generator",
       [](std::int64_t device) { return defaultFakeCudaGenerator(static_cast<c10::DeviceIndex>(device)); });
  bind(module, "current_fake_stream",
       [](std::int64_t device) { return currentFakeStream(static_cast<c10::DeviceIndex>(device)); });
  bind(module, "set_current_fake_stream", [](std::int64_t device, std::int64_t stream) {
    setCurrentFakeStream(static_cast<c10::DeviceIndex>(device), stream);
  });
  bind(module, "new_fake_stream", newFakeStream);
  bind(module, "count_work_on_fake_stream", countWork);
  bind(module, "work_on_fake_stream", workOn);
  bind(module, "fake_gpu", describedGpu);
  module.def("call_backward", &callInside<FakeCudaBackwardGuard>);
  module.def("call_from_handler", &callFromHandler);
  bind(module, "meta_call_device", metaCallDevice);
  bind(module, "set_native_functions", setNativeFunctions);
  module.def("call_outside_of_formula", &callInside<OutsideOfFormula>);
  module.def("warn_of_meta_kernel", &warnOfMetaKernel);
  bind(module, "cache_info", cacheInfo);
  bind(module, "cache_clear", [] { metadataCache().clear(); });
  bind(module, "check_hits", checkHits);
  bind(module, "take_wrong_hits", takeWrongHits);
  bind(module, "watch_nested_lists", watchNestedLists);
  bindPredicate<&isFake>(module, "is_fake", "is_fake(tensor: torch.Tensor) -> bool");
  bind(module, "fake_like", fakeLikeWithValue);
  bind(module, "meta_like", metaLike);
  bind(module, "view_storage_like", viewStorageLike);
  bind(module, "sparse_fake_of",
       [](const at::Tensor& like, const std::vector<at::Tensor>& members) { return sparseFakeOf(like, members); });
  bind(module, "layout_members", layoutMembers);
  bind(module, "fake_bytes", fakeBytes);
  bind(module, "copy_value", copyValue);
  bind(module, "known_value", knownValueOf);
  bind(module, "known_parts", knownParts);
  bind(module, "write_value", writeValue);
  bind(module, "note_foreign_write", [](const std::vector<at::Tensor>& tensors) { hooks().values.forget(tensors); });
  bindPredicate<&isFakeStorage>(module, "is_storage_of_fakes",
                                "is_storage_of_fakes(storage: torch.UntypedStorage) -> bool");
  bind(module, "bytes_of_storage", bytesOfStorage);
}

}  // namespace torchext::python
