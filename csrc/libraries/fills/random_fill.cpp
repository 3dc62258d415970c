#include "random_fill.h"

#include <algorithm>

#include <ATen/Parallel.h>

#include "../support/sizes.h"
#include "mt19937_jump.h"

namespace torchext {

Pieces slicesOf(std::int64_t count) {
  constexpr std::int64_t kWorthAThread = 131072;  // values: 0.1 ms or more
  const std::int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const std::int64_t slices = std::clamp<std::int64_t>(count / kWorthAThread, 1, threads);
  const std::int64_t size = (count + slices - 1) / slices;
  return {count, std::max(kNormalChunk, (size + kNormalChunk - 1) / kNormalChunk * kNormalChunk)};
}

// All distances are equal, so that one polynomial serves all jumps (mt19937_jump.h).
std::vector<at::mt19937_data_pod> startsOf(const Pieces& slices,
                                           const at::mt19937_data_pod& engine,
                                           std::uint64_t draws_of_value) {
  std::vector<at::mt19937_data_pod> starts{engine};
  while (toSigned(starts.size()) < slices.count) {
    starts.push_back(starts.back());
    advance(starts.back(), static_cast<std::uint64_t>(slices.size) * draws_of_value);
  }
  return starts;
}

}  // namespace torchext
