#include "memory_counter.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/interpreter.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../cuda/philox.h"
#include "../support/allocation_limit.h"
#include "device_memory.h"
#include "timeline.h"

namespace torchext {

using c10::Device;

namespace {

// Whether the last counted call of this thread was part of a backward pass.
thread_local bool is_in_backward = false;

// The cause of allocations on this thread now.
thread_local AllocationCause current_cause;

std::atomic<KernelRules> kernel_rules{nullptr};

OperatorGroups& operatorsWithRules() {
  static auto* operators =
      new OperatorGroups{"allocate on CUDA besides their results: NOTE [Allocations of kernels]", Overloads::kNamed};
  return *operators;
}

struct Scratch final : KernelScratch {
  Scratch(KernelMemory of_kernel, Device on_device) : memory{std::move(of_kernel)}, device{on_device} {}

  std::string describe() const override {
    std::string text = device.str();
    for (const auto& steps : {memory.before_results, memory.after_results}) {
      text += " |";
      for (const KernelStep& step : steps) {
        text += c10::str(" ", static_cast<int>(step.kind), ":", step.bytes, ":", step.block);
      }
    }
    return text;
  }

  const KernelMemory memory;
  const Device device;
};

void countStoragesOf(ArrayRef<IValue> values) {
  forEachTensor(values, [](const at::Tensor& tensor) {
    if (tensor.has_storage()) {
      countStorage(tensor.storage());
    }
  });
}

// The blocks that a running kernel holds.
class KernelBlocks {
 public:
  explicit KernelBlocks(Device device) : device_{device} {}
  C10_DISABLE_COPY_AND_ASSIGN(KernelBlocks);
  ~KernelBlocks() {
    for (Allocation* block : blocks_) {
      free(block);
    }
  }

  // Counts a result when a step names it.
  void run(ArrayRef<KernelStep> steps, ArrayRef<IValue> results) {
    AllocationCause cause = current_cause;
    cause.is_of_kernel = true;
    for (const KernelStep& step : steps) {
      const auto number = toSize(step.block);
      const auto bytes = toSize(step.bytes);
      switch (step.kind) {
        case KernelStep::Kind::kAllocate:
          blocks_.resize(std::max(blocks_.size(), number + 1), nullptr);
          blocks_[number] = DeviceMemory::of(device_).allocate(bytes, cause);
          break;
        case KernelStep::Kind::kFree:
          free(std::exchange(blocks_[number], nullptr));
          break;
        case KernelStep::Kind::kWorkspace:
          // Each thread has its own cuBLAS handle, and on a GPU backward passes run on another thread.
          DeviceMemory::of(device_).keepWorkspace(
              {static_cast<WorkspaceNumber>(number), torch::autograd::get_current_node() != nullptr}, bytes, cause);
          break;
        case KernelStep::Kind::kResult:
          countStoragesOf(results[number]);
          break;
      }
    }
  }

 private:
  void free(Allocation* block) const {
    if (block != nullptr) {
      DeviceMemory::of(device_).free(block);
    }
  }

