#include "streams.h"

#include <array>
#include <atomic>

#include <c10/util/Exception.h>

#include "../../libraries/support/sizes.h"

namespace torchext {

namespace {

constexpr std::size_t kMaxDevices = 64;

// The size of a stream pool in PyTorch (`kStreamsPerPool`, CUDAStream.cpp).
constexpr unsigned kStreams = 32;

thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};

std::atomic<std::int64_t>* counterOf(c10::DeviceIndex device, c10::StreamId stream) noexcept {
  static std::array<std::atomic<std::int64_t>, kMaxDevices*(kStreams + 1)> counters{};
  if (device < 0 || stream < 0 || toSize(device) >= kMaxDevices || toSize(stream) > kStreams) {
    return nullptr;
  }
  return &counters.at(toSize(device) * (kStreams + 1) + toSize(stream));
}

}  // namespace

c10::StreamId currentFakeStream(c10::DeviceIndex device) noexcept {
  return device >= 0 && toSize(device) < kMaxDevices ? current_streams[toSize(device)] : 0;
}

void setCurrentFakeStream(c10::DeviceIndex device, c10::StreamId stream) {
  TORCH_CHECK(device >= 0 && toSize(device) < kMaxDevices,
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
