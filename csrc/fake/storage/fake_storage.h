#pragma once

// NOTE [The storage is what is fake]
//
// A fake tensor is an ordinary strided tensor, with sizes, strides, dtype and device in the plain fields of TensorImpl,
// on a storage that has no memory. The bytes that a tensor would show belong to its storage, which views, `detach()`,
// `.data`, the tensors that autograd saves, and the Python storage object all share. So everything that is known about
// the bytes is kept once, with the storage:
//
//   * its size and device, in the StorageImpl itself, so that `nbytes()` and `untyped_storage()` work;
//   * how the bytes come about, as a `Provenance`, if that has been recorded, as deferred_init does;
//   * the fake tensors that live on it, so that all of them become real together: NOTE [Becoming real].
//
// This record is the context of the storage's DataPtr, whose pointer is null. Reading or writing the data raises an
// error that says so, through StorageImpl's own check.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <torchext/macros.h>

namespace torchext {

class FakeTensorImpl;

// How the bytes of a fake storage come about, as the code that recorded it knows it.
class Provenance {
 public:
  Provenance() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Provenance);
  virtual ~Provenance() = default;
};

// Makes a storage of `nbytes` bytes on `device` that has no memory.
c10::Storage makeFakeStorage(std::size_t nbytes, c10::Device device);

bool isFakeStorage(const c10::Storage& storage) noexcept;

// Returns true if the two are one StorageImpl. `Storage::is_alias_of()` compares data pointers, which a fake storage
// refuses to show.
inline bool isSameStorage(const c10::Storage& a, const c10::Storage& b) noexcept {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// Returns what `setProvenance()` last set, or null. Always null for a real storage.
std::shared_ptr<Provenance> provenanceOf(const c10::Storage& storage);

// Returns true if that is not null.
bool hasProvenance(const c10::Storage& storage) noexcept;

// Remembers how the bytes come about, and gives `keys` to every tensor on `storage`, now and later. Does nothing to a
// real storage.
void setProvenance(const c10::Storage& storage, std::shared_ptr<Provenance> provenance, c10::DispatchKeySet keys);

// The same without keys, but only if it is `expected`, which has none either. Returns what is there afterwards.
std::shared_ptr<Provenance> replaceProvenance(const c10::Storage& storage,
                                              const Provenance& expected,
                                              std::shared_ptr<Provenance> provenance);

// Returns true for the error that a fake storage raises when its data are accessed.
bool isNoDataError(const c10::Error& error);

// Returns the fake tensors on `storage`, in no particular order. Empty for a real storage.
std::vector<at::Tensor> residentsOf(const c10::Storage& storage);

// NOTE [Becoming real]
//
// Moves the memory of `real` into `fake`, and takes the `Fake` key and the provenance's keys from every tensor on it.
// Nothing else has to change: the StorageImpl, the TensorImpls, their Python objects and everything attached to them
// (autograd metadata, version counters, hooks, weak references, optimizer state) stay the objects that they are. From
// then on the tensors are ordinary dense ones. `real` must be on the same device, and have no other reference; it is
// left empty. Does nothing if `fake` has become real on another thread meanwhile.
void becomeReal(const c10::Storage& fake, const c10::Storage& real);

// The way back: frees the memory of `real`, and makes it a fake storage of `nbytes` bytes. `tensors`, which were fake
// when it became real, and which still show it, become fake again. Other tensors on it do not change, but lose their
// data.
void becomeFakeAgain(const c10::Storage& real, std::size_t nbytes, at::ArrayRef<at::Tensor> tensors);

// Takes the keys from a tensor that has kept them although its storage has become real: it is a real tensor that was
// given fake `.data`, so it is no FakeTensorImpl, and not on the storage's list. Does nothing to others.
void dropStaleKeys(const at::TensorBase& tensor);

}  // namespace torchext
