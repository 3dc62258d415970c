#pragma once

// NOTE [Counting memory by storage]
//
// The memory that a program needs on a device depends on when each storage is allocated and freed, in what order, and
// on which stream. A fake storage has no memory, but it is made and freed when the real one would be, so this is
// counted here. (A TorchDispatchMode could not count it: under a mode, autograd accumulates gradients out of place, and
// Python determines the lifetime of tensors.) The counter is a hook.
//
// A storage is counted when the call that made it has its results, in the order in which the kernel of the device
// allocates them, between the kernel's temporary buffers: see `MemoryCounter::runKernel()`. Storages that
// `deferred_init` records are not counted: they have no memory until they are materialized.

#include <cstddef>
#include <cstdint>

#include <c10/core/Storage.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"

namespace torchext {

// While an instance exists on a thread, allocations of real kernels there are not the program's: the kernels run for
// the metadata of fakes, or for known values. Nests.
class OwnComputation {
 public:
  OwnComputation() noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(OwnComputation);
  ~OwnComputation();
};

bool isOwnComputation() noexcept;

// Returns the counter, or null.
inline MemoryCounter* memoryCounter() noexcept {
  return hooks().memory;
}

// Returns true if this thread has made storages that must be counted since the last call.
bool takeUncounted() noexcept;

// Counts `storage`, unless it must not be counted or already has been.
void countStorage(const c10::Storage& storage);

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
