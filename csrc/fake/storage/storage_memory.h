#pragma once

// NOTE [Memory is counted where storages are born and die]
//
// How much memory a program needs on a device depends on when each storage is allocated and freed, in what order, on
// which stream. A fake storage has no memory, but it is born and dies when the real one would, so this is where that is
// counted. (A TorchDispatchMode could not: under one, autograd accumulates gradients out of place, and who holds a
// tensor for how long is Python's business.) The counter is a room above, and registers itself.
//
// A storage is counted when the call that made it has its results, in the order in which the kernel of the device
// allocates them, between what else that kernel allocates: see `MemoryCounter::runKernel()`. Not counted are storages
// that `deferred_init` records: they have no memory until they are materialized.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

// What the kernel of a call allocates besides its results. Its meaning is known to the counter.
class KernelScratch {
 public:
  KernelScratch() = default;
  C10_DISABLE_COPY_AND_ASSIGN(KernelScratch);
  virtual ~KernelScratch() = default;

  // Returns a text that tells it apart from others.
  virtual std::string describe() const = 0;
};

class MemoryCounter {
 public:
  MemoryCounter() = default;
  C10_DISABLE_COPY_AND_ASSIGN(MemoryCounter);
  virtual ~MemoryCounter() = default;

  // Returns true if storages that are made on `device` now are to be counted.
  virtual bool counts(c10::Device device) const noexcept = 0;

  // Allocates `nbytes`, which is not 0, for a storage with the label that it was last given, 0 if it has none. Returns
  // what `free()` takes. Throws c10::OutOfMemoryError.
  virtual void* allocate(std::size_t nbytes, c10::Device device, std::uint8_t label) = 0;
  virtual void free(void* allocation) noexcept = 0;

  // Returns where it was allocated, or 0 on devices whose addresses are not simulated.
  virtual std::uintptr_t addressOf(const void* allocation) const noexcept = 0;

  // What has been allocated is used on `stream`, too.
  virtual void recordStream(void* allocation, c10::StreamId stream) = 0;

  // Returns what the kernel for a call with these results allocates besides them, or null if that is nothing.
  virtual std::shared_ptr<const KernelScratch> scratchOf(const c10::OperatorHandle& op,
                                                         c10::ArrayRef<c10::IValue> arguments,
                                                         c10::ArrayRef<c10::IValue> results) = 0;

  // Derives the purpose of storages from what a call reads and writes: NOTE [What memory is for]. Cheap while no
  // tracker is open.
  virtual void observe(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::ArrayRef<c10::IValue> results) = 0;

  // Does as the kernel of `op` does: allocates what it needs, `results` in between, and frees what it needed.
  // `scratch` may be null.
  virtual void runKernel(const c10::OperatorHandle& op,
                         const KernelScratch* scratch,
                         c10::ArrayRef<c10::IValue> arguments,
                         c10::ArrayRef<c10::IValue> results) = 0;
};

// The device under which memory of the host is counted that is pinned: an allocator of its own has it.
inline const c10::Device kPinnedMemory{c10::kCPU, 0};

// While at least one lives on a thread, what real kernels allocate there is not the program's: they run for the
// metadata of fakes, or for known values. Nests.
class OwnComputation {
 public:
  OwnComputation() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(OwnComputation);
  ~OwnComputation();
};

bool isOwnComputation() noexcept;

// To be called once, before there are fakes.
void setMemoryCounter(MemoryCounter& counter) noexcept;

// Returns the counter, or null.
MemoryCounter* memoryCounter() noexcept;

// Returns true if this thread has made storages that are to be counted, and has not been asked since the last.
bool takeUncounted() noexcept;

// Counts `storage`, if it is to be counted and has not been.
void countStorage(const c10::Storage& storage);

// The memory of `storage`, which is fake and on the CPU, would be pinned. To be called before it is counted.
void pinStorage(const c10::Storage& storage) noexcept;

bool isPinnedStorage(const c10::Storage& storage) noexcept;

// `storage` is not to be counted.
void dismissStorage(const c10::Storage& storage) noexcept;

// Counts `storage` as if it had been allocated now, if the counter counts its device and it has not been counted.
TORCHEXT_API void countExistingStorage(const c10::Storage& storage);

// Gives `storage`, which is fake, another size: what was counted of it is freed after the new size has been allocated,
// as `resize_bytes_cuda()` does.
void resizeFakeStorage(const c10::Storage& storage, std::size_t nbytes);

// Labels `storage` for the counter. The label stays while the storage is resized.
TORCHEXT_API void labelStorage(const c10::Storage& storage, std::uint8_t label) noexcept;

// Returns an address for `storage`, which nothing can be read from: where the counter has allocated it or, on devices
// whose addresses are not simulated, addresses that no other storage ever has. It is stable while the storage lives and
// is not resized. Returns 0 for a storage that is real or has no bytes.
TORCHEXT_API std::uintptr_t addressOfFakeStorage(const c10::Storage& storage) noexcept;

// Calls `visit` with what the counter has allocated for `storage`, if there is something. It is not freed before
// `visit` returns, which must not use fakes: the lock `kStorages` is held.
TORCHEXT_API void visitAllocation(const c10::Storage& storage, c10::function_ref<void(void* allocation)> visit);

}  // namespace torchext
