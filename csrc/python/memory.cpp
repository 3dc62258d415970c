#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "../core/fake/storage/fake_storage.h"
#include "../extensions/cuda/fake_cuda.h"
#include "../extensions/memory/device_memory.h"
#include "../extensions/memory/memory_counter.h"
#include "../extensions/memory/timeline.h"
#include "../libraries/support/sizes.h"
#include "bind.h"
#include "interpreter.h"
#include "module.h"

namespace torchext::python {

namespace {

namespace py = pybind11;
using py::literals::operator""_a;

DeviceMemory& memoryOf(std::int64_t index) {
  const c10::DeviceIndex count = fakeCudaDeviceCount();
  TORCH_CHECK(index >= 0 && index < count, "CUDA error: invalid device ordinal: got device ", index, ", but there are ",
              static_cast<int>(count), " fake CUDA devices.");
  return DeviceMemory::of({c10::kCUDA, static_cast<c10::DeviceIndex>(index)});
}

py::dict asDict(const MemoryStat& stat) {
  return py::dict("current"_a = stat.current, "peak"_a = stat.peak, "allocated"_a = stat.allocated,
                  "freed"_a = stat.freed);
}

py::dict asDict(const PooledStat& stat) {
  return py::dict("all"_a = asDict(totalOf(stat)),
                  "small_pool"_a = asDict(stat[static_cast<std::size_t>(StatPool::SMALL_POOL)]),
                  "large_pool"_a = asDict(stat[static_cast<std::size_t>(StatPool::LARGE_POOL)]));
}

py::dict asDict(const AllocatorStats& stats) {
  py::dict result;
  AllocatorStats::forEachPooled(stats,
                                [&result](const char* name, const PooledStat& stat) { result[name] = asDict(stat); });
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["max_split_size"] = maxSplitSize();
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["num_oom_rejections"] = 0;
  result["oversize_allocations"] = asDict(stats.oversize_allocations);
  result["oversize_segments"] = asDict(stats.oversize_segments);
  result["reserved_bytes_by_private_pools"] = py::dict{};
  return result;
}

// The same as `torch._C._cuda_memoryStats()`.
py::dict memoryStats(std::int64_t device) {
  return asDict(memoryOf(device).withAllocator([](const CachingAllocator& allocator) { return allocator.stats(); }));
}

// The same as `torch._C._cuda_hostMemoryStats()`. The times are those of calls of the driver.
py::dict hostMemoryStats() {
  const HostStats stats = DeviceMemory::of(kPinnedMemory).hostStats();
  py::dict result;
  result["num_host_alloc"] = stats.allocations.allocated;
  result["num_host_free"] = stats.allocations.freed;
  HostStats::forEach(stats, [&result](const char* name, const MemoryStat& stat) { result[name] = asDict(stat); });
  for (const char* name : {"host_alloc_time", "host_free_time"}) {
    result[name] = py::dict("total"_a = 0, "max"_a = 0, "min"_a = 0, "count"_a = 0, "avg"_a = 0);
  }
  return result;
}

template <typename... Arguments>
py::object callProvided(Provided what, const Arguments&... arguments) {
  return py::reinterpret_borrow<py::object>(provided(what))(arguments...);
}

void observeOutOfMemory(const OutOfMemory& report) {
  const py::gil_scoped_acquire gil;
  if (provided(Provided::kObserveOutOfMemory) != nullptr) {
    callProvided(Provided::kObserveOutOfMemory, static_cast<int>(report.device), report.requested,
                 report.allowed.value_or(report.capacity), report.free);
  }
}

template <typename Use>
void forEachDevice(const Use& use) {
  for (c10::DeviceIndex i = 0; i < fakeCudaDeviceCount(); ++i) {
    use(memoryOf(i));
  }
}

// Tensors from an earlier block show that the devices have been used.
bool isInitialized() {
  bool is_initialized = isFakeCudaInitialized();
  forEachDevice([&](const DeviceMemory& memory) { is_initialized = is_initialized || memory.hasAllocations(); });
  return is_initialized;
}

// Returns a function that calls `use` with the allocator of a device.
template <typename Use>
auto onAllocator(const Use& use) {
  return [use](std::int64_t device) { return memoryOf(device).withAllocator(use); };
}

// `stacks` is a HistoryStacks.
void recordMemoryHistory(bool enabled, std::size_t max_entries, int stacks) {
  TORCH_CHECK_VALUE(stacks >= 0 && stacks <= static_cast<int>(HistoryStacks::kOfAll), "`stacks` is invalid: ", stacks,
                    ".");
  forEachDevice(
      [&](DeviceMemory& memory) { memory.recordHistory(enabled, max_entries, static_cast<HistoryStacks>(stacks)); });
}

// The file, line and function of each frame.
using Frames = std::vector<std::tuple<std::string, int, std::string>>;
Frames framesOf(const std::shared_ptr<const StackTrace>& stack) {
  Frames frames;
  if (stack != nullptr) {
    for (const StackFrame& frame : *stack) {
      frames.emplace_back(frame.file, frame.line, frame.function);
    }
  }
  return frames;
}

// The address, size, requested size, whether it is allocated, whether its free is awaited, and the frames.
using BlockRow = std::tuple<std::uintptr_t, std::size_t, std::size_t, bool, bool, Frames>;

// The stream, whether it is small, the pool, whether it is expandable, and the blocks.
using SegmentRow = std::tuple<c10::StreamId, bool, PoolId, bool, std::vector<BlockRow>>;

SegmentRow rowOf(const Block& first, const DeviceMemory& memory) {
  std::vector<BlockRow> blocks;
  for (const Block* block = &first; block != nullptr && block->is_mapped; block = block->next) {
    blocks.emplace_back(block->address, block->size, block->requested, block->is_allocated, block->is_awaited,
                        framesOf(block->isFree() ? nullptr : memory.stackOf(block->address)));
  }
  return {first.stream, first.pool->isSmall(), first.pool->id, first.segment != nullptr, blocks};
}

std::vector<SegmentRow> segmentsOf(DeviceMemory& memory) {
  std::vector<SegmentRow> segments;
  memory.withAllocator([&](const CachingAllocator& allocator) {
    for (const Block* first : allocator.segments()) {
      segments.push_back(rowOf(*first, memory));
    }
  });
  return segments;
}

// By the values of MemoryAction.
constexpr std::array<const char*, 8> kActionNames{"alloc",        "free_requested", "free_completed", "segment_alloc",
                                                  "segment_free", "segment_map",    "segment_unmap",  "oom"};

// The action, address, bytes, stream, time in us, metadata, and frames.
using TraceRow = std::tuple<const char*, std::uintptr_t, std::size_t, c10::StreamId, std::int64_t, std::string, Frames>;

std::vector<TraceRow> traceOf(DeviceMemory& memory) {
  std::vector<TraceRow> trace;
  for (const TraceEntry& entry : memory.history()) {
    trace.emplace_back(kActionNames.at(static_cast<std::size_t>(entry.action)), entry.address, entry.bytes,
                       entry.stream, entry.time_us, entry.metadata, framesOf(entry.stack));
  }
  return trace;
}

// Sets the scope of this thread. Returns the previous one.
std::tuple<std::int32_t, int, bool> setMemoryScope(std::int32_t scope,
                                                   int phase,
                                                   bool traces_lines,
                                                   std::uint64_t root) {
  TORCH_CHECK_VALUE(phase >= 0 && phase <= static_cast<int>(MemoryPhase::kOther), "`phase` is invalid: ", phase, ".");
  const ThreadScope previous = setThreadScope(scope, static_cast<MemoryPhase>(phase), traces_lines, root);
  return {previous.scope, static_cast<int>(previous.phase), previous.traces_lines};
}

// Sets the category of the storages of `tensors`. Fake storages are counted from now on.
void markMemory(const std::vector<at::Tensor>& tensors, int category) {
  TORCH_CHECK_VALUE(category >= 0 && category < static_cast<int>(kNumMemoryCategories),
                    "`category` is invalid: ", category, ".");
  TORCH_CHECK(isTracking(), "No memory tracker is open.");
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      markStorage(tensor.storage(), static_cast<MemoryCategory>(category));
    }
  }
}

