#include "known_values.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../support/plain_tensors.h"
#include "../../support/stack_utils.h"
#include "../calls/hidden_keys.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "../storage/fake_factories.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "assumed_values.h"

namespace torchext {

using at::Tensor;
using c10::ArrayRef;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using torch::jit::Stack;

namespace {

// The known bytes of a fake storage.
class KnownValue final : public Provenance {
 public:
  KnownValue(Storage bytes, bool is_assumed) : bytes_{std::move(bytes)}, is_assumed_{is_assumed} {}

  const Storage& bytes() const noexcept {
    return bytes_;
  }

  // NOTE [Assumed values]
  bool isAssumed() const noexcept {
    return is_assumed_;
  }

 private:
  Storage bytes_;
  bool is_assumed_;
};

// Which values count.
enum class Accept : std::uint8_t { kKnown, kAssumed };

// Returns the bytes of `tensor`, if they are known, or assumed if that is accepted.
Storage knownBytes(const Tensor& tensor, Accept accept = Accept::kKnown) {
  if (!mayBeKnown(tensor)) {
    return {};
  }
  const auto known = std::dynamic_pointer_cast<KnownValue>(provenanceOf(tensor.storage()));
  // A storage that has been enlarged since has bytes that are not known.
  const bool is_there = known != nullptr && known->bytes().nbytes() >= tensor.storage().nbytes() &&
                        (accept == Accept::kAssumed || !known->isAssumed());
  return is_there ? known->bytes() : Storage{};
}

Tensor showBytes(Storage bytes, const Tensor& like) {
  return makeStridedTensor(std::move(bytes), like.scalar_type(), like.sizes(), like.strides(), like.storage_offset(),
                           like.key_set() & kLazyBits);
}

// Returns a real tensor on the CPU with the value of `tensor`, or an undefined one if it is not known.
Tensor valueOfKnown(const Tensor& tensor) {
  if (!isFake(tensor)) {
    const bool is_known = tensor.is_cpu() && tensor.layout() == c10::kStrided && tensor.numel() == 1;
    return is_known ? tensor : Tensor{};
  }
  if (tensor.numel() > static_cast<int64_t>(kMaxKnownBytes)) {
    return {};  // it is expanded
  }
  Storage bytes = knownBytes(tensor);
  return bytes ? showBytes(std::move(bytes), tensor) : Tensor{};
}

// Returns a real tensor that stands for an argument of which only the metadata matter. An argument that is large is
// replaced by an empty one: the result is small, so it does not have the argument's shape.
Tensor standInOf(const Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).device(c10::kCPU);
  return tensor.numel() <= static_cast<int64_t>(kMaxKnownBytes)
             ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
             : at::empty({0}, options);
}

bool isEmptyFactory(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
}

// Returns true if known values may be kept for the results of `op`. While deferred_init records, the recording has
// them.
bool canRunOnValues(const OperatorHandle& op) {
  return !isRecording() && namespaceOf(op.operator_name()) == "aten" && !op.hasTag(at::Tag::nondeterministic_seeded) &&
         op.hasComputedKernelForDispatchKey(DispatchKey::CPU) && !isEmptyFactory(op);
}

bool areSmall(ArrayRef<IValue> results) {
  bool small = true;
  forEachTensor(results, [&small](const Tensor& result) {
    small = small && mayBeKnown(result) && result.numel() <= static_cast<int64_t>(kMaxKnownBytes);
  });
  return small;
}

bool isMadeByCall(const Tensor& result, ArrayRef<IValue> arguments) {
  bool is_new = isFake(result);
  forEachTensor(arguments, [&](const Tensor& argument) {
    is_new = is_new && !(argument.has_storage() && isSameStorage(argument.storage(), result.storage()));
  });
  return is_new;
}

std::vector<Tensor> writtenKnown(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  std::vector<Tensor> written;
  if (op.hasTag(at::Tag::inplace_view)) {
    return written;  // metadata only
  }
  const Stack stack(arguments.begin(), arguments.end());
  for (const auto i : c10::irange(arguments.size())) {
    if (writesArgument(op, stack, i)) {
      forEachTensor(arguments[i], [&written](const Tensor& tensor) {
        if (isFake(tensor) && knownBytes(tensor, Accept::kAssumed)) {
          written.push_back(tensor);
        }
      });
    }
  }
  return written;
}

}  // namespace

bool mayBeKnown(const Tensor& fake) noexcept {
  return fake.has_storage() && fake.storage().nbytes() <= kMaxKnownBytes;
}

bool haveOneElement(ArrayRef<IValue> results) {
  bool one = true;
  forEachTensor(results, [&one](const Tensor& result) { one = one && result.numel() == 1; });
  return one;
}

