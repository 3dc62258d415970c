#include "kernel_identity.h"

#include <cstring>

namespace torchext {

using c10::KernelFunction;
using c10::OperatorHandle;

namespace {

// OperatorHandle gives its kernels away only as a SafeKernelFunction, which copies, allocates and prints a description
// each time. An explicit instantiation may name a private member ([temp.spec]), which leads to the dispatch table.
template <auto Member>
struct PrivateEntry {
  friend const c10::impl::OperatorEntry& entryOf(const OperatorHandle& op) {
    return (op.*Member)->op;
  }
};
template struct PrivateEntry<&OperatorHandle::operatorDef_>;
const c10::impl::OperatorEntry& entryOf(const OperatorHandle& op);

}  // namespace

const c10::impl::OperatorEntry& operatorEntry(const OperatorHandle& op) {
  return entryOf(op);
}

const KernelFunction& metaKernelOf(const OperatorHandle& op) {
  return entryOf(op).lookup(c10::DispatchKeySet{c10::DispatchKey::Meta});
}

// KernelFunction compares itself by its function pointers alone, which all kernels written in Python share. Its first
// words are the pointer to the functor, which it owns, and three function pointers.
KernelIdentity identityOf(const KernelFunction& kernel) {
  KernelIdentity identity{};
  static_assert(sizeof(kernel) >= sizeof(identity));
  std::memcpy(identity.data(), static_cast<const void*>(&kernel), sizeof(identity));
  return identity;
}

}  // namespace torchext
