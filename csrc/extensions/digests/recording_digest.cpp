#include "recording_digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/util/irange.h>

#include "../../core/deferred_init/plan/liveness.h"
#include "../../core/deferred_init/state/real_dispatch.h"
#include "../../libraries/support/included_key.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"
#include "../placement/placed.h"

namespace torchext {

using at::Tensor;
using c10::IValue;

namespace {

// Collects the input of a digest. Each item starts with its length, so different sequences of items never look equal.
class Items {
 public:
  void addText(std::string_view text) {
    addNumber(text.size());
    bytes_.append(text);
  }

  template <typename Number>
  void addNumber(Number number) {
    std::array<char, sizeof(Number)> raw{};
    std::memcpy(raw.data(), &number, sizeof(Number));
    bytes_.append(raw.data(), raw.size());
  }

  void add(const Digest& digest) {
    addNumber(digest.low);
    addNumber(digest.high);
  }

  void add(const Geometry& geometry) {
    addNumber(geometry.sizes.size());
    for (const auto i : c10::irange(geometry.sizes.size())) {
      addNumber(geometry.sizes[i]);
      addNumber(geometry.strides[i]);
    }
    addNumber(geometry.storage_offset);
    addNumber(static_cast<int>(c10::typeMetaToScalarType(geometry.dtype)));
    addNumber(geometry.is_conj);
    addNumber(geometry.is_neg);
    addNumber(geometry.is_zero);
  }

  // Tensors and generators are added elsewhere. Numbers are compared by their bytes: -0.0 differs from 0.0.
  void add(const IValue& value) {
    addText(value.tagKind());
    if (value.isTensor()) {
      addNumber(value.toTensor().defined());
    } else if (value.isDouble()) {
      addNumber(value.toDouble());
    } else if (value.isComplexDouble()) {
      addNumber(value.toComplexDouble().real());
      addNumber(value.toComplexDouble().imag());
    } else if (value.isList()) {
      addAll(value.toListRef());
    } else if (value.isTuple()) {
      addAll(value.toTupleRef().elements());
    } else if (!value.isGenerator()) {
      std::ostringstream out;
      out << value;
      addText(out.str());
    }
  }

  void addAll(c10::ArrayRef<IValue> values) {
    addNumber(values.size());
    for (const IValue& value : values) {
      add(value);
    }
  }

  Digest digest() const {
    const KernelsOnly guard;
    auto* bytes = const_cast<char*>(bytes_.data());  // NOLINT(*-const-cast): only read
    return digestOf(at::from_blob(bytes, {toSigned(bytes_.size())}, at::dtype(c10::kByte)));
  }

 private:
  std::string bytes_;
};

Digest digestOfStorage(const c10::Storage& storage) {
  const RealDispatch guard;
  const Tensor bytes = bytesAt(storage, 0, storage.nbytes());
  return digestOf(bytes.is_cpu() ? bytes : bytes.cpu());
}

// The offset of a real tensor in its storage does not matter.
Digest digestOfReal(const Tensor& tensor) {
  Items items;
  Geometry geometry = Geometry::of(tensor);
  geometry.storage_offset = 0;
  items.add(geometry);
  const RealDispatch guard;
  items.add(digestOf(tensor.is_cpu() ? tensor : tensor.cpu()));
  return items.digest();
}

void addState(Items& items, const ThreadState& state) {
  items.addNumber(state.keys.included_.raw_repr());
  items.addNumber(state.keys.excluded_.raw_repr());
  items.addNumber(static_cast<int>(state.default_dtype));
  for (const c10::ScalarType dtype : state.autocast_dtypes) {
    items.addNumber(static_cast<int>(dtype));
  }
  items.addNumber(state.grad_mode);
  for (const auto& [name, value] : state.settings->list()) {
    items.addNumber(value);
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
      digests_[live.node] = digestOfCall(live);
    }
  }

  Digest of(const StorageValue& value) {
    if (value.writer() == nullptr) {
      return ofConstant(value);
    }
    Items items;
    items.add(digests_.at(value.writer().get()));
    items.addNumber(value.output());
    return items.digest();
  }

 private:
  Digest digestOfCall(const LiveOperator& live) {
    const OpNode& node = *live.node;
    Items items;
    addCall(items, node, tape_);
    addState(items, node.threadState());
    for (const auto i : c10::irange(node.tensors().size())) {
      add(items, node.tensors()[i], live.arguments[i].value);
    }
    for (const WrittenStorage& written : node.written()) {
      items.addNumber(written.position);
      items.add(written.geometry());
    }
    return items.digest();
  }

  void add(Items& items, const TensorArgument& argument, const StorageValue* live) {
    if (argument.number) {
      items.add(IValue(*argument.number));
    } else if (argument.external != nullptr) {
      items.add(digestOfReal(argument.external->tensor()));
    } else {
      items.add(argument.geometry());
    }
    if (argument.same_as) {
      items.addNumber(*argument.same_as);
    }
    if (live != nullptr) {
      items.add(of(*live));
    }
  }

  Digest ofConstant(const StorageValue& value) {
    const auto known = constants_.find(&value);
    return known != constants_.end() ? known->second
                                     : constants_.emplace(&value, digestOfStorage(value.constant())).first->second;
  }

  TapeReader tape_;
  std::unordered_map<const OpNode*, Digest> digests_;
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

std::vector<StorageValuePtr> valuesOf(const std::vector<Recording>& recordings) {
  std::vector<StorageValuePtr> values;
  for (const Recording& recording : recordings) {
    values.push_back(recording.value);
  }
  return values;
}

// ---- Sources ----

Source sourceOfDraws(const OpNode& node, TapeReader& tape) {
  Items items;
  addCall(items, node, tape);
  std::string text = c10::toString(node.op().operator_name());
  if (!node.tensors().empty()) {
    const auto& sizes = node.tensors().front().geometry().sizes;
    items.addNumber(c10::multiply_integers(sizes));
    text = c10::str(text, " of ", c10::IntArrayRef(sizes));
  }
  return {items.digest(), c10::str(text, node.source().empty() ? "" : " at ", node.source())};
}

Source sourceOfReal(const OpNode& node, const Digest& digest, const char* what) {
  return {digest,
          c10::str(what, " read by ", node.op().operator_name(), node.source().empty() ? "" : " at ", node.source())};
}

std::vector<Source> sourcesOfCall(const OpNode& node, TapeReader& tape) {
  std::vector<Source> sources;
  if (node.tape()) {
    sources.push_back(sourceOfDraws(node, tape));
  }
  for (const TensorArgument& argument : node.tensors()) {
    if (argument.external != nullptr) {
      sources.push_back(sourceOfReal(node, digestOfReal(argument.external->tensor()), "a real tensor"));
    } else if (argument.value != nullptr && argument.value->writer() == nullptr) {
      sources.push_back(sourceOfReal(node, digestOfStorage(argument.value->constant()), "a constant"));
    }
  }
  return sources;
}

}  // namespace

std::vector<Digest> digestsOfRecordings(at::ArrayRef<Tensor> tensors) {
  const Locked lock{LockRank::kReplay};
  const std::vector<Recording> recordings = recordingsOf(tensors);
  const LiveGraph graph = liveGraph(valuesOf(recordings));
  Digester digester{graph};
  std::vector<Digest> digests;
  for (const auto i : c10::irange(recordings.size())) {
    Items items;
    items.add(digester.of(*graph.wanted[i].value));
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
      all.back().push_back({digestOfStorage(recording.value->constant()), "a constant"});
    }
  }
  return all;
}

}  // namespace torchext