namespace {

void remember(const Tensor& fake, const Tensor& value, bool is_assumed) {
  if (!mayBeKnown(fake)) {
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const Tensor bytes = at::empty({static_cast<int64_t>(fake.storage().nbytes())}, c10::kByte);
  if (fake._is_zerotensor()) {
    bytes.zero_();  // `copy_` refuses to write into zeros of forward AD
  } else {
    showBytes(bytes.storage(), fake).copy_(value);
  }
  setProvenance(fake.storage(), std::make_shared<KnownValue>(bytes.storage(), is_assumed), {});
}

}  // namespace

void rememberValue(const Tensor& fake, const Tensor& value) {
  remember(fake, value, /*is_assumed=*/false);
}

namespace {

bool isOneElement(const Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && tensor.numel() == 1 &&
         tensor.storage().nbytes() == tensor.itemsize() && tensor.itemsize() <= kMaxKnownBytes;
}

// Returns a copy of the bytes of `source` on the CPU, or nothing if they do not exist.
std::shared_ptr<KnownValue> copyOfBytes(const Tensor& source) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const auto nbytes = static_cast<int64_t>(source.storage().nbytes());
  const Tensor bytes = at::empty({nbytes}, c10::kByte);
  if (!isFake(source)) {
    bytes.copy_(makeStridedTensor(source.storage(), c10::kByte, {nbytes}, {1}, 0, {}));
    return std::make_shared<KnownValue>(bytes.storage(), /*is_assumed=*/false);
  }
  const Storage known = knownBytes(source, Accept::kAssumed);
  if (!known) {
    return nullptr;
  }
  bytes.copy_(makeStridedTensor(known, c10::kByte, {nbytes}, {1}, 0, {}));
  return std::make_shared<KnownValue>(bytes.storage(), /*is_assumed=*/!knownBytes(source));
}

}  // namespace

void copyValue(const Tensor& fake, const Tensor& source) {
  const bool is_meta = source.is_meta() || fake.is_meta();
  if (is_meta || isRecording() || !isOneElement(fake) || !isOneElement(source) ||
      provenanceOf(fake.storage()) != nullptr) {
    return;
  }
  if (auto value = copyOfBytes(source)) {
    setProvenance(fake.storage(), std::move(value), {});
  }
}

Tensor knownValueOf(const Tensor& fake) {
  return isFake(fake) ? valueOfKnown(fake) : Tensor{};
}

void expandKnownMasks(const OperatorHandle& op, Stack& arguments) {
  const std::size_t count = op.schema().arguments().size();
  const bool has_fake = hasTensor(topOf(arguments, count), [](const Tensor& tensor) { return isFake(tensor); });
  if (!has_fake || isRecording() || areValuesKnown(op, topOf(arguments, count))) {
    return;  // it is run for real, or the values of the result become known
  }
  IValue& indices = torch::jit::peek(arguments, 1, count);
  const Tensor self = torch::jit::peek(arguments, 0, count).toTensor();
  c10::List<std::optional<Tensor>> expanded;
  int64_t dim = 0;
  for (const IValue& element : indices.toListRef()) {
    const Tensor index = element.isNone() ? Tensor{} : element.toTensor();
    const bool is_mask = index.defined() && (index.scalar_type() == c10::kBool || index.scalar_type() == c10::kByte);
    const Tensor mask = is_mask && (isFake(index) || !index.is_cpu()) ? valueOfKnown(index) : index;
    if (!is_mask) {
      expanded.push_back(index.defined() ? std::optional{index} : std::nullopt);
      ++dim;
      continue;
    }
    if (!mask.defined() || dim + mask.dim() > self.dim() ||
        !mask.sizes().equals(self.sizes().slice(static_cast<std::size_t>(dim), static_cast<std::size_t>(mask.dim())))) {
      return;  // is not known, or does not fit
    }
    const int64_t num_selected = [&mask] {
      const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
      return mask.nonzero().size(0);
    }();
    const FakeFactoriesGuard guard;
    for (int64_t i = 0; i < mask.dim(); ++i, ++dim) {
      expanded.push_back(at::empty({num_selected}, at::TensorOptions(c10::kLong).device(index.device())));
    }
  }
  indices = std::move(expanded);
}

std::optional<double> assumedValue(const Tensor& fake) {
  const Storage bytes = isFake(fake) && fake.numel() == 1 ? knownBytes(fake, Accept::kAssumed) : Storage{};
  if (!bytes || c10::isComplexType(fake.scalar_type())) {
    return std::nullopt;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  return showBytes(bytes, fake).item().toDouble();
}

bool areValuesKnown(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  bool known = true;
  if (isFactory(op, arguments)) {
    return known;
  }
  const bool makes_out = op.hasTag(at::Tag::dynamic_output_shape);  // of another size: runOnValues()
  for (const auto i : c10::irange(arguments.size())) {
    if (!makes_out || !op.schema().arguments()[i].is_out()) {
      forEachTensor(arguments[i], [&known](const Tensor& tensor) { known = known && valueOfKnown(tensor).defined(); });
    }
  }
  return known;
}

namespace {

// Returns a real tensor with the value of `tensor`, which has one element: known, assumed before, or zero.
Tensor valueOfAssumed(const Tensor& tensor) {
  if (Tensor known = valueOfKnown(tensor); known.defined()) {
    return known;
  }
  if (Storage bytes = knownBytes(tensor, Accept::kAssumed)) {
    return showBytes(std::move(bytes), tensor);
  }
  return at::zeros(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).device(c10::kCPU));
}

// An `out` is real already.
Tensor valueOrItself(const Tensor& tensor) {
  return isFake(tensor) ? valueOfKnown(tensor) : tensor;
}

Stack runOn(const OperatorHandle& op, ArrayRef<IValue> arguments, Tensor (*value_of)(const Tensor&)) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  const bool is_factory = isFactory(op, arguments);
  Stack stack;
  for (const auto i : c10::irange(arguments.size())) {
    const IValue& argument = arguments[i];
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device{c10::kCPU});
    } else if (takesTensorOptions(op.schema()) && op.schema().arguments()[i].name() == "pin_memory") {
      stack.emplace_back(false);
    } else {
      stack.push_back(mapTensors(argument, is_factory ? standInOf : value_of));
    }
  }
  op.callBoxed(stack);
  return stack;
}

}  // namespace

