#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchext {

// Identifies a kernel: while a copy of it lives, no other kernel has the same identity.
using KernelIdentity = std::array<std::uint64_t, 4>;
KernelIdentity identityOf(const c10::KernelFunction& kernel);

// Returns true if identities distinguish kernels in the running PyTorch.
bool testKernelIdentity(bool is_broken);

}  // namespace torchext