// Returns the number of the allocation in the timeline, or -1.
std::int32_t memoryNumber(const at::Tensor& tensor) {
  std::int32_t number = -1;
  if (tensor.has_storage()) {
    visitCountedAllocation(tensor.storage(),
                           [&number](const Allocation& allocation) { number = allocation.number.number; });
  }
  return number;
}

// Leaves or releases a pool, which may happen after the fake devices were replaced.
template <void (CachingAllocator::*kEnd)(PoolId)>
void endPool(std::int64_t device, PoolId id) {
  DeviceMemory::of({c10::kCUDA, static_cast<c10::DeviceIndex>(device)})
      .withEarlierAllocator([id](CachingAllocator& allocator) { (allocator.*kEnd)(id); });
}

template <typename Row>
py::bytes bytesOf(const std::vector<Row>& rows) {
  return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row)};
}

// Returns the allocations and events as rows of numbers, the names of the operators, and the texts.
py::tuple dataOf(const Timeline& timeline) {
  const TimelineData data = timeline.data();
  std::unordered_map<std::int64_t, std::string> operators;
  for (const AllocationRecord& record : data.allocations) {
    operators.try_emplace(reinterpret_cast<std::int64_t>(record.op), record.op == nullptr ? "" : record.op);
  }
  return py::make_tuple(bytesOf(data.allocations), bytesOf(data.events), operators, data.texts);
}

// Describes tensors, and converts other values.
py::object describe(const c10::IValue& value) {
  if (value.isTensor() && !value.toTensor().defined()) {
    return py::none();
  }
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return callProvided(Provided::kKernelGeometry, tensor.sizes(), tensor.strides(), tensor.scalar_type(),
                        tensor.storage_offset());
  }
  if (value.isList()) {
    return asTuple(value.toListRef(), [](const c10::IValue& item) { return describe(item); });
  }
  return torch::jit::toPyObject(value);
}