Stack runOnValues(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  Stack values = arguments.vec();
  for (const auto i : c10::irange(arguments.size())) {
    if (op.schema().arguments()[i].is_out()) {
      const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
      values[i] = mapTensors(values[i], [](const Tensor& out) {
        return at::empty_strided(out.sizes(), out.strides(), at::TensorOptions(out.scalar_type()).device(c10::kCPU));
      });
    }
  }
  return runOn(op, values, valueOrItself);
}

namespace {

// Returns true if `op` makes tensors of one element of such tensors, and somebody answers for those that are not known.
bool canBeAssumed(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  return assumesValues() && canRunOnValues(op) && areSmall(results) && haveOneElement(results) &&
         haveOneElement(arguments);
}

// What has been written with assumed values is assumed, too.
void assume(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    setProvenance(tensor.storage(),
                  std::make_shared<KnownValue>(knownBytes(tensor, Accept::kAssumed), /*is_assumed=*/true), {});
  }
}

void forget(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    setProvenance(tensor.storage(), nullptr, {});
  }
}

bool isAllOnCpu(ArrayRef<IValue> values) {
  bool on_cpu = true;
  forEachTensor(values, [&on_cpu](const Tensor& value) { on_cpu = on_cpu && value.is_cpu(); });
  return on_cpu;
}

// Runs `op` on values. Returns nothing if the CPU kernel raises, but the fakes are on another device, whose kernel
// might not.
std::optional<Stack> tryRunOnValues(const OperatorHandle& op,
                                    ArrayRef<IValue> arguments,
                                    ArrayRef<IValue> results,
                                    bool are_known) {
  try {
    return runOn(op, arguments, are_known ? valueOfKnown : valueOfAssumed);
  } catch (const c10::Error&) {
    if (are_known && isAllOnCpu(arguments) && isAllOnCpu(results)) {
      throw;
    }
    return std::nullopt;
  }
}

}  // namespace

void forgetValues(const IValue& tensors) {
  forEachTensor(tensors, [](const Tensor& tensor) {
    if (isFake(tensor) && knownBytes(tensor, Accept::kAssumed)) {
      setProvenance(tensor.storage(), nullptr, {});
    }
  });
}

namespace {

// Gives what `op` overwrites some value, so that it has the one that is written, if that is known.
void expectOverwrites(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  for (const auto i : c10::irange(arguments.size())) {
    if (isWritten(op.schema().arguments()[i]) && overwritesArgument(op, i)) {
      forEachTensor(arguments[i], [](const Tensor& tensor) {
        if (isFake(tensor) && isOneElement(tensor) && provenanceOf(tensor.storage()) == nullptr) {
          rememberValue(tensor, at::zeros(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).device(c10::kCPU)));
        }
      });
    }
  }
}

}  // namespace

void followValues(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (canRunOnValues(op)) {
    const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
    expectOverwrites(op, arguments);
  }
  const std::vector<Tensor> written = writtenKnown(op, arguments);
  std::vector<Tensor> made;
  forEachTensor(results, [&](const Tensor& result) {
    if (isMadeByCall(result, arguments)) {
      made.push_back(result);
    }
  });
  if (written.empty() && made.empty()) {
    return;
  }
  const bool are_known = canRunOnValues(op) && areSmall(results) && areValuesKnown(op, arguments);
  if (!are_known && !canBeAssumed(op, arguments, results)) {
    forget(written);
    return;
  }
  const std::optional<Stack> values = tryRunOnValues(op, arguments, results, are_known);
  if (!values) {
    forget(written);
    return;
  }
  std::vector<Tensor> value_of_result;
  forEachTensor(*values, values->size(), [&](const Tensor& value) { value_of_result.push_back(value); });
  std::size_t position = 0;
  forEachTensor(results, [&](const Tensor& result) {
    const Tensor& value = value_of_result.at(position++);
    // The kernel of another device may return other sizes: `log_sigmoid_forward_cuda()` has an empty buffer.
    if (isMadeByCall(result, arguments) && value.sizes() == result.sizes()) {
      remember(result, value, !are_known);
    }
  });
  if (!are_known) {
    assume(written);
  }
}

}  // namespace torchext
