#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/tensor_new.h>

#include "../fake/device_hints.h"
#include "../fake/errors.h"
#include "../fake/fake.h"
#include "../fake/fake_cuda.h"
#include "../fake/metadata_cache.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

// PyTorch refuses to name a CUDA device on a machine without one before it looks at anything else
// (`device_lazy_init()`), and `torch.tensor()` moves what it has made to its device before it hands it to the
// dispatcher (tensor_new.h). Both switches are process-wide, so they are counted, and the last one to leave puts them
// back.
struct CudaNaming {
  std::mutex mutex;
  std::size_t depth = 0;
  bool lifted_cpu_tensors_only = false;
};

CudaNaming& cudaNaming() {
  static CudaNaming naming;
  return naming;
}

void allowToNameCuda() {
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  if (cudaNaming().depth++ == 0) {
    torch::utils::set_requires_device_init(c10::kCUDA, false);
    cudaNaming().lifted_cpu_tensors_only = torch::utils::only_lift_cpu_tensors();
    torch::utils::set_only_lift_cpu_tensors(true);
  }
}

void forbidToNameCuda() {
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  if (--cudaNaming().depth == 0) {
    torch::utils::set_only_lift_cpu_tensors(cudaNaming().lifted_cpu_tensors_only);
    torch::utils::set_requires_device_init(c10::kCUDA, true);
  }
}

// The guards of this thread's blocks, the innermost last.
std::vector<std::unique_ptr<FakeCudaGuard>>& fakeCudaBlocks() {
  thread_local std::vector<std::unique_ptr<FakeCudaGuard>> blocks;
  return blocks;
}

// Returns false, and does nothing, on a machine with CUDA devices.
bool enterFakeCuda(std::int64_t count) {
  if (hasRealCuda()) {
    return false;
  }
  fakeCudaBlocks().push_back(std::make_unique<FakeCudaGuard>(static_cast<c10::DeviceIndex>(count)));
  allowToNameCuda();
  return true;
}

void leaveFakeCuda() {
  TORCH_CHECK(!fakeCudaBlocks().empty(), "leave_fake_cuda() was called without enter_fake_cuda() on this thread.");
  forbidToNameCuda();
  fakeCudaBlocks().pop_back();
}

std::int64_t fakeCudaDevices() {
  return fakeCudaDeviceCount();
}

// Calls `function` with a thread that is set up for a backward pass through fakes on CUDA.
pybind11::object callBackward(const pybind11::function& function,
                              const pybind11::args& args,
                              const pybind11::kwargs& kwargs) {
  const FakeCudaBackwardGuard guard;
  return function(*args, **kwargs);
}

// The exception classes of torchext.fake, held for the life of the process.
struct ErrorTypes {
  PyObject* data_dependent = nullptr;
  PyObject* unsupported_operator = nullptr;
};

ErrorTypes& errorTypes() {
  static ErrorTypes types;
  return types;
}

void raisePythonError(ErrorKind kind, const std::string& message) {
  const pybind11::gil_scoped_acquire gil;
  PyObject* type = kind == ErrorKind::kDataDependent ? errorTypes().data_dependent : errorTypes().unsupported_operator;
  PyErr_SetString(type, message.c_str());
  python_error error;
  error.persist();
  throw error;
}

void setErrorTypes(const pybind11::object& data_dependent, const pybind11::object& unsupported_operator) {
  errorTypes() = {data_dependent.inc_ref().ptr(), unsupported_operator.inc_ref().ptr()};
  setErrorTranslator(&raisePythonError);
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
  bind(module, "enter_fake_cuda", enterFakeCuda);
  bind(module, "leave_fake_cuda", leaveFakeCuda);
  bind(module, "fake_cuda_devices", fakeCudaDevices);
  module.def("call_backward", &callBackward);
  bind(module, "meta_call_device", metaCallDevice);
  module.def("set_error_types", &setErrorTypes);
  bind(module, "cache_info", cacheInfo);
  bind(module, "cache_clear", clearCache);
  bind(module, "is_fake", isFakeTensor);
  bind(module, "fake_like", fakeLike);
  bind(module, "meta_like", metaLike);
  bind(module, "storage_bytes", storageBytes);
  bind(module, "view_storage_like", viewStorageLike);
  bind(module, "sparse_fake_of", makeSparseFake);
  bind(module, "fake_bytes", fakeBytes);
  bind(module, "is_storage_of_fakes", isStorageOfFakes);
  bind(module, "bytes_of_storage", bytesOfStorage);
}

}  // namespace torchext::python
