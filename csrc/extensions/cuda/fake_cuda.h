#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torchext/fake_cuda.h>
#include <torchext/macros.h>

namespace torchext {

constexpr std::size_t kMaxFakeCudaDevices = 64;  // per process

// Describes a fake CUDA device. The defaults are those of `fake_mode(gpu=True)`: the latest generation that all
// supported PyTorch releases have kernels for.
struct GpuDescription {
  std::string name = "torchext fake CUDA device";
  std::int64_t total_memory = std::int64_t{80} << 30;  // in bytes, as the driver reports it
  // Whether the memory can run out. Unless the user describes the devices, a model of any size fits.
  bool is_limited = false;
  std::int64_t context_memory = 0;  // in bytes; unavailable to the process
  int major = 9;
  int minor = 0;
  int multiprocessors = 132;
  int max_threads_per_multiprocessor = 2048;
  std::int64_t shared_memory_per_block_optin = 232448;  // in bytes
  std::int64_t l2_cache = std::int64_t{50} << 20;       // in bytes

  // All members, in their order.
  auto fields() const noexcept {
    return std::tie(name, total_memory, is_limited, context_memory, major, minor, multiprocessors,
                    max_threads_per_multiprocessor, shared_memory_per_block_optin, l2_cache);
  }

  bool isAtLeast(int wanted_major, int wanted_minor) const noexcept {
    return major > wanted_major || (major == wanted_major && minor >= wanted_minor);
  }
};

// NOTE [Fake CUDA]
//
// On a machine without CUDA devices, fake tensors may claim one. Few parts of PyTorch check whether the device exists.
// They are answered as follows:
//
//   * A device guard that does nothing is registered for CUDA, for the rest of the process: fakes outlive the block
//     that made them, and any thread may hold a pointer to the guard.
//   * Kernels of `empty` that make fakes are registered in the same way, for operators that allocate while they run.
//   * The number of devices belongs to the thread and is 0 outside of a block, so other threads have no devices.
//   * The autograd engine queries which accelerator has been built in, and which devices have a context. A build
//     without CUDA, or one that finds no driver, would raise an error. So these functions of the CUDA hooks are
//     replaced while devices are visible on the thread.
//   * The engine counts devices once, at the first backward pass of the process, to start a thread for each. Fakes need
//     no such threads: their backward pass runs on the calling thread.
//   * The hooks also provide CUDA random generators: philox.h. Streams are numbers.
//   * The functions of torch.cuda are written in Python and replaced in torchext/fake/cuda/functions.py.
//
// On a machine with CUDA devices none of this happens.

// Returns the number of fake CUDA devices on this thread.
TORCHEXT_API c10::DeviceIndex fakeCudaDeviceCount() noexcept;

// Returns the largest number of fake CUDA devices that any thread has had.
TORCHEXT_API c10::DeviceIndex largestFakeCudaDeviceCount() noexcept;

// Returns the description of this thread's devices; outside of blocks, the last one set by any thread. Equal
// descriptions are the same object, which lives as long as the process.
TORCHEXT_API const GpuDescription& fakeGpu();

// Sets the description of the devices for the rest of this thread's current block.
TORCHEXT_API void describeFakeGpu(GpuDescription gpu);

// Returns a number that changes when a thread gets devices while no other thread has any.
std::uint64_t fakeCudaGeneration() noexcept;

// Returns true if the devices of this generation have been used, as `torch.cuda.is_initialized()`.
TORCHEXT_API bool isFakeCudaInitialized() noexcept;
TORCHEXT_API void setFakeCudaInitialized() noexcept;

// Exists during a backward pass through fakes: gives this thread the largest number of devices of any block, with the
// last description, and makes it run the whole pass.
class TORCHEXT_API FakeCudaBackwardGuard {
 public:
  FakeCudaBackwardGuard();
  C10_DISABLE_COPY_AND_ASSIGN(FakeCudaBackwardGuard);
  ~FakeCudaBackwardGuard();

 private:
  const GpuDescription& gpu_;
  FakeCudaGuard devices_;
  int exceptions_;
  bool multithreading_;
};

// Answers the hook `FakeDevices`, and adds what calls on CUDA need. Call while the library is loaded.
void registerFakeCuda();

// Makes attention on fake CUDA devices choose a backend as on real ones: NOTE [Attention on fake CUDA].
void chooseAttentionOnFakeCuda();

// The streams of fake CUDA devices are numbers: nothing runs on them, but memory is allocated for them. Only Python and
// the memory counter use the current stream. The autograd engine always gets the default stream.

// Returns the current stream of `device` on this thread.
TORCHEXT_API c10::StreamId currentFakeStream(c10::DeviceIndex device) noexcept;

// Makes `stream` the current stream of `device` on this thread.
TORCHEXT_API void setCurrentFakeStream(c10::DeviceIndex device, c10::StreamId stream);

// Returns the next stream of the pool. As on real devices, the pool is limited and streams are reused in turn.
TORCHEXT_API c10::StreamId newFakeStream() noexcept;

// Counts an operator that this thread has issued on the current stream of `device`.
TORCHEXT_API void countWork(c10::DeviceIndex device) noexcept;

// Returns the number of operators issued on `stream` of `device`.
TORCHEXT_API std::int64_t workOn(c10::DeviceIndex device, c10::StreamId stream) noexcept;

}  // namespace torchext
