#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/tensor_new.h>

#include "../fake/cache/metadata_cache.h"
#include "../fake/collectives/collectives.h"
#include "../fake/cuda/fake_cuda.h"
#include "../fake/fake.h"
#include "../fake/layouts/layout.h"
#include "../fake/meta/device_hints.h"
#include "../fake/storage/fake_factories.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

// PyTorch refuses to name a CUDA device on a machine without one before it looks at anything else
// (`device_lazy_init()`). The switch is process-wide, so it is counted, and the last one to leave puts it back.
struct CudaNaming {
  std::mutex mutex;
  std::size_t depth = 0;
};

CudaNaming& cudaNaming() {
  static CudaNaming naming;
  return naming;
}

void allowToNameCuda() {
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  if (cudaNaming().depth++ == 0) {
    torch::utils::set_requires_device_init(c10::kCUDA, false);
  }
}

void forbidToNameCuda() {
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  if (--cudaNaming().depth == 0) {
    torch::utils::set_requires_device_init(c10::kCUDA, true);
  }
}

// `torch.tensor()` moves what it has made to its device before it hands it to the dispatcher, unless it is told not to
// on this thread (tensor_new.h).
class LiftCpuTensorsOnly {
 public:
  LiftCpuTensorsOnly() : previous_{torch::utils::only_lift_cpu_tensors()} {
    torch::utils::set_only_lift_cpu_tensors(true);
  }
  LiftCpuTensorsOnly(const LiftCpuTensorsOnly&) = delete;
  LiftCpuTensorsOnly& operator=(const LiftCpuTensorsOnly&) = delete;
  LiftCpuTensorsOnly(LiftCpuTensorsOnly&&) = delete;
  LiftCpuTensorsOnly& operator=(LiftCpuTensorsOnly&&) = delete;
  ~LiftCpuTensorsOnly() {
    torch::utils::set_only_lift_cpu_tensors(previous_);
  }

 private:
  bool previous_;
};

struct FakeCudaBlock {
  explicit FakeCudaBlock(c10::DeviceIndex count) : devices{count} {}

  FakeCudaGuard devices;
  LiftCpuTensorsOnly lift;
};

// The blocks of this thread, the innermost last.
std::vector<std::unique_ptr<FakeCudaBlock>>& fakeCudaBlocks() {
  thread_local std::vector<std::unique_ptr<FakeCudaBlock>> blocks;
  return blocks;
}

// Returns false, and does nothing, on a machine with CUDA devices.
bool enterFakeCuda(std::int64_t count) {
  if (hasRealCuda()) {
    return false;
  }
  fakeCudaBlocks().push_back(std::make_unique<FakeCudaBlock>(static_cast<c10::DeviceIndex>(count)));
  allowToNameCuda();
  return true;
}

void leaveFakeCuda() {
  forbidToNameCuda();
  TORCH_CHECK(!fakeCudaBlocks().empty(),
              "fake_mode(fake_cuda=...) was left on another thread than it was entered on, which stays in it. Leave it "
              "where it was entered; a generator that holds such a block must be closed there.");
  fakeCudaBlocks().pop_back();
}

std::int64_t largestFakeCudaDevices() {
  return largestFakeCudaDeviceCount();
}

std::int64_t fakeCudaDevices() {
  return fakeCudaDeviceCount();
}

// Lets operators that Python calls meet the `Fake` key again.
class ShowFakeKey {
 public:
  ShowFakeKey() {
    c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Fake, false);
  }
  ShowFakeKey(const ShowFakeKey&) = delete;
  ShowFakeKey& operator=(const ShowFakeKey&) = delete;
  ShowFakeKey(ShowFakeKey&&) = delete;
  ShowFakeKey& operator=(ShowFakeKey&&) = delete;
  ~ShowFakeKey() {
    c10::impl::tls_set_dispatch_key_excluded(c10::DispatchKey::Fake, true);
  }
};

// Calls `function`, an operator that may have been called by a handler of `__torch_dispatch__`.
pybind11::object callFromHandler(const pybind11::function& function,
                                 const pybind11::args& args,
                                 const pybind11::kwargs& kwargs) {
  std::optional<ShowFakeKey> show;
  if (isHiddenFromPythonHandler()) {
    show.emplace();
  }
  return function(*args, **kwargs);
}

// The type of the device that the running Meta kernel computes for.
std::optional<std::string> metaCallDevice() {
  const auto device = deviceOfMetaCall();
  return device ? std::optional{c10::DeviceTypeName(device->type(), /*lower_case=*/true)} : std::nullopt;
}

bool isFakeTensor(const at::Tensor& tensor) {
  return isFake(tensor);
}

at::Tensor makeSparseFake(const at::Tensor& like, const std::vector<at::Tensor>& members) {
  return sparseFakeOf(like, members);
}

// The strided tensors that make up `tensor`; none when it is strided, or there are no fakes of its layout.
std::vector<at::Tensor> layoutMembers(const at::Tensor& tensor) {
  const LayoutHandler* layout = layoutOf(tensor);
  return layout == nullptr ? std::vector<at::Tensor>{} : layout->membersOf(tensor);
}

// As a tuple in the order of torchext.fake.CacheInfo.
auto cacheInfo() {
  const CacheInfo info = metadataCache().info();
  return std::tuple{info.hits, info.misses, info.uncacheable, info.size, info.capacity};
}

void clearCache() {
  metadataCache().clear();
}

}  // namespace

void bindFake(pybind11::module_& module) {
  bind(module, "enter_fake_mode", enterFakeMode);
  bind(module, "leave_fake_mode", leaveFakeMode);
  bind(module, "are_factories_fake", areFactoriesFake);
  bind(module, "enter_fake_cuda", enterFakeCuda);
  bind(module, "leave_fake_cuda", leaveFakeCuda);
  bind(module, "fake_cuda_devices", fakeCudaDevices);
  bind(module, "largest_fake_cuda_devices", largestFakeCudaDevices);
  module.def("call_backward", &callInside<FakeCudaBackwardGuard>);
  module.def("call_from_handler", &callFromHandler);
  bind(module, "meta_call_device", metaCallDevice);
  bind(module, "cache_info", cacheInfo);
  bind(module, "cache_clear", clearCache);
  bind(module, "watch_nested_lists", watchNestedLists);
  bind(module, "is_fake", isFakeTensor);
  bind(module, "fake_like", fakeLike);
  bind(module, "meta_like", metaLike);
  bind(module, "view_storage_like", viewStorageLike);
  bind(module, "sparse_fake_of", makeSparseFake);
  bind(module, "layout_members", layoutMembers);
  bind(module, "fake_bytes", fakeBytes);
  bind(module, "is_storage_of_fakes", isStorageOfFakes);
  bind(module, "bytes_of_storage", bytesOfStorage);
}

}  // namespace torchext::python