  Device device_;
  c10::SmallVector<Allocation*, 2> blocks_;
};

bool communicates(const OperatorHandle& op) {
  static constexpr std::array<std::string_view, 4> kNamespaces{"c10d", "_c10d_functional", "fsdp", "symm_mem"};
  return isAmong(kNamespaces, namespaceOf(op.operator_name()));
}

// Returns the number of the source line that runs; -1 if lines are not traced.
std::int32_t lineHere(Timeline& timeline) {
  return threadScope().traces_lines ? timeline.numberOf(interpreter().sourceLineHere()) : -1;
}

// While it lives, `current_cause` describes the current call of this thread. Does nothing unless a tracker is open.
class CauseGuard {
 public:
  explicit CauseGuard(const OperatorHandle& op) : previous_{current_cause} {
    if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
      const auto node = torch::autograd::get_current_node();
      if (node != nullptr && !is_in_backward) {
        timeline->markActivations();
      }
      is_in_backward = node != nullptr;
      current_cause = {op.operator_name().name.c_str(),
                       /*is_of_kernel=*/false, communicates(op),
                       node == nullptr ? -1 : static_cast<std::int64_t>(node->sequence_nr()), lineHere(*timeline)};
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(CauseGuard);
  ~CauseGuard() {
    current_cause = previous_;
  }

 private:
  AllocationCause previous_;
};

// Changes the category of the allocation of `storage` if `is_wanted` returns true for it.
template <typename Condition>
void changeCategory(const c10::Storage& storage,
                    MemoryCategory category,
                    bool is_presumed,
                    const Condition& is_wanted) {
  const auto timeline = currentTimeline();
  bool is_changed = false;
  visitCountedAllocation(storage, [&](Allocation& allocation) {
    is_changed = timeline != nullptr && is_wanted(allocation);
    if (is_changed) {
      allocation.category = category;
      allocation.is_presumed = is_presumed;
      timeline->setCategory(allocation.number, category);
    }
  });
  if (is_changed) {
    labelStorage(storage, static_cast<std::uint8_t>(category));
  }
}

const OperatorSet writesInPart{"write some elements of their first argument",
                               {"aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::index_add_",
                                "aten::index_fill_", "aten::scatter_", "aten::masked_scatter_", "aten::slice_scatter"}};

bool isWrittenInPart(const OperatorHandle& op, const at::Tensor& written) {
  const std::size_t bytes = toSize(written.numel()) * written.itemsize();
  // FSDP2 resizes the storages of gathered parameters from 0 bytes, which writes no element.
  return (bytes > 0 && bytes < written.storage().nbytes()) || writesInPart(op);
}

bool isTrained(const at::Tensor& tensor) {
  return tensor.requires_grad() || (tensor.is_view() && tensor._base().requires_grad());
}

void observeGradients(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto is_input = [](const Allocation& allocation) {
    return allocation.category == MemoryCategory::kInput ||
           (allocation.category == MemoryCategory::kGradient && allocation.is_presumed);
  };
  forEachWritten(op.schema(), arguments, [&](const at::Tensor& written, std::size_t position) {
    if (written.has_storage()) {
      changeCategory(written.storage(), MemoryCategory::kGradient, overwritesArgument(op, position), is_input);
    }
  });
}

void observeCaches(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  forEachWritten(op.schema(), arguments, [&](const at::Tensor& written, std::size_t /*position*/) {
    if (written.has_storage() && isWrittenInPart(op, written) && !isTrained(written)) {
      changeCategory(
          written.storage(), MemoryCategory::kCache, /*is_presumed=*/false, [](const Allocation& allocation) {
            return allocation.category == MemoryCategory::kInput || allocation.category == MemoryCategory::kParameter;
          });
    }
  });
  const ForwardPass pass = threadScope().pass;
  bool has_cache = false;
  forEachTensor(arguments, [&](const at::Tensor& read) {
    if (read.has_storage()) {
      changeCategory(read.storage(), MemoryCategory::kCache, /*is_presumed=*/false, [&](const Allocation& allocation) {
        const ForwardPass made = allocation.pass;
        const bool is_older = made.number != 0 && made.number < pass.number && made.root == pass.root;
        const bool becomes_cache = is_older && allocation.category == MemoryCategory::kTemporary;
        has_cache = has_cache || becomes_cache || allocation.category == MemoryCategory::kCache;
        return becomes_cache;
      });
    }
  });
  if (has_cache && op.schema().name() == "aten::cat") {
    forEachTensor(results, [](const at::Tensor& result) { markStorage(result.storage(), MemoryCategory::kCache); });
  }
}

class Counter final : public MemoryCounter {
 public:
  bool counts(Device device) const noexcept override {
    const bool has_stats = device.is_cuda() || device == kPinnedMemory;
    return (device.is_cpu() || device.is_cuda()) && (isTracking() || (has_stats && !hasRealCuda()));
  }

  void* allocate(std::size_t nbytes, Device device, std::uint8_t label) override {
    AllocationCause cause = current_cause;
    cause.category = static_cast<MemoryCategory>(label);
    if (const auto timeline = cause.op == nullptr && isTracking() ? currentTimeline() : nullptr) {
      cause.line = lineHere(*timeline);  // no kernel runs: the program resizes a storage
    }
    return DeviceMemory::of(device).allocate(nbytes, cause);
  }

  void free(void* allocation) noexcept override {
    auto* known = static_cast<Allocation*>(allocation);
    DeviceMemory::of(known->device).free(known);
  }

  std::uintptr_t addressOf(const void* allocation) const noexcept override {
    const Block* block = static_cast<const Allocation*>(allocation)->block;
    return block == nullptr ? 0 : block->address;  // stays while the block is allocated
  }

  void recordStream(const c10::Storage& storage, c10::StreamId stream) override {
    visitCountedAllocation(storage, [stream](Allocation& allocation) {
      DeviceMemory::of(allocation.device).recordStream(allocation, stream);
    });
  }

  std::shared_ptr<const KernelScratch> scratchOf(const OperatorHandle& op,
                                                 ArrayRef<IValue> arguments,
                                                 ArrayRef<IValue> results) override {
    const KernelRules rules = kernel_rules.load(std::memory_order_acquire);
    if (rules == nullptr || operatorsWithRules().find(op) < 0) {
      return nullptr;
    }
    std::optional<Device> device = cudaDeviceOf(arguments);
    if (!device) {
      device = cudaDeviceOf(results);
    }
    if (!device || !counts(*device)) {
      return nullptr;
    }
    checkMayNeedInterpreter();
    KernelMemory memory = rules(op, arguments, results, fakeGpu());
    return memory.isEmpty() ? nullptr : std::make_shared<Scratch>(std::move(memory), *device);
  }

  bool observes(const OperatorHandle& op) const override {
    if (!isTracking()) {
      return false;
    }
    const bool is_forward = threadScope().phase == MemoryPhase::kForward;
    const bool is_backward = torch::autograd::get_current_node() != nullptr;
    return communicates(op) ||
           (is_backward ? !is_forward && op.schema().is_mutable() : is_forward && !c10::GradMode::is_enabled());
  }

