#pragma once

// The list of the tensors on a fake storage, kept for NOTE [Materializing in place]. Internal to FakeTensorImpl.

#include <c10/core/Storage.h>

namespace torchext {

class FakeTensorImpl;

// Adds `impl` to the list of `storage` and gives it the storage's keys. Does nothing for a real storage.
void addResident(const c10::Storage& storage, FakeTensorImpl& impl);

// Removes `impl` from its list, if any.
void removeResident(FakeTensorImpl& impl) noexcept;

}  // namespace torchext
