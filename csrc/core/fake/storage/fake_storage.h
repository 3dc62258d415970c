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

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <torchext/macros.h>

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

bool isFakeStorage(const c10::Storage& storage) noexcept;

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

}  // namespace torchext
