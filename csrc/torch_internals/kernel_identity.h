#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// What the dispatcher knows of `op`, its dispatch table above all.
const c10::impl::OperatorEntry& operatorEntry(const c10::OperatorHandle& op);

// The kernel that `op` has for the `Meta` key now. Libraries that are loaded or unloaded change it. There must be one.
const c10::KernelFunction& metaKernelOf(const c10::OperatorHandle& op);

// Tells kernels apart: while a copy of a kernel lives, no other kernel has the same identity.
using KernelIdentity = std::array<std::uint64_t, 4>;
KernelIdentity identityOf(const c10::KernelFunction& kernel);

}  // namespace torchext
