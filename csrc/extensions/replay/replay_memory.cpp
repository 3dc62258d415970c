#include "replay_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "../../core/hooks/hooks.h"
#include "../../libraries/support/fresh_pages.h"
#include "../../libraries/support/recycled_memory.h"
#include "../../libraries/support/sizes.h"

namespace torchext {

namespace {

c10::Storage makeMemory(std::size_t nbytes) {
  if (RecycledMemory* recycled = RecycledMemory::current()) {
    return recycled->makeStorage(nbytes);
  }
  const at::Tensor bytes = at::empty({toSigned(nbytes)}, at::TensorOptions().dtype(c10::kByte).device(c10::kCPU));
  preferHugePages(bytes.mutable_data_ptr(), nbytes);
  return bytes.storage();
}

}  // namespace

void registerReplayMemory() {
  hooks().make_memory = &makeMemory;
}

}  // namespace torchext
