#pragma once

// Meta kernels do not know the device that the fake claims, although some kernels' results depend on it. There are two
// ways to tell them.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// While it lives, `deviceOfMetaCall()` is `device` on this thread. PyTorch's Python Meta kernels ask `device_hint()`
// for it (torch/_meta_registrations.py), which torchext/fake/meta_functions.py answers.
class MetaCallOnDevice {
 public:
  explicit MetaCallOnDevice(c10::Device device);
  MetaCallOnDevice(const MetaCallOnDevice&) = delete;
  MetaCallOnDevice& operator=(const MetaCallOnDevice&) = delete;
  MetaCallOnDevice(MetaCallOnDevice&&) = delete;
  MetaCallOnDevice& operator=(MetaCallOnDevice&&) = delete;
  ~MetaCallOnDevice();

 private:
  std::optional<c10::Device> previous_;
};

std::optional<c10::Device> deviceOfMetaCall();

// Some Meta kernels look at the device of their argument, which is "meta", and so decide as for CUDA (those of the
// normalizations, about the statistics that they save), or do not follow the device in the layout of their results
// (those of convolutions). True when the results of `op` on `device` have to be corrected.
bool decidesByDevice(const c10::OperatorHandle& op, c10::Device device);

// Corrects the `results` that such an operator has on the meta device for `arguments`, which are on `device`.
void correctForDevice(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      torch::jit::Stack& results);

}  // namespace torchext
