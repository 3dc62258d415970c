// The libraries alone, which do not depend on fakes: random fills are compared with PyTorch's operators, and the
// caching allocator with what its source prescribes.

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "libraries/caching_allocator/caching_allocator.h"
#include "libraries/fills/fill.h"
#include "tests.h"

using at::Tensor;
using torchext::Block;
using torchext::CachingAllocator;
using torchext::Distribution;

namespace {

at::mt19937_data_pod engineOf(const at::Generator& generator) {
  return generator.get<at::CPUGeneratorImpl>()->engine().data();
}

bool haveEqualBits(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

bool isFilledLike(Distribution distribution, c10::ScalarType dtype, std::int64_t count) {
  const at::Generator generator = at::detail::createCPUGenerator(42);
  at::mt19937_data_pod engine = engineOf(generator);
  const Tensor expected = at::empty({count}, dtype);
  if (distribution == Distribution::Normal) {
    expected.normal_(0.5, 2.0, generator);
  } else {
    expected.uniform_(-1.5, 3.0, generator);
  }
  const bool is_normal = distribution == Distribution::Normal;
  const torchext::RandomFill fill{distribution, dtype, is_normal ? 0.5 : -1.5, is_normal ? 2.0 : 3.0};
  const Tensor filled = at::empty({count}, dtype);
  return torchext::fillRandomly(fill, filled.mutable_data_ptr(), count, engine) && haveEqualBits(filled, expected) &&
         std::memcmp(engine.state_.data(), engineOf(generator).state_.data(), sizeof(engine.state_)) == 0 &&
         engine.left_ == engineOf(generator).left_;
}

void fillsHaveTheBitsOfPyTorch() {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const std::int64_t count : {16, 625, 4099, 200003}) {
      EXPECT(isFilledLike(Distribution::Uniform, dtype, count));
      EXPECT(isFilledLike(Distribution::Normal, dtype, count));
    }
  }
}

void fillsOfFewNormalNumbersAreLeftToPyTorch() {
  const at::Generator generator = at::detail::createCPUGenerator(42);
  at::mt19937_data_pod engine = engineOf(generator);
  float values[8];
  EXPECT(!torchext::fillRandomly({Distribution::Normal, at::kFloat, 0, 1}, values, 8, engine));
  EXPECT(engine.left_ == engineOf(generator).left_);
}

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t reservedBy(CachingAllocator& allocator) {
  return allocator.driver().used();
}

// `get_allocation_size()` in CUDACachingAllocator.cpp: small blocks share segments of 2 MiB, blocks below 10 MiB those
// of 20 MiB, and larger ones have segments of multiples of 2 MiB.
void segmentsHaveTheSizesOfPyTorch() {
  CachingAllocator allocator{std::uintptr_t{1} << 40};
  allocator.driver().setCapacity(1024 * kMiB, /*is_limited=*/true);
  Block* const small = allocator.allocate(1000, 0);
  EXPECT(small->size == 1024 && reservedBy(allocator) == 2 * kMiB);
  Block* const medium = allocator.allocate(3 * kMiB, 0);
  EXPECT(reservedBy(allocator) == 22 * kMiB);
  Block* const large = allocator.allocate(18 * kMiB + 1, 0);
  EXPECT(reservedBy(allocator) == 42 * kMiB);
  for (Block* block : {small, medium, large}) {
    allocator.free(block);
  }
  EXPECT(reservedBy(allocator) == 42 * kMiB);
  allocator.emptyCache();
  EXPECT(reservedBy(allocator) == 0);
}

void freedBlocksAreReusedOnTheirStream() {
  CachingAllocator allocator{std::uintptr_t{1} << 40};
  allocator.driver().setCapacity(1024 * kMiB, /*is_limited=*/true);
  Block* const block = allocator.allocate(16 * kMiB, 0);
  const std::uintptr_t address = block->address;
  allocator.free(block);
  EXPECT(allocator.allocate(16 * kMiB, 0)->address == address);
  EXPECT(allocator.allocate(16 * kMiB, 1)->address != address);
}

void requestsBeyondTheCapacityFail() {
  CachingAllocator allocator{std::uintptr_t{1} << 40};
  allocator.driver().setCapacity(64 * kMiB, /*is_limited=*/true);
  Block* const cached = allocator.allocate(40 * kMiB, 0);
  allocator.free(cached);
  allocator.free(allocator.allocate(60 * kMiB, 0));  // releases the cached segment
  EXPECT(reservedBy(allocator) == 60 * kMiB);
  bool has_failed = false;
  try {
    allocator.allocate(80 * kMiB, 0);
  } catch (const torchext::FailedRequest& failed) {
    has_failed = failed.bytes == 80 * kMiB;
  }
  EXPECT(has_failed);
}

constexpr Test kTests[] = {
    {"fills_have_the_bits_of_pytorch", &fillsHaveTheBitsOfPyTorch},
    {"fills_of_few_normal_numbers_are_left_to_pytorch", &fillsOfFewNormalNumbersAreLeftToPyTorch},
    {"segments_have_the_sizes_of_pytorch", &segmentsHaveTheSizesOfPyTorch},
    {"freed_blocks_are_reused_on_their_stream", &freedBlocksAreReusedOnTheirStream},
    {"requests_beyond_the_capacity_fail", &requestsBeyondTheCapacityFail},
};

}  // namespace

EXPORT_TESTS(kTests)
