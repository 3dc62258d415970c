#include "kernel_call.h"

namespace torchext {

void KernelCall::add(KernelStep step) {
  (has_results_ ? memory_.after_results : memory_.before_results).push_back(step);
}

void KernelCall::allocateResults() {
  has_results_ = true;
}

void KernelCall::allocateResult(std::size_t i) {
  add({KernelStep::Kind::kResult, 0, static_cast<std::int32_t>(i)});
}

void KernelCall::allocateResults(std::initializer_list<std::size_t> in_order) {
  for (const std::size_t i : in_order) {
    allocateResult(i);
  }
}

KernelCall::BlockNumber KernelCall::allocate(std::int64_t bytes) {
  const BlockNumber block = next_++;
  if (bytes > 0) {
    add({KernelStep::Kind::kAllocate, bytes, block});
  }
  return bytes > 0 ? block : -1;
}

void KernelCall::free(BlockNumber block) {
  if (block >= 0) {
    add({KernelStep::Kind::kFree, 0, block});
  }
}

void KernelCall::free(std::initializer_list<BlockNumber> blocks) {
  for (const BlockNumber block : blocks) {
    free(block);
  }
}

void KernelCall::allocateAndFree(std::int64_t bytes) {
  free(allocate(bytes));
}

void KernelCall::keepWorkspace(std::int32_t workspace, std::int64_t bytes) {
  if (bytes > 0) {
    add({KernelStep::Kind::kWorkspace, bytes, workspace});
  }
}

}  // namespace torchext
