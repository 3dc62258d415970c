#include "digest.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include <ATen/Parallel.h>
#include <c10/util/ParallelGuard.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/plan/liveness.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/threads.h"
#include "../placement/placed.h"

namespace torchext {

using at::Tensor;
using c10::IValue;

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

// ---- Recordings ----

namespace {

// Collects the input of a digest. Each item starts with its length, so different sequences of items never look equal.
class Items {
 public:
  void addText(std::string_view text) {
    addNumbers(text.size());
    bytes_.append(text);
  }

  template <typename... Numbers>
  void addNumbers(const Numbers&... numbers) {
    (bytes_.append(reinterpret_cast<const char*>(&numbers), sizeof(Numbers)), ...);
  }

  void add(const Digest& digest) {
    addNumbers(digest.first, digest.second);
  }

  void add(const Geometry& geometry) {
    addNumbers(geometry.sizes.size());
    for (const auto i : c10::irange(geometry.sizes.size())) {
      addNumbers(geometry.sizes[i], geometry.strides[i]);
    }
    addNumbers(geometry.storage_offset, c10::typeMetaToScalarType(geometry.dtype), geometry.is_conj, geometry.is_neg,
               geometry.is_zero);
  }

  // Tensors and generators are added elsewhere. Numbers are compared by their bytes: -0.0 differs from 0.0.
  void add(const IValue& value) {
    addText(value.tagKind());
    if (value.isTensor()) {
      addNumbers(value.toTensor().defined());
    } else if (value.isDouble()) {
      addNumbers(value.toDouble());
    } else if (value.isComplexDouble()) {
      addNumbers(value.toComplexDouble());
    } else if (value.isList()) {
      addAll(value.toListRef());
    } else if (value.isTuple()) {
      addAll(value.toTupleRef().elements());
    } else if (!value.isGenerator()) {
      addText(c10::str(value));
    }
  }

  void addAll(c10::ArrayRef<IValue> values) {
    addNumbers(values.size());
    for (const IValue& value : values) {
      add(value);
    }
  }

  Digest digest() const {
    return digestOfBytes(reinterpret_cast<const std::uint8_t*>(bytes_.data()), bytes_.size());
  }

 private:
  std::string bytes_;
};

Digest digestOfStorage(const c10::Storage& storage) {
  const RealDispatch guard;
  return digestOf(bytesAt(storage, 0, storage.nbytes()));
}

// The offset of a real tensor in its storage does not matter.
Digest digestOfReal(const Tensor& tensor) {
  Items items;
  Geometry geometry = Geometry::of(tensor);
  geometry.storage_offset = 0;
  items.add(geometry);
  items.add(digestOf(tensor));
  return items.digest();
}

void addState(Items& items, const ThreadState& state) {
  items.addNumbers(state.keys.included_.raw_repr(), state.keys.excluded_.raw_repr(), state.default_dtype,
                   state.grad_mode);
  for (const c10::ScalarType dtype : state.autocast_dtypes) {
    items.addNumbers(dtype);
  }
  for (const auto& [name, value] : state.settings->list()) {
    items.addNumbers(value);
  }
}

void addCall(Items& items, const OpNode& node, TapeReader& tape) {
  items.addText(c10::toString(node.op().operator_name()));
  for (const IValue& argument : node.arguments()) {
    items.add(argument);
  }
  if (node.tape()) {
    items.addText(node.tape()->identity(tape));
  }
}

// Digests of the operators of a graph, starting with the first one.
class Digester {
 public:
  explicit Digester(const LiveGraph& graph) {
    for (const LiveOperator& live : graph.operators) {
      digests_.push_back(digestOfCall(live));
    }
  }

  Digest of(const LiveValue& value) {
    if (!value.hasWriter()) {
      return ofConstant(*value.value);
    }
    Items items;
    items.add(digests_.at(value.writer));
    items.addNumbers(value.value->output());
    return items.digest();
  }

 private:
  Digest digestOfCall(const LiveOperator& live) {
    const OpNode& node = *live.node;
    Items items;
    addCall(items, node, tape_);
    addState(items, node.threadState());
    for (const auto i : c10::irange(node.tensors().size())) {
      add(items, node.tensors()[i], live.arguments[i]);
    }
    for (const WrittenStorage& written : node.written()) {
      items.addNumbers(written.position);
      items.add(written.geometry());
    }
    return items.digest();
  }

  void add(Items& items, const TensorArgument& argument, const LiveValue& live) {
    if (argument.number) {
      items.add(IValue(*argument.number));
    } else if (argument.external != nullptr) {
      items.add(digestOfReal(argument.external->tensor()));
    } else {
      items.add(argument.geometry());
    }
    if (argument.same_as) {
      items.addNumbers(*argument.same_as);
    }
    if (live.value != nullptr) {
      items.add(of(live));
    }
  }

