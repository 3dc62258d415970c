#pragma once

// NOTE [Fake storages]
//
// A fake tensor is an ordinary strided tensor, with sizes, strides, dtype and device in the plain fields of TensorImpl,
// on a storage that has no memory. The bytes of a tensor belong to its storage, which views, `detach()`, `.data`, the
// tensors that autograd saves, and the Python storage object all share. So all information about the bytes is kept
// once, with the storage:
//
//   * its size and device, in the StorageImpl itself, so that `nbytes()` and `untyped_storage()` work;
//   * the origin of the bytes, as a `Provenance`: a recorded value, whose tensors carry the key of deferred_init, or
//     known values;
//   * its counted memory, if any: NOTE [Counting memory by storage];
//   * the fake tensors on the storage, so that all of them become real together: NOTE [Materializing in place].
//
// This record is the context of the storage's DataPtr, whose pointer is null. Reading or writing the data raises an
// error through StorageImpl's own check.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <torchext/macros.h>

#include "../../hooks/hooks.h"

namespace torchext {

class FakeTensorImpl;

// The origin of the bytes of a fake storage, in the representation of the code that recorded it.
class Provenance {
 public:
  Provenance() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Provenance);
  virtual ~Provenance() = default;
};

// Makes a storage of `nbytes` bytes on `device` that has no memory. Memory of other devices than the CPU is never
// pinned.
c10::Storage makeFakeStorage(std::size_t nbytes, c10::Device device, bool is_pinned = false);

// Returns true if `storage` has no memory because its tensors are fake.
TORCHEXT_API bool isFakeStorage(const c10::Storage& storage) noexcept;

// Returns true if both have the same StorageImpl. `Storage::is_alias_of()` compares data pointers, which a fake storage
// refuses to return.
inline bool isSameStorage(const c10::Storage& a, const c10::Storage& b) noexcept {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// Returns the provenance that was set last, or null. Always null for a real storage.
std::shared_ptr<Provenance> provenanceOf(const c10::Storage& storage);

// Returns false only if the storage of `fake` has no provenance. Takes no lock.
bool mayHaveProvenance(const at::TensorBase& fake) noexcept;

// Stores the origin of the bytes, and gives `keys` to every tensor on `storage`, now and later. Does nothing to a real
// storage.
void setProvenance(const c10::Storage& storage, std::shared_ptr<Provenance> provenance, c10::DispatchKeySet keys);

// Like `setProvenance()`, but without keys, and only if the provenance is `expected`, which must not have keys either.
// Returns the provenance afterwards.
std::shared_ptr<Provenance> replaceProvenance(const c10::Storage& storage,
                                              const Provenance& expected,
                                              std::shared_ptr<Provenance> provenance);

// Returns true for the error that a fake storage raises when its data are accessed.
bool isNoDataError(const c10::Error& error);

// Returns the fake tensors on `storage`, in no particular order. Empty for a real storage.
std::vector<at::Tensor> residentsOf(const c10::Storage& storage);

// NOTE [Materializing in place]
//
// `becomeReal()` moves the memory of `real` into `fake`, and removes the keys of fakes and those of the
// provenance from every tensor on it. Nothing else changes: the StorageImpl, the TensorImpls, their Python objects and
// everything attached to them (autograd metadata, version counters, hooks, weak references, optimizer state) remain the
// same objects. The tensors are then ordinary dense ones. `real` must be on the same device, and have no other
// reference; it is left empty. Does nothing if another thread has made `fake` real in the meantime.
void becomeReal(const c10::Storage& fake, const c10::Storage& real);

// Reverses `becomeReal()`: frees the memory of `real`, and makes it a fake storage of `nbytes` bytes. `tensors`, which
// were fake when it became real and are still on it, become fake again. Other tensors on it stay as before, but lose
// their data.
void becomeFakeAgain(const c10::Storage& real, std::size_t nbytes, at::ArrayRef<at::Tensor> tensors);

// Removes the keys from a tensor that has kept them although its storage has become real: a real tensor that was given
// fake `.data`, so it is not a FakeTensorImpl, and not on the storage's list. Does nothing to others.
void dropStaleKeys(const at::TensorBase& tensor);

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
