#pragma once

// Lists of tensors without references to them: those on a fake storage, for NOTE [Materializing in place], and those
// that have retained a recording. A tensor is on one list, and leaves it when it gets other data or is freed.

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace torchext {

class FakeTensorImpl;

// Adds `impl` to the list of `storage` and gives it the storage's keys. Does nothing for a real storage.
void addResident(const c10::Storage& storage, FakeTensorImpl& impl);

// Adds `impl`, which is on no list, to the list that begins with `first`.
void addToList(FakeTensorImpl*& first, FakeTensorImpl& impl);

// Returns the tensors on that list.
std::vector<at::Tensor> tensorsOn(FakeTensorImpl* const& first);

// Removes `impl` from its list, if any.
void removeResident(FakeTensorImpl& impl) noexcept;

}  // namespace torchext
