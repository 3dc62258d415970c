#pragma once

namespace torchext {

// Call when a block of fakes is entered: shares the kernels that another owner of the `Fake` key has registered for
// single operators since the last call. Does nothing without another owner.
void shareFakeKernels();

}  // namespace torchext
