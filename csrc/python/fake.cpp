#include <cstddef>
#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/utils/device_lazy_init.h>

#include "../fake/device_hints.h"
#include "../fake/errors.h"
#include "../fake/fake.h"
#include "../fake/fake_cuda.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

// PyTorch refuses to name a CUDA device on a build without CUDA before it looks at anything else
// (`device_lazy_init()`). The switch is process-wide, so it is counted, and the last one to leave puts it back.
struct CudaNaming {
  std::mutex mutex;
  std::size_t depth = 0;
};

CudaNaming& cudaNaming() {
  static CudaNaming naming;
  return naming;
}

void enterFakeCuda() {
  if (ensureCudaGuard()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  if (cudaNaming().depth++ == 0) {
    torch::utils::set_requires_device_init(c10::kCUDA, false);
  }
}

void leaveFakeCuda() {
  if (ensureCudaGuard()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(cudaNaming().mutex);
  TORCH_CHECK(cudaNaming().depth > 0, "leave_fake_cuda() was called without enter_fake_cuda().");
  if (--cudaNaming().depth == 0) {
    torch::utils::set_requires_device_init(c10::kCUDA, true);
  }
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

}  // namespace

void bindFake(pybind11::module_& module) {
  bind(module, "enter_fake_mode", enterFakeMode);
  bind(module, "leave_fake_mode", leaveFakeMode);
  bind(module, "enter_fake_cuda", enterFakeCuda);
  bind(module, "leave_fake_cuda", leaveFakeCuda);
  bind(module, "meta_call_device", metaCallDevice);
  module.def("set_error_types", &setErrorTypes);
  bind(module, "is_fake", isFakeTensor);
  bind(module, "fake_like", fakeLike);
  bind(module, "meta_like", metaLike);
  bind(module, "storage_bytes", storageBytes);
  bind(module, "view_storage_like", viewStorageLike);
  bind(module, "fake_bytes", fakeBytes);
  bind(module, "is_storage_of_fakes", isStorageOfFakes);
  bind(module, "bytes_of_storage", bytesOfStorage);
}

}  // namespace torchext::python
