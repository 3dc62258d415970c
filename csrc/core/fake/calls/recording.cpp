#include "recording.h"

#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchext {

namespace {

thread_local int depth = 0;
thread_local bool can_run_for_real = false;
thread_local int implementations = 0;
thread_local int sparse_kernels = 0;

}  // namespace

RecordingGuard::RecordingGuard(bool can_run) noexcept : could_run_for_real_before_{can_run_for_real} {
  ++depth;
  can_run_for_real = can_run;
}

RecordingGuard::~RecordingGuard() {
  can_run_for_real = could_run_for_real_before_;
  --depth;
}

bool isRecording() noexcept {
  return depth > 0;
}

bool canRunForReal() noexcept {
  return can_run_for_real;
}

ImplementationGuard::ImplementationGuard() noexcept
    : recordings_{std::exchange(depth, 0)}, could_run_for_real_before_{std::exchange(can_run_for_real, false)} {
  ++implementations;
}

ImplementationGuard::~ImplementationGuard() {
  --implementations;
  depth = recordings_;
  can_run_for_real = could_run_for_real_before_;
}

bool isInFakeImplementation() noexcept {
  return implementations > 0;
}

SparseKernelGuard::SparseKernelGuard() noexcept {
  ++sparse_kernels;
}

SparseKernelGuard::~SparseKernelGuard() {
  --sparse_kernels;
}

bool isInSparseKernel() noexcept {
  return sparse_kernels > 0;
}

bool isInKernelOfFakeTensorMode() noexcept {
  return c10::impl::tls_local_dispatch_key_set().included_.has_backend(c10::BackendComponent::MetaBit);
}

}  // namespace torchext
