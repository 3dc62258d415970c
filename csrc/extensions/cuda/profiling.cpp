#include "profiling.h"

#include <cstdint>
#include <functional>

#include <c10/core/Device.h>
#include <torch/csrc/profiler/stubs/base.h>

namespace torchext {

namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

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
