#pragma once

// NOTE [The storage is what is fake]
//
// A fake tensor is an ordinary strided tensor, with sizes, strides, dtype and device in the plain fields of TensorImpl,
// on a storage that has no memory. Which bytes a tensor would show is a property of its storage: views, `detach()`,
// `.data`, the tensors that autograd saves, and the Python storage object all share it. So whatever is known about the
// bytes is kept once, with the storage:
//
//   * its size and device, in the StorageImpl itself, so that `nbytes()` and `untyped_storage()` work;
//   * how the bytes come about, as a `Provenance`, when somebody recorded it (deferred_init does);
//   * the fake tensors that live on it, so that all of them become real together: NOTE [Becoming real].
//
// The record hangs on the storage's DataPtr, whose pointer is null and whose context is ours. Reading or writing the
// data raises an error that says so, through StorageImpl's own check.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include "../../support/macros.h"

namespace torchext {

class FakeTensorImpl;

// How the bytes of a fake storage come about, for whoever recorded it.
class Provenance {
 public:
  Provenance() = default;
  Provenance(const Provenance&) = delete;
  Provenance& operator=(const Provenance&) = delete;
  Provenance(Provenance&&) = delete;
  Provenance& operator=(Provenance&&) = delete;
  virtual ~Provenance() = default;
};

// Makes a storage of `nbytes` bytes on `device` that has no memory.
c10::Storage makeFakeStorage(std::size_t nbytes, c10::Device device);

bool isFakeStorage(const c10::Storage& storage) noexcept;

// `Storage::is_alias_of()` looks at the data pointers, which a fake storage refuses to show.
inline bool isSameStorage(const c10::Storage& a, const c10::Storage& b) noexcept {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// What `setProvenance()` last set, or null. Null for a real storage.
std::shared_ptr<Provenance> provenanceOf(const c10::Storage& storage);

// Remembers how the bytes come about, and gives `keys` to every tensor on `storage`, now and later. Does nothing to a
// real storage.
void setProvenance(const c10::Storage& storage, std::shared_ptr<Provenance> provenance, c10::DispatchKeySet keys);

// True for the error that a fake storage raises when its data are asked for.
bool isNoDataError(const c10::Error& error);

// The fake tensors on `storage`, in no order. Empty for a real storage.
std::vector<at::Tensor> residentsOf(const c10::Storage& storage);

// NOTE [Becoming real]
//
// Moves the memory of `real` into `fake`, and takes the `Fake` key and the provenance's keys from every tensor on it.
// Nobody has to be told: the StorageImpl, the TensorImpls, their Python objects and all that hang on them (autograd
// metadata, version counters, hooks, weak references, optimizer state) stay the objects that they are; from then on
// they are ordinary dense tensors. `real` must be on the same device and referenced by nobody else; it is left empty.
// Does nothing when `fake` has become real on another thread meanwhile.
void becomeReal(const c10::Storage& fake, const c10::Storage& real);

// The way back: frees the memory of `real` and makes it a fake storage of `nbytes` bytes, with the fakes `tensors`.
// They were fake when it became real, and show it still. Others that show it stay what they are, and find no data.
void becomeFakeAgain(const c10::Storage& real, std::size_t nbytes, at::ArrayRef<at::Tensor> tensors);

// A tensor that has kept the keys although its storage has become real: one that is not a FakeTensorImpl and so is not
// on the storage's list, because a real tensor was given fake `.data`. Takes the keys away. Does nothing to others.
void dropStaleKeys(const at::TensorBase& tensor);

// Held while the process forks, so that the child does not find it locked by a thread that it does not have.
void lockStorages();
void unlockStorages();

}  // namespace torchext