  void observe(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) override {
    if (!observes(op)) {
      return;
    }
    if (communicates(op)) {
      forEachTensor(arguments, [](const at::Tensor& tensor) {
        if (tensor.dim() == 1 && !tensor.requires_grad() && tensor.has_storage()) {
          markStorage(tensor.storage(), MemoryCategory::kCommunication);
        }
      });
    } else if (torch::autograd::get_current_node() == nullptr) {
      observeCaches(op, arguments, results);
    } else {
      observeGradients(op, arguments);
    }
  }

  void runKernel(const OperatorHandle& op, const KernelScratch* scratch, ArrayRef<IValue> results) override {
    const CauseGuard cause{op};
    if (const auto device = cudaDeviceOf(results)) {
      countWork(device->index());
    }
    const auto* known = static_cast<const Scratch*>(scratch);
    if (known == nullptr) {
      countStoragesOf(results);
      return;
    }
    KernelBlocks blocks{known->device};
    blocks.run(known->memory.before_results, results);
    countStoragesOf(results);
    blocks.run(known->memory.after_results, results);
  }
};

}  // namespace

void markStorage(const c10::Storage& storage, MemoryCategory category) {
  countExistingStorage(storage);
  bool is_settled = false;
  changeCategory(storage, category, /*is_presumed=*/false, [&](const Allocation& allocation) {
    is_settled = !allocation.is_presumed && allocation.category > category;
    return !is_settled;
  });
  if (!is_settled) {
    labelStorage(storage, static_cast<std::uint8_t>(category));  // it may have no memory now
  }
}

void setKernelRules(const std::vector<std::string>& operators, KernelRules rules) {
  if (kernel_rules.load() == nullptr) {
    operatorsWithRules().add(operators);
    kernel_rules.store(rules);  // after the names, which other threads look up
  }
}

void registerMemoryCounter() {
  static auto* counter = new Counter;  // leaked: storages are freed at any time
  hooks().memory = counter;
}

std::shared_ptr<Timeline> openTracker() {
  const bool is_first = !isTracking();
  auto timeline = openTimeline();
  if (is_first) {
    reportExistingAllocations(*timeline);
  }
  return timeline;
}

namespace {

// Counts for the threads of one guard. Threads of the backward pass inherit it.
class Reporter final : public AllocationReporter {
 public:
  void reportMemoryUsage(void* address,
                         std::int64_t bytes,
                         std::size_t /*allocated*/,
                         std::size_t /*reserved*/,
                         c10::Device device) override {
    if (!device.is_cpu() || (bytes > 0 && isOwnComputation())) {
      return;
    }
    AllocationCause cause;
    if (const auto node = torch::autograd::get_current_node()) {
      cause.sequence_nr = static_cast<std::int64_t>(node->sequence_nr());
    }
    DeviceMemory& memory = DeviceMemory::of(device);
    const Locked lock{LockRank::kRealMemory};
    // Memory that was allocated before is unknown. An allocated address is known if a thread freed it that does not
    // report.
    if (const auto known = allocations_.extract(address)) {
      memory.free(known.mapped());
    }
    if (bytes > 0 && !is_closed_) {
      allocations_[address] = memory.allocate(toSize(bytes), cause);
    }
  }

  void visit(const void* address, c10::function_ref<void(Allocation&)> visit) {
    const Locked lock{LockRank::kRealMemory};
    const auto known = allocations_.find(address);
    if (known != allocations_.end()) {
      const Locked of_allocations{LockRank::kDeviceMemory};
      visit(*known->second);
    }
  }

  // Stops counting, also of live allocations. Other threads may keep the reporter longer: threads of process groups
  // keep the state of the thread that called a collective.
  void close() {
    const Locked lock{LockRank::kRealMemory};
    for (const auto& [address, allocation] : allocations_) {
      DeviceMemory::of(allocation->device).free(allocation);
    }
    allocations_.clear();
    is_closed_ = true;
  }

 private:
  bool is_closed_ = false;
  std::unordered_map<const void*, Allocation*> allocations_;
};

std::shared_ptr<Reporter> newReporter() {
  TORCH_CHECK(!torch::profiler::impl::profilerEnabled(),
              "track_memory() cannot count real tensors: a profiler on this thread receives the allocator's "
              "reports. Enter track_memory() before the profiler.");
  return std::make_shared<Reporter>();
}

}  // namespace

RealAllocationsGuard::RealAllocationsGuard()
    : reporter_{newReporter()}, guard_{c10::DebugInfoKind::PROFILER_STATE, reporter_} {}

RealAllocationsGuard::~RealAllocationsGuard() {
  dynamic_cast<Reporter&>(*reporter_).close();
}

void visitCountedAllocation(const c10::Storage& storage, c10::function_ref<void(Allocation&)> visit) {
  if (isFakeStorage(storage)) {
    const Locked lock{LockRank::kDeviceMemory};  // under which allocations are freed
    if (void* allocation = allocationOf(storage)) {
      visit(*static_cast<Allocation*>(allocation));
    }
    return;
  }
  if (auto* reporter = dynamic_cast<Reporter*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE))) {
    reporter->visit(storage.data(), visit);
  }
}

}  // namespace torchext
