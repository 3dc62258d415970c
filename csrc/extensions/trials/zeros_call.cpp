#include "zeros_call.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/cache/recipe_builder.h"
#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/substitution.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/fake/storage/storage_memory.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

namespace {

// Returns the size of the storage of `tensor` in bytes, or the size that it should have if it is too small for the
// tensor.
std::size_t storageBytes(const Tensor& tensor) {
  return holdsItsElements(tensor) ? tensor.storage().nbytes() : neededBytes(tensor);
}

// The tensor arguments of a call, and CPU zeros of the same geometry. Tensors in `half` are widened to float32.
class ZeroArguments {
 public:
  explicit ZeroArguments(std::optional<c10::ScalarType> half) : half_{half} {}

  Tensor zerosFor(const Tensor& tensor);

  const Substitution& pairs() const noexcept {
    return pairs_;
  }

  // Returns true if a view of a real argument is among `results`.
  bool areRealArgumentsViewedBy(const Stack& results) const;

  // Returns true if the call has not moved any argument to another storage, and has only resized fakes that are not
  // widened.
  bool canBeFollowed() const;

  // Adds the geometry of resized zeros.
  void describeResized(RecipeBuilder& recipe) const;

 private:
  // A storage of zeros, and its size before the call.
  struct Made {
    Storage storage;
    std::size_t nbytes;
  };
  Storage storageFor(const Tensor& tensor) const;
  bool isWidened(const Tensor& tensor) const {
    return half_ && tensor.scalar_type() == *half_;
  }
  bool isResized(std::size_t number) const;

  const std::optional<c10::ScalarType> half_;
  Substitution pairs_;
  std::vector<Made> made_;  // for each pair
};

Storage ZeroArguments::storageFor(const Tensor& tensor) const {
  const std::size_t nbytes = storageBytes(tensor) * (isWidened(tensor) ? 2 : 1);
  const Tensor* other = pairs_.originalOn(tensor.storage());
  const Storage* zeros = other == nullptr ? nullptr : &pairs_.substituteOf(*other)->storage();
  return zeros == nullptr || zeros->nbytes() < nbytes ? makeZeroStorage(nbytes) : *zeros;
}

Tensor ZeroArguments::zerosFor(const Tensor& tensor) {
  if (const Tensor* known = pairs_.substituteOf(tensor)) {
    return *known;
  }
  const Storage storage = storageFor(tensor);
  const c10::ScalarType dtype = isWidened(tensor) ? c10::kFloat : tensor.scalar_type();
  const Tensor zeros = makeStridedTensor(storage, dtype, tensor.sizes(), tensor.strides(), tensor.storage_offset(),
                                         tensor.key_set() & kLazyBits);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    zeros.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  pairs_.add(tensor, zeros);
  made_.push_back({storage, storage.nbytes()});
  return zeros;
}

bool ZeroArguments::areRealArgumentsViewedBy(const Stack& results) const {
  return hasTensor(ArrayRef<IValue>(results), [this](const Tensor& result) {
    const Tensor* base = pairs_.originalWithSubstituteOn(result.storage());
    return base != nullptr && !isFake(*base);
  });
}

bool ZeroArguments::isResized(std::size_t number) const {
  const Tensor& original = pairs_.originals()[number];
  const Tensor& zeros = pairs_.substitutes()[number];
  return zeros.sizes() != original.sizes() || zeros.strides() != original.strides() ||
         zeros.storage_offset() != original.storage_offset() || made_[number].storage.nbytes() != made_[number].nbytes;
}

bool ZeroArguments::canBeFollowed() const {
  const auto range = c10::irange(made_.size());
  return std::all_of(range.begin(), range.end(), [this](std::size_t i) {
    const Tensor& original = pairs_.originals()[i];
    const bool can_resize = isFake(original) && !isWidened(original) && made_[i].nbytes == original.storage().nbytes();
    return isSameStorage(pairs_.substitutes()[i].storage(), made_[i].storage) && (can_resize || !isResized(i));
  });
}

void ZeroArguments::describeResized(RecipeBuilder& recipe) const {
  for (const auto i : c10::irange(made_.size())) {
    if (isResized(i)) {
      const Tensor& original = pairs_.originals()[i];
      const IValue zeros{pairs_.substitutes()[i]};
      recipe.addWritten(original, zeros.toTensor(), original.storage(), &zeros, /*has_sizes=*/true);
    }
  }
}

bool isPyTorchOperator(const OperatorHandle& op) {
  constexpr std::array<std::string_view, 3> kNamespaces{"aten", "prims", "quantized"};
  return isAmong(kNamespaces, namespaceOf(op.operator_name()));
}

bool areSmallAndPlain(const OperatorHandle& op, const Stack& stack) {
  std::size_t nbytes = 0;
  bool are_plain = true;
  forEachTensor(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
    are_plain = are_plain && isPlain(tensor) && (!tensor.is_meta() || isFake(tensor));
    nbytes += are_plain ? storageBytes(tensor) : 0;
  });
  return are_plain && nbytes <= kMaxZeroBytes;
}