  Digest ofConstant(const StorageValue& value) {
    const auto known = constants_.find(&value);
    return known != constants_.end() ? known->second
                                     : constants_.emplace(&value, digestOfStorage(value.constant())).first->second;
  }

  TapeReader tape_;
  std::vector<Digest> digests_;
  std::unordered_map<const StorageValue*, Digest> constants_;
};

std::vector<Recording> recordingsOf(at::ArrayRef<Tensor> tensors) {
  std::vector<Recording> recordings;
  for (const Tensor& tensor : tensors) {
    recordings.push_back(recordingOf(tensor));
    TORCH_CHECK_VALUE(recordings.back().value != nullptr, "A tensor of shape ", tensor.sizes(),
                      " has no recording to compare with another process.");
  }
  return recordings;
}

// ---- Sources ----

std::string nameAndPlace(const OpNode& node, const std::string& shape = {}) {
  return c10::str(node.op().operator_name(), shape, node.source().empty() ? "" : " at ", node.source());
}

Source sourceOfDraws(const OpNode& node, TapeReader& tape) {
  Items items;
  addCall(items, node, tape);
  std::string shape;
  if (!node.tensors().empty()) {
    const auto& sizes = node.tensors().front().geometry().sizes;
    items.addNumbers(c10::multiply_integers(sizes));
    shape = c10::str(" of ", c10::IntArrayRef(sizes));
  }
  return {nameAndPlace(node, shape), items.digest()};
}

std::vector<Source> sourcesOfCall(const OpNode& node, TapeReader& tape) {
  std::vector<Source> sources;
  if (node.tape()) {
    sources.push_back(sourceOfDraws(node, tape));
  }
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.external != nullptr) {
      sources.emplace_back("a real tensor read by " + nameAndPlace(node), digestOfReal(argument.external->tensor()));
    } else if (argument.value != nullptr && argument.value->writer() == nullptr) {
      sources.emplace_back("a constant read by " + nameAndPlace(node), digestOfStorage(argument.value->constant()));
    }
  }
  return sources;
}

}  // namespace

std::vector<Digest> digestsOfRecordings(at::ArrayRef<Tensor> tensors) {
  const Locked lock{LockRank::kReplay};
  const std::vector<Recording> recordings = recordingsOf(tensors);
  std::vector<StorageValuePtr> values;
  for (const Recording& recording : recordings) {
    values.push_back(recording.value);
  }
  const LiveGraph graph = liveGraph(values);
  Digester digester{graph};
  std::vector<Digest> digests;
  for (const auto i : c10::irange(recordings.size())) {
    Items items;
    items.add(digester.of(graph.wanted[i]));
    items.add(recordings[i].geometry);
    digests.push_back(items.digest());
  }
  return digests;
}

std::vector<const OpNode*> operatorsBehind(const std::vector<StorageValuePtr>& values) {
  std::vector<const OpNode*> open;
  open.reserve(values.size());
  for (const StorageValuePtr& value : values) {
    open.push_back(value->writer().get());
  }
  std::unordered_set<const OpNode*> known{nullptr};
  std::vector<const OpNode*> nodes;
  while (!open.empty()) {
    const OpNode* node = open.back();
    open.pop_back();
    if (!known.insert(node).second) {
      continue;
    }
    nodes.push_back(node);
    for (const TensorArgument& argument : node->tensors()) {
      if (argument.value != nullptr) {
        open.push_back(argument.value->writer().get());
      }
    }
  }
  std::sort(nodes.begin(), nodes.end(), [](const OpNode* a, const OpNode* b) { return a->number() < b->number(); });
  return nodes;
}

std::vector<std::vector<Source>> sourcesOf(at::ArrayRef<Tensor> tensors) {
  const Locked lock{LockRank::kReplay};
  const std::vector<Recording> recordings = recordingsOf(tensors);
  TapeReader tape;
  std::vector<std::vector<Source>> all;
  std::unordered_map<const OpNode*, std::vector<Source>> known;
  for (const Recording& recording : recordings) {
    all.emplace_back();
    // Includes overwritten values: which operators a part needs depends on the part.
    for (const OpNode* node : operatorsBehind({recording.value})) {
      const auto found = known.find(node);
      const auto& sources =
          found != known.end() ? found->second : known.emplace(node, sourcesOfCall(*node, tape)).first->second;
      all.back().insert(all.back().end(), sources.begin(), sources.end());
    }
    if (recording.value->writer() == nullptr) {
      all.back().emplace_back("a constant", digestOfStorage(recording.value->constant()));
    }
  }
  return all;
}

}  // namespace torchext
