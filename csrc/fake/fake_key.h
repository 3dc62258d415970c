#pragma once

#include "storage/fake_keys.h"

namespace torchext {

// How the keys that fakes carry are taken: `takeFakeKeys()` calls these.
FakeKeyHooks fakeKeyHooks() noexcept;

// To be called when the outermost block of fakes is entered on a thread: shares the kernels that another owner of the
// `Fake` key has registered for single operators since. Does nothing when there is no other owner.
void shareFakeKernels();

}  // namespace torchext
