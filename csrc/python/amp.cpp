#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "../core/amp/region.h"
#include "../extensions/amp/amp_tensor.h"
#include "../extensions/amp/policies.h"
#include "../libraries/support/open_blocks.h"
#include "../libraries/support/sizes.h"
#include "bind.h"
#include "block_type.h"
#include "interpreter.h"
#include "module.h"

namespace torchext::python {

namespace {

struct Region {
  static constexpr bool kBindsItself = true;

  void enter() const {
    enterRegion(owner, {deviceType(), dtype, is_enabled, is_caching, is_self_cleaning});
  }
  void leave() const {
    leaveRegion(owner);
  }

  // Notifies function modes of the region, as PyTorch's regions do: `torch.export` traces by a function mode.
  static bool notify(PyObject* self, bool is_entered) {
    if (!at::impl::torch_function_mode_enabled()) {
      return true;
    }
    PyObject* const done =
        PyObject_CallFunctionObjArgs(provided(Provided::kNotifyModes), self, is_entered ? Py_True : Py_False, nullptr);
    Py_XDECREF(done);
    return done != nullptr;
  }

  c10::DeviceType deviceType() const {
    return device_type ? *device_type : deviceTypeInUse();
  }

  // Determined on entry if absent: a decorator may be created before a fake device exists.
  std::optional<c10::DeviceType> device_type;
  std::optional<c10::ScalarType> dtype;
  bool is_enabled = true;
  std::optional<bool> is_caching;
  bool is_self_cleaning = false;
  BlockOwner owner = newBlockOwner();
};

std::string nameOf(c10::DeviceType device_type) {
  return c10::DeviceTypeName(device_type, /*lower_case=*/true);
}

std::string deviceTypesThatAutocast() {
  std::string names;
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto device_type = static_cast<c10::DeviceType>(i);
    if (canAutocast(device_type)) {
      names += (names.empty() ? "'" : ", '") + nameOf(device_type) + "'";
    }
  }
  return names;
}

// Each returns false with a Python error.
bool readDeviceType(PyObject* given, std::optional<c10::DeviceType>& device_type) {
  if (given == Py_None) {
    return true;
  }
  Py_ssize_t size = 0;
  const char* name = PyUnicode_Check(given) ? PyUnicode_AsUTF8AndSize(given, &size) : nullptr;
  if (name == nullptr) {
    PyErr_Format(PyExc_TypeError,
                 "autocast() expected `device_type` to be a string like `tensor.device.type`, None, or a function to "
                 "decorate, got %s.",
                 Py_TYPE(given)->tp_name);
    return false;
  }
  try {
    device_type = c10::Device{std::string(name, toSize(size))}.type();  // `torch.autocast()` also accepts "cuda:0"
  } catch (const c10::Error&) {
    device_type.reset();
  }
  if (!device_type || !canAutocast(*device_type)) {
    PyErr_Format(PyExc_ValueError, "autocast() does not support the device type %R. Supported are %s.", given,
                 deviceTypesThatAutocast().c_str());
    return false;
  }
  return true;
}

bool readDtype(PyObject* given, std::optional<c10::ScalarType>& dtype) {
  if (given == Py_None) {
    return true;
  }
  if (!THPDtype_Check(given)) {
    PyErr_Format(PyExc_TypeError, "autocast() expected `dtype` to be torch.bfloat16, torch.float16 or None, got %s.",
                 Py_TYPE(given)->tp_name);
    return false;
  }
  dtype = reinterpret_cast<THPDtype*>(given)->scalar_type;
  return true;
}

bool readCache(PyObject* given, std::optional<bool>& is_caching) {
  if (given == Py_None) {
    return true;
  }
  const int is_true = PyObject_IsTrue(given);
  is_caching = is_true == 1;
  return is_true != -1;
}

// Disables a region that cannot autocast to its dtype, with the warning of `torch.autocast`. Returns false with a
// Python error.
bool checkDtype(Region& region) {
  const c10::DeviceType device_type = region.deviceType();
  if (!region.is_enabled || canAutocastTo(device_type, region.dtype)) {
    return true;
  }
  region.is_enabled = false;
  const std::string name = c10::DeviceTypeName(device_type, /*lower_case=*/false);
  const std::string message = "In " + name + " autocast, but the target dtype is not supported. Disabling autocast.\n" +
                              name + " Autocast only supports dtypes of torch.bfloat16, torch.float16 currently.";
  return PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) == 0;
}

// `@autocast` above `@classmethod` receives an object that is not yet a function.
bool isToDecorate(PyObject* given) {
  return PyCallable_Check(given) != 0 || PyObject_TypeCheck(given, &PyClassMethod_Type) ||
         PyObject_TypeCheck(given, &PyStaticMethod_Type);
}

PyObject* newRegion(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* device_type = Py_None;
  PyObject* dtype = Py_None;
  int is_enabled = 1;
  PyObject* is_caching = nullptr;
  int is_self_cleaning = 0;
  constexpr const char* kNames[] = {"device_type", "dtype", "enabled", "cache_enabled", "self_cleaning", nullptr};
  // The parameter is not `const` before Python 3.13.
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "|O$OpOp:autocast", const_cast<char**>(kNames), &device_type, &dtype,
                                  &is_enabled, &is_caching, &is_self_cleaning) == 0) {
    return nullptr;
  }
  PyObject* const function = isToDecorate(device_type) ? std::exchange(device_type, Py_None) : nullptr;
  Region region;
  region.is_enabled = is_enabled != 0;
  region.is_self_cleaning = is_self_cleaning != 0;
  if (!readDeviceType(device_type, region.device_type) || !readDtype(dtype, region.dtype) ||
      !readCache(is_caching == nullptr ? Py_None : is_caching, region.is_caching) || !checkDtype(region)) {
    return nullptr;
  }
  PyObject* const self = newBlock<Region>(type, region);
  return function == nullptr ? self : decorateWith(self, function);
}

