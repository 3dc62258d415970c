#pragma once

// NOTE [Counting memory by storage]
//
// The memory that a program needs on a device depends on when each storage is allocated and freed, in what order, and
// on which stream. A fake storage has no memory, but it is made and freed when the real one would be, so this is
// counted here. (A TorchDispatchMode could not count it: under a mode, autograd accumulates gradients out of place, and
// Python determines the lifetime of tensors.) The counter is a higher component that registers itself.
//
// A storage is counted when the call that made it has its results, in the order in which the kernel of the device
// allocates them, between the kernel's temporary buffers: see `MemoryCounter::runKernel()`. Storages that
// `deferred_init` records are not counted: they have no memory until they are materialized.

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

// The memory that the kernel of a call allocates in addition to its results. Only the counter interprets it.
class KernelScratch {
 public:
  KernelScratch() = default;
  C10_DISABLE_COPY_AND_ASSIGN(KernelScratch);
  virtual ~KernelScratch() = default;

  // Returns a text that distinguishes it from others.
  virtual std::string describe() const = 0;
};

class MemoryCounter {
 public:
  MemoryCounter() = default;
  C10_DISABLE_COPY_AND_ASSIGN(MemoryCounter);
  virtual ~MemoryCounter() = default;

  // Returns true if storages that are now made on `device` must be counted.
  virtual bool counts(c10::Device device) const noexcept = 0;

  // Allocates `nbytes`, which must not be 0, for a storage with its last label, or 0 if it has no label. Returns the
  // argument of `free()`. Throws c10::OutOfMemoryError.
  virtual void* allocate(std::size_t nbytes, c10::Device device, std::uint8_t label) = 0;
  virtual void free(void* allocation) noexcept = 0;

  // Returns the allocation's address, or 0 on devices whose addresses are not simulated.
  virtual std::uintptr_t addressOf(const void* allocation) const noexcept = 0;

  // Records that the allocation is also used on `stream`.
  virtual void recordStream(const c10::Storage& storage, c10::StreamId stream) = 0;

  // Returns the memory that the kernel for a call with these results allocates in addition, or null if there is no such
  // memory.
  virtual std::shared_ptr<const KernelScratch> scratchOf(const c10::OperatorHandle& op,
                                                         c10::ArrayRef<c10::IValue> arguments,
                                                         c10::ArrayRef<c10::IValue> results) = 0;

  // Returns true if `observe()` looks at the arguments of calls of `op`.
  virtual bool observes(const c10::OperatorHandle& op) const = 0;

  // Derives the purpose of storages from the tensors that a call reads and writes: NOTE [Categories of memory]. Cheap
  // while no tracker is open.
  virtual void observe(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::ArrayRef<c10::IValue> results) = 0;

  // Simulates the allocations of the kernel of `op`: allocates its temporary buffers and `results` in the kernel's
  // order, and frees the temporary buffers. `scratch` may be null.
  virtual void runKernel(const c10::OperatorHandle& op,
                         const KernelScratch* scratch,
                         c10::ArrayRef<c10::IValue> results) = 0;
};

// The device for counting pinned host memory, which has a separate allocator.
inline const c10::Device kPinnedMemory{c10::kCPU, 0};

// While an instance exists on a thread, allocations of real kernels there are not the program's: the kernels run for
// the metadata of fakes, or for known values. Nests.
class OwnComputation {
 public:
  OwnComputation() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(OwnComputation);
  ~OwnComputation();
};

bool isOwnComputation() noexcept;

// Call once, before there are fakes.
void setMemoryCounter(MemoryCounter& counter) noexcept;

// Returns the counter, or null.
MemoryCounter* memoryCounter() noexcept;

// Returns true if this thread has made storages that must be counted since the last call.
bool takeUncounted() noexcept;

// Counts `storage`, unless it must not be counted or already has been.
void countStorage(const c10::Storage& storage);

// Marks the memory of `storage`, which must be fake and on the CPU, as pinned. Call before it is counted.
void pinStorage(const c10::Storage& storage) noexcept;

bool isPinnedStorage(const c10::Storage& storage) noexcept;

// Excludes `storage` from counting.
void dismissStorage(const c10::Storage& storage) noexcept;

// Counts `storage` as if it had just been allocated, if the counter counts its device and has not counted it yet.
TORCHEXT_API void countExistingStorage(const c10::Storage& storage);

// Resizes the fake storage `storage`. Its counted memory is freed after the new size has been allocated, as
// `resize_bytes_cuda()` does.
void resizeFakeStorage(const c10::Storage& storage, std::size_t nbytes);

// Sets the label of `storage` for the counter. The label stays when the storage is resized.
TORCHEXT_API void labelStorage(const c10::Storage& storage, std::uint8_t label) noexcept;

// Returns an address for `storage` that cannot be read from: the counter's allocation or, on devices whose addresses
// are not simulated, addresses that no other storage ever has. It is stable while the storage lives and is not resized.
// Returns 0 for a storage that is real or has no bytes.
TORCHEXT_API std::uintptr_t addressOfFakeStorage(const c10::Storage& storage) noexcept;

// Returns the counter's allocation for `storage`, or null. Another thread may free it, unless the caller holds the lock
// under which the counter does.
void* allocationOf(const c10::Storage& storage) noexcept;

}  // namespace torchext
