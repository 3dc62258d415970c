#include "fake_cuda.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchext {

namespace {

// Stands in for the CUDA device on a build without CUDA: there is nothing to synchronize and no stream to switch.
class NoCudaGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Device getDevice() const override {
    return {c10::kCUDA, current_};
  }

  void setDevice(c10::Device device) const override {
    current_ = device.index();
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_ = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream{c10::Stream::DEFAULT, device};
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  void record(void** /*event*/,
              const c10::Stream& /*stream*/,
              c10::DeviceIndex /*device_index*/,
              c10::EventFlag /*flag*/) const override {}

  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}

  bool queryEvent(void* /*event*/) const override {
    return true;
  }

 private:
  static thread_local c10::DeviceIndex current_;
};

thread_local c10::DeviceIndex NoCudaGuard::current_ = 0;

}  // namespace

bool ensureCudaGuard() {
  // Asked once, before our own guard can be the answer.
  static const bool has_devices =
      c10::impl::hasDeviceGuardImpl(c10::kCUDA) && c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0;
  if (!has_devices) {
    // Leaked: once registered it stays, because any thread may hold a pointer to it.
    static const auto* guard = new NoCudaGuard;
    static const c10::impl::DeviceGuardImplRegistrar registrar{c10::kCUDA, guard};
  }
  return has_devices;
}

}  // namespace torchext