py::tuple describeAll(c10::ArrayRef<c10::IValue> values) {
  return asTuple(values, [](const c10::IValue& value) { return describe(value); });
}

c10::SmallVector<KernelStep, 2> asSteps(const py::handle& list) {
  c10::SmallVector<KernelStep, 2> steps;
  for (const py::handle step : list) {
    const auto [kind, bytes, block] = step.cast<std::tuple<int, std::int64_t, std::int32_t>>();
    steps.push_back({static_cast<KernelStep::Kind>(kind), bytes, block});
  }
  return steps;
}

KernelMemory applyRule(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::ArrayRef<c10::IValue> results,
                       const GpuDescription& gpu) {
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  const py::object steps = callProvided(Provided::kKernelSteps, c10::toString(op.operator_name()),
                                        describeAll(arguments), describeAll(results),
                                        std::tuple{gpu.major, gpu.multiprocessors, gpu.max_threads_per_multiprocessor});
  return {asSteps(steps[py::int_{0}]), asSteps(steps[py::int_{1}])};
}

}  // namespace

void bindMemory(py::module_& module) {
  module.def("cuda_memory_stats", torch::wrap_pybind_function(memoryStats));
  bind(module, "cuda_reset_peak_memory_stats", onAllocator([](auto& allocator) { allocator.stats().resetPeak(); }));
  bind(module, "cuda_reset_accumulated_memory_stats",
       onAllocator([](auto& allocator) { allocator.stats().resetAccumulated(); }));
  bind(module, "cuda_empty_cache", [] {
    forEachDevice([](auto& memory) { memory.withAllocator([](auto& allocator) { allocator.emptyCache(); }); });
  });
  bind(module, "is_fake_cuda_initialized", isInitialized);
  bind(module, "forget_workspaces", [] { forEachDevice([](auto& memory) { memory.forgetWorkspaces(); }); });
  module.def("cuda_host_memory_stats", torch::wrap_pybind_function(hostMemoryStats));
  bind(module, "cuda_reset_peak_host_memory_stats", [] { DeviceMemory::of(kPinnedMemory).resetHostStats(true); });
  bind(module, "cuda_reset_accumulated_host_memory_stats",
       [] { DeviceMemory::of(kPinnedMemory).resetHostStats(false); });
  bind(module, "cuda_empty_host_cache", [] { DeviceMemory::of(kPinnedMemory).releaseFreeBlocks(); });
  setOutOfMemoryObserver(&observeOutOfMemory);
  bind(module, "cuda_memory_metadata", [] { return userMetadata(); });
  bind(module, "set_cuda_memory_metadata", [](const std::string& metadata) { userMetadata() = metadata; });
  bind(module, "is_cuda_history_recorded", [] { return memoryOf(0).isHistoryRecorded(); });
  bind(module, "check_allocator_settings", [](const std::string& settings) { memoryFractionIn(settings); });
  bind(module, "cuda_mem_get_info", onAllocator([](auto& allocator) {
         return std::tuple{allocator.driver().available(), toSize(fakeGpu().total_memory)};
       }));
  bind(module, "cuda_enter_pool", [](std::int64_t device, PoolId id) {
    memoryOf(device).withAllocator([id](auto& allocator) { allocator.enterPool(id); });
  });
  bind(module, "cuda_leave_pool", endPool<&CachingAllocator::leavePool>);
  bind(module, "cuda_release_pool", endPool<&CachingAllocator::releasePool>);
  bind(module, "cuda_set_memory_fraction", [](double fraction, std::int64_t device) {
    memoryOf(device).withAllocator([fraction](auto& allocator) { allocator.setMemoryFraction(fraction); });
  });
  bind(module, "cuda_memory_fraction", onAllocator([](auto& allocator) { return allocator.memoryFraction(); }));
  bind(module, "cuda_record_memory_history", recordMemoryHistory);
  bind(module, "cuda_memory_segments", [](std::int64_t device) { return segmentsOf(memoryOf(device)); });
  bind(module, "cuda_memory_trace", [](std::int64_t device) { return traceOf(memoryOf(device)); });
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "MemoryTimeline")
      .def("count_events", &Timeline::countEvents)
      .def("version", &Timeline::version)
      .def("data", &dataOf);
  bind(module, "set_kernel_operators",
       [](const std::vector<std::string>& operators) { setKernelRules(operators, &applyRule); });
  bind(module, "open_memory_tracker", openTracker);
  bind(module, "close_memory_tracker", closeTimeline);
  bindBlock<RealAllocationsGuard>(module, "enter_real_allocations", "leave_real_allocations", "track_memory()");
  module.def("set_memory_scope", torch::wrap_pybind_function(setMemoryScope), py::arg("scope"), py::arg("phase"),
             py::arg("traces_lines"), py::arg("root") = 0);
  bind(module, "mark_memory", markMemory);
  bind(module, "memory_number", memoryNumber);
  bind(module, "fake_address", addressOfFakeStorage);
}

}  // namespace torchext::python