pybind11::object deviceTypeOf(const Region& region) {
  return region.device_type ? pybind11::cast(nameOf(*region.device_type)) : pybind11::none();
}

pybind11::object dtypeOf(const Region& region) {
  return region.dtype ? pybind11::reinterpret_borrow<pybind11::object>(
                            reinterpret_cast<PyObject*>(torch::getTHPDtype(*region.dtype)))
                      : pybind11::none();
}

// The arguments of the constructor, in their order.
PyObject* arguments(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  const Region& region = blockOf<Region>(self);
  return pybind11::make_tuple(deviceTypeOf(region), dtypeOf(region), region.is_enabled, region.is_caching,
                              region.is_self_cleaning)
      .release()
      .ptr();
  END_HANDLE_TH_ERRORS
}

// One of these arguments, for the guards of `torch.compile`.
template <typename Value, Value value>
PyObject* argument(PyObject* self, void* /*unused*/) {
  HANDLE_TH_ERRORS
  const Region& region = blockOf<Region>(self);
  if constexpr (std::is_member_object_pointer_v<Value>) {
    return pybind11::cast(region.*value).release().ptr();
  } else {
    return value(region).release().ptr();
  }
  END_HANDLE_TH_ERRORS
}

template <auto value>
constexpr getter kArgument = &argument<decltype(value), value>;

// Returns True if operators autocast because of this region alone.
PyObject* isOutermost(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(static_cast<long>(!isAutocasting(blockOf<Region>(self).deviceType())));
  END_HANDLE_TH_ERRORS
}

void addRegionType(pybind11::module_& module) {
  static PyMethodDef methods[] = {enterMethod<Region>(),
                                  exitMethod<Region>(),
                                  {"_arguments", &arguments, METH_NOARGS, nullptr},
                                  {"_is_outermost", &isOutermost, METH_NOARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {{"device_type", kArgument<&deviceTypeOf>, nullptr, nullptr, nullptr},
                                     {"dtype", kArgument<&dtypeOf>, nullptr, nullptr, nullptr},
                                     {"enabled", kArgument<&Region::is_enabled>, nullptr, nullptr, nullptr},
                                     {"cache_enabled", kArgument<&Region::is_caching>, nullptr, nullptr, nullptr},
                                     {"self_cleaning", kArgument<&Region::is_self_cleaning>, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  addBlockType<Region>(module, "AutocastRegion", "torchext._C.AutocastRegion", &newRegion,
                       static_cast<PyMethodDef*>(methods), static_cast<PyGetSetDef*>(properties));
}

// 0: ordinary, 1: wrapped, 2: to be cleaned (AmpMark).
int ampKind(const at::Tensor& tensor) {
  return static_cast<int>(ampMarkOf(*tensor.unsafeGetTensorImpl()));
}

void setAmpKind(const at::Tensor& tensor, int kind) {
  setAmpMark(*tensor.unsafeGetTensorImpl(), static_cast<AmpMark>(kind));
}

// Wraps all tensors, or none if one of them cannot be wrapped.
void wrapTensors(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    checkCanBeWrapped(tensor);
  }
  for (const at::Tensor& tensor : tensors) {
    makeAmp(tensor);
  }
}

void registerPolicyByNumber(const std::vector<std::pair<std::string, std::string>>& operators,
                            int policy,
                            const std::vector<at::Device>& devices) {
  registerPolicy(operators, static_cast<CastPolicy>(policy), devices);
}

int policyNumber(const std::string& name, const std::string& overload, at::Device device) {
  return static_cast<int>(policyOf({name, overload}, device.type()));
}

}  // namespace

void bindAmp(pybind11::module_& module) {
  addRegionType(module);
  bind(module, "autocast_device_type_in_use", [] { return nameOf(deviceTypeInUse()); });
  bind(module, "is_in_enabled_region", isInEnabledRegion);
  bind(module, "is_amp", [](const at::Tensor& tensor) { return isAmp(tensor); });
  bind(module, "amp_kind", ampKind);
  bind(module, "set_amp_kind", setAmpKind);
  bind(module, "wrap_amp", wrapTensors);
  bind(module, "make_amp_like", [](const at::Tensor& tensor, const at::Tensor& like) { makeAmpLike(tensor, like); });
  bind(module, "unwrap_amp", [](const at::Tensor& tensor) { makeOrdinary(tensor); });
  bind(module, "register_policy", registerPolicyByNumber);
  bind(module, "policy", policyNumber);
  bind(module, "is_region_deciding", isRegionDeciding);
  module.def("enter_compiled_code", [] { OpenGuards<CompiledCodeGuard>::enter(kAnyOwner); });
  // Nothing is open if the code was entered before the function that enters it was replaced.
  module.def("leave_compiled_code", [] { return OpenGuards<CompiledCodeGuard>::leaveIfOpen(kAnyOwner); });
  module.def("call_in_backward", &callInside<BackwardGuard, bool>);
  bind(module, "is_in_self_cleaning_region", isInSelfCleaningRegion);
  module.def("call_recomputing", &callInside<RecomputationGuard, bool>);
}

}  // namespace torchext::python
