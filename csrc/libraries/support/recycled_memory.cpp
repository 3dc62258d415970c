#include "recycled_memory.h"

#include <algorithm>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ScopeExit.h>
#include <malloc.h>

#include "fresh_pages.h"
#include "locks.h"
#include "sizes.h"

namespace torchext {

namespace {

thread_local RecycledMemory* current_memory = nullptr;

// Returns true if a block of `size` bytes fits `nbytes` bytes with at most 25 % waste.
bool fits(std::size_t size, std::size_t nbytes) {
  return size >= nbytes && size - nbytes <= nbytes / 4;
}

}  // namespace

struct RecycledMemory::Block {
  c10::DataPtr data;
  std::size_t size = 0;
};

// The context of a storage on a block. The block returns to its owner when the storage is freed.
struct RecycledMemory::InUse {
  std::shared_ptr<RecycledMemory> owner;
  Block block;
};

void RecycledMemory::giveBack(void* in_use) {
  const std::unique_ptr<InUse> used{static_cast<InUse*>(in_use)};
  const Locked lock{LockRank::kRecycled};
  used->owner->free_.push_back(std::move(used->block));
}

RecycledMemory::RecycledMemory(std::size_t slack) : slack_{slack} {}

RecycledMemory::~RecycledMemory() = default;

std::shared_ptr<RecycledMemory> RecycledMemory::make(std::size_t slack) {
  return std::shared_ptr<RecycledMemory>{new RecycledMemory{slack}};
}

c10::Storage RecycledMemory::makeStorage(std::size_t nbytes) {
  auto used = std::make_unique<InUse>();
  std::vector<Block> outdated;  // freed without the lock
  {
    const Locked lock{LockRank::kRecycled};
    const auto found =
        std::find_if(free_.begin(), free_.end(), [nbytes](const Block& block) { return fits(block.size, nbytes); });
    if (found != free_.end()) {
      used->block = std::move(*found);
      free_.erase(found);
    } else {
      outdated.swap(free_);  // these sizes are no longer needed
    }
  }
  outdated.clear();
  if (used->block.size == 0) {
    used->block = {c10::GetCPUAllocator()->allocate(nbytes), nbytes};
    preferHugePagesWithin(used->block.data.get(), nbytes);
  }
  used->owner = shared_from_this();
  void* memory = used->block.data.get();
  c10::DataPtr data{memory, used.get(), &giveBack, c10::kCPU};
  used.release();  // NOLINT(bugprone-unused-return-value): now owned by `data`
  return c10::Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, nbytes,
                                                            std::move(data), /*allocator=*/nullptr,
                                                            /*resizable=*/false)};
}

void RecycledMemory::serve(c10::function_ref<void()> compute) {
  const auto restore =
      c10::make_scope_exit([before = std::exchange(current_memory, this)] { current_memory = before; });
  compute();
}

c10::Storage makeLargeStorage(std::size_t nbytes) {
  if (current_memory != nullptr) {
    return current_memory->makeStorage(nbytes);
  }
  const at::Tensor bytes = at::empty({toSigned(nbytes)}, at::TensorOptions().dtype(c10::kByte).device(c10::kCPU));
  preferHugePages(bytes.mutable_data_ptr(), nbytes);
  return bytes.storage();
}

void RecycledMemory::trim() const noexcept {
#if defined(__GLIBC__)
#if __GLIBC_PREREQ(2, 33)
  if (mallinfo2().fordblks <= slack_) {
    return;
  }
#endif
  malloc_trim(0);
#endif
}

}  // namespace torchext
