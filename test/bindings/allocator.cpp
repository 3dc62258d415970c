#include <cstdint>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../../csrc/libraries/caching_allocator/caching_allocator.h"
#include "../../csrc/libraries/support/sizes.h"
#include "bindings.h"

namespace torchext::python {

namespace {

// Runs events through a new allocator: ("alloc", id, bytes, stream), ("free", id, 0, 0), ("record", id, 0, stream),
// ("empty", 0, 0, 0). Returns the bytes allocated and reserved after each event; -1 for a failed allocation.
using SimulatedEvent = std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>;
std::vector<std::tuple<std::int64_t, std::int64_t>> simulateAllocations(std::int64_t capacity,
                                                                        const std::vector<SimulatedEvent>& events) {
  CachingAllocator allocator{std::size_t{1} << 44U};
  allocator.driver().setCapacity(toSize(capacity), /*is_limited=*/true);
  std::unordered_map<std::int64_t, Block*> blocks;
  std::vector<std::tuple<std::int64_t, std::int64_t>> result;
  for (const auto& [what, id, bytes, stream] : events) {
    bool failed = false;
    if (what == "alloc") {
      try {
        blocks[id] = allocator.allocate(toSize(bytes), stream);
      } catch (const FailedRequest&) {
        failed = true;
      }
    } else if (what == "free") {
      if (const auto known = blocks.find(id); known != blocks.end()) {
        allocator.free(known->second);
        blocks.erase(known);
      }
    } else if (what == "record") {
      if (const auto known = blocks.find(id); known != blocks.end()) {
        allocator.recordStream(known->second, stream);
      }
    } else {
      TORCH_CHECK_VALUE(what == "empty", "expected an event \"alloc\", \"free\", \"record\" or \"empty\", got \"", what,
                        "\".");
      allocator.emptyCache();
    }
    const std::int64_t allocated = totalOf(allocator.stats().allocated_bytes).current;
    result.emplace_back(failed ? -1 : allocated, totalOf(allocator.stats().reserved_bytes).current);
  }
  return result;
}

}  // namespace

void bindAllocator(pybind11::module_& module) {
  bind(module, "simulate_allocations", simulateAllocations);
}

}  // namespace torchext::python
