#pragma once

#include "storage/fake_keys.h"

namespace torchext {

// Returns the functions with which `takeFakeKeys()` takes the keys that fakes carry.
FakeKeyHooks fakeKeyHooks() noexcept;

// Call when a block of fakes is entered: shares the kernels that another owner of the `Fake` key has registered for
// single operators since the last call. Does nothing without another owner.
void shareFakeKernels();

}  // namespace torchext