Stack withZeros(const OperatorHandle& op, const Stack& stack, ZeroArguments& zeros) {
  const auto arguments = topOf(stack, op.schema().arguments().size());
  Stack real;
  for (const auto i : c10::irange(arguments.size())) {
    if (arguments[i].isDevice()) {
      real.emplace_back(c10::Device{c10::kCPU});
    } else if (isGenerator(op.schema().arguments()[i])) {
      real.emplace_back(at::detail::createCPUGenerator());
    } else if (arguments[i].isBool() && op.schema().arguments()[i].name() == "pin_memory") {
      real.emplace_back(false);
    } else {
      real.push_back(mapTensors(arguments[i], [&zeros](const Tensor& tensor) { return zeros.zerosFor(tensor); }));
    }
  }
  return real;
}

// Returns true if the operator returns only plain tensors. Numbers and booleans that a kernel returns depend on values.
bool areTensors(const OperatorHandle& op, const Stack& results) {
  bool are_plain = true;
  forEachTensor(results, results.size(),
                [&are_plain](const Tensor& result) { are_plain = are_plain && isPlain(result); });
  const auto& returns = op.schema().returns();
  return are_plain && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
           return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                  result.type()->isSubtypeOf(*c10::ListType::ofTensors());
         });
}

// Returns false if the operator refuses zeros, or refuses the arguments regardless of their values: NOTE [Errors of
// real tensors] distinguishes the two.
bool tryCall(const OperatorHandle& op, Stack& stack) {
  const HiddenCalls guard;
  try {
    const OwnComputation own;
    op.redispatchBoxed(DispatchKeySet{DispatchKey::CPU}, &stack);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Returns a meta tensor like a result that is on new memory, and other results unchanged. `half` is the dtype of those
// results of the call that are float32 in the widened call.
Tensor onMeta(const Tensor& real, const Substitution& zeros, std::optional<c10::ScalarType> half) {
  if (zeros.originalOf(*real.unsafeGetTensorImpl()) != nullptr ||
      zeros.originalWithSubstituteOn(real.storage()) != nullptr) {
    return real;
  }
  const bool is_widened = half && real.scalar_type() == c10::kFloat;
  const Tensor meta{
      at::detail::empty_strided_meta(real.sizes(), real.strides(), is_widened ? *half : real.scalar_type())};
  meta.unsafeGetTensorImpl()->set_storage_offset(real.storage_offset());
  meta.storage().set_nbytes(real.storage().nbytes() / (is_widened ? 2 : 1));
  return meta;
}

// Returns float16 or bfloat16 if it is the only floating-point dtype in the call.
std::optional<c10::ScalarType> halfOf(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::ScalarType> half;
  bool is_only = true;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (c10::isFloatingType(tensor.scalar_type())) {
      is_only = is_only && c10::isReducedFloatingType(tensor.scalar_type()) &&
                half.value_or(tensor.scalar_type()) == tensor.scalar_type();
      half = tensor.scalar_type();
    }
  });
  return is_only ? half : std::nullopt;
}

std::shared_ptr<ResultRecipe> describe(const OperatorHandle& op,
                                       const Stack& stack,
                                       c10::Device device,
                                       std::optional<c10::ScalarType> half) {
  ZeroArguments zeros{half};
  Stack real = withZeros(op, stack, zeros);
  if (!tryCall(op, real) || !zeros.canBeFollowed() || !areTensors(op, real) || zeros.areRealArgumentsViewedBy(real)) {
    return nullptr;
  }
  const auto arguments = topOf(stack, op.schema().arguments().size());
  const auto tensors = distinctTensors(arguments);
  RecipeBuilder recipe{op, tensors, zeros.pairs()};
  zeros.describeResized(recipe);
  mapTensors(real, real.size(), [&](const Tensor& result) { return onMeta(result, zeros.pairs(), half); });
  for (const IValue& result : real) {
    recipe.addResult(result, device);
  }
  return std::move(recipe).build(makesPinned(op, arguments));
}

}  // namespace

// Excludes operators that draw from the default generator, because running them would advance it.
bool mayRunOnZeros(const OperatorHandle& op, const Stack& stack) {
  return isPyTorchOperator(op) && !needsValues(op, stack) &&
         (!op.hasTag(at::Tag::nondeterministic_seeded) || takesGenerator(op)) && !op.hasTag(at::Tag::inplace_view) &&
         op.hasComputedKernelForDispatchKey(DispatchKey::CPU) && areSmallAndPlain(op, stack);
}

std::shared_ptr<ResultRecipe> describeOnZeros(const OperatorHandle& op, const Stack& stack, c10::Device device) {
  if (!mayRunOnZeros(op, stack)) {
    return nullptr;
  }
  auto recipe = describe(op, stack, device, std::nullopt);
  if (recipe != nullptr || device.is_cpu()) {
    return recipe;
  }
  // Some CUDA kernels support 16-bit dtypes that CPU kernels do not (`multi_margin_loss_backward`).
  const auto half = halfOf(topOf(stack, op.schema().arguments().size()));
  return half ? describe(op, stack, device, half) : nullptr;
}

}  // namespace torchext
