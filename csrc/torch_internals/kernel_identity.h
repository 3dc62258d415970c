#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/boxing/KernelFunction.h>

namespace torchext {

// Tells kernels apart: while a copy of a kernel lives, no other kernel has the same identity.
using KernelIdentity = std::array<std::uint64_t, 4>;
KernelIdentity identityOf(const c10::KernelFunction& kernel);

// Returns true if identities tell kernels apart in the PyTorch that runs.
bool testKernelIdentity(bool is_broken);

}  // namespace torchext
