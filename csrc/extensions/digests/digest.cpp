#include "digest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>

#include "../../core/deferred_init/graph/op_graph.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/threads.h"

namespace torchext {

using at::Tensor;

namespace {

constexpr std::size_t kLanes = 8;
constexpr std::size_t kStripe = kLanes * sizeof(std::uint64_t);
// The bytes that one thread reads at a time.
constexpr std::size_t kChunkBytes = std::size_t{1} << 20U;

using Lanes = std::array<std::uint64_t, kLanes>;

// Odd, so that multiplying by a factor loses no information. The digits of pi.
constexpr Lanes kFactors{0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1, 0x082EFA98EC4E6C89,
                         0x452821E638D01377, 0xBE5466CF34E90C6D, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917};

constexpr std::uint64_t rotated(std::uint64_t word) {
  return word << 29U | word >> 35U;
}

// Each step is invertible, so lanes that differ once stay different as long as the rest is equal.
void addStripe(Lanes& lanes, const std::uint8_t* bytes) {
  Lanes words;
  std::memcpy(words.data(), bytes, kStripe);
  for (std::size_t i = 0; i < kLanes; ++i) {
    lanes[i] = rotated((lanes[i] ^ words[i]) * kFactors[i]);
  }
}

std::uint64_t folded(const Lanes& lanes, std::uint64_t start, std::uint64_t factor) {
  std::uint64_t hash = start;
  for (const std::uint64_t lane : lanes) {
    hash = (hash ^ lane ^ lane >> 32U) * factor;
    hash ^= hash >> 29U;
  }
  return hash;
}

Digest digestOfBytes(const std::uint8_t* bytes, std::size_t count) {
  Lanes lanes = kFactors;
  const std::size_t whole = count - count % kStripe;
  for (std::size_t i = 0; i < whole; i += kStripe) {
    addStripe(lanes, bytes + i);
  }
  if (whole < count) {
    std::array<std::uint8_t, kStripe> rest{};
    std::memcpy(rest.data(), bytes + whole, count - whole);
    addStripe(lanes, rest.data());
  }
  return {folded(lanes, count, kFactors[0]), folded(lanes, ~count, kFactors[1])};
}

// Starting a thread takes less time than reading a few chunks.
std::size_t threadsFor(std::size_t chunks) {
  constexpr std::size_t kMinChunksPerThread = 4;
  const auto most = toSize(at::in_parallel_region() ? 1 : at::get_num_threads());
  return std::clamp<std::size_t>(chunks / kMinChunksPerThread, 1, most);
}

// Splits the elements of a tensor into contiguous memory.
class Reader {
 public:
  void read(const Tensor& tensor);

  // The digest of everything that was read.
  Digest digest() {
    readPieces();
    return digestOfBytes(reinterpret_cast<const std::uint8_t*>(digests_.data()), digests_.size() * sizeof(Digest));
  }

 private:
  void readDense(const Tensor& tensor);
  void readMemory(const std::uint8_t* bytes, std::size_t count);
  void readPieces();

  std::vector<Digest> digests_;
  // Pieces of at most one chunk whose elements are not dense, with the places of their digests.
  std::vector<std::pair<Tensor, std::size_t>> pieces_;
};

void Reader::read(const Tensor& tensor) {
  if (tensor.numel() == 0) {
    return;
  }
  if (tensor.is_non_overlapping_and_dense()) {
    readDense(tensor);
  } else if (tensor.nbytes() <= kChunkBytes && tensor.is_cpu()) {
    constexpr std::size_t kAtOnce = 1024;
    pieces_.emplace_back(tensor, digests_.size());
    digests_.emplace_back();
    if (pieces_.size() == kAtOnce) {
      readPieces();
    }
  } else if (tensor.nbytes() <= kChunkBytes) {
    readDense(tensor.contiguous());
  } else if (tensor.size(0) == 1) {
    read(tensor.select(0, 0));
  } else {
    const int64_t half = tensor.size(0) / 2;
    read(tensor.narrow(0, 0, half));
    read(tensor.narrow(0, half, tensor.size(0) - half));
  }
}

// Reads in memory order, which strides and shape determine.
void Reader::readDense(const Tensor& tensor) {
  const auto nbytes = toSigned(tensor.nbytes());
  if (tensor.is_cpu()) {
    readMemory(static_cast<const std::uint8_t*>(tensor.const_data_ptr()), tensor.nbytes());
    return;
  }
  const auto begin_of_tensor = toSize(tensor.storage_offset()) * tensor.itemsize();
  const Tensor all = bytesAt(tensor.storage(), begin_of_tensor, tensor.nbytes());
  constexpr auto kAtATime = toSigned(64 * kChunkBytes);
  for (int64_t begin = 0; begin < nbytes; begin += kAtATime) {
    const Tensor part = all.narrow(0, begin, std::min(kAtATime, nbytes - begin)).cpu();
    readMemory(part.const_data_ptr<std::uint8_t>(), part.nbytes());
  }
}

void Reader::readMemory(const std::uint8_t* bytes, std::size_t count) {
  const std::size_t first = digests_.size();
  const std::size_t chunks = (count + kChunkBytes - 1) / kChunkBytes;
  digests_.resize(first + chunks);
  const std::size_t threads = threadsFor(chunks);
  runAtOnce(toSigned(threads), [&](std::int64_t thread) {
    for (auto i = toSize(thread); i < chunks; i += threads) {
      const std::size_t offset = i * kChunkBytes;
      digests_[first + i] = digestOfBytes(bytes + offset, std::min(kChunkBytes, count - offset));
    }
  });
}

// Each thread copies its pieces alone: a parallel copy of so little memory would take longer.
void Reader::readPieces() {
  const std::size_t threads = threadsFor(pieces_.size());
  runAtOnce(toSigned(threads), [&](std::int64_t thread) {
    const RealDispatch guard;
    const c10::ParallelGuard serial{true};
    for (auto i = toSize(thread); i < pieces_.size(); i += threads) {
      const Tensor dense = pieces_[i].first.contiguous();
      digests_[pieces_[i].second] =
          digestOfBytes(static_cast<const std::uint8_t*>(dense.const_data_ptr()), dense.nbytes());
    }
  });
  pieces_.clear();
}

// Returns the tensor without its lazy bits, which are metadata, and without the repetitions of expanded dimensions.
Tensor withoutRepeats(const Tensor& tensor) {
  Geometry geometry = Geometry::of(tensor);
  geometry.is_conj = geometry.is_neg = false;
  for (std::size_t dim = 0; dim < geometry.sizes.size(); ++dim) {
    if (geometry.strides[dim] == 0) {
      geometry.sizes[dim] = std::min<int64_t>(geometry.sizes[dim], 1);
    }
  }
  return geometry.makeTensor(tensor.storage());
}

}  // namespace

Digest digestOf(const Tensor& tensor) {
  const RealDispatch guard;
  Reader reader;
  reader.read(withoutRepeats(tensor));
  return reader.digest();
}

}  // namespace torchext
