// NOTE [Running the CPU kernel]
//
// A few dozen PyTorch operators have no Meta kernel (`geqrf`, `histogram`, the backward operators of some losses). The
// metadata of their results do not depend on values: operators with value-dependent results have a tag or are handled
// by `needsValues()`, and test_zeros_call.py lists the others. So their CPU kernel is run once on zeros, regardless of
// the claimed device, and the result is cached like that of a Meta kernel. `FakeTensorMode` does the same
// (`run_fallback_kernel`). As there, only PyTorch's own operators are run. Random operators get a private generator.
//
// The zeros occupy no memory until they are written, but the results do, and kernels can be slow. Calls with more than
// kMaxZeroBytes of arguments are not run.

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/meta/recipe_builder.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../libraries/support/plain_tensors.h"
#include "../../libraries/support/stack_utils.h"
#include "stand_ins.h"
#include "trials.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

namespace {

constexpr std::size_t kMaxZeroBytes = std::size_t{1} << 30U;

// Returns the size of the storage of `tensor` in bytes, or the size that it should have if it is too small for the
// tensor.
std::size_t storageBytes(const Tensor& tensor) {
  return holdsItsElements(tensor) ? tensor.storage().nbytes() : neededBytes(tensor);
}

// Returns true if `zeros` shares a storage like `original`. Others are alone on a storage that is just large enough.
bool isOnShared(const Tensor& zeros, const Tensor& original, const Substitution& pairs) {
  const Storage* shared = pairs.substituteOf(original.storage());
  return shared != nullptr && isSameStorage(*shared, zeros.storage());
}

// Returns true if a recipe can repeat what the call did to its arguments: it has only resized fakes that share
// storages, and no other argument is viewed by `results`.
bool canBeDescribed(const Substitution& pairs, const Stack& results) {
  const auto is_viewed = [&](const Tensor& zeros) {
    return hasTensor(ArrayRef<IValue>(results), [&](const Tensor& result) {
      return !result.is_same(zeros) && isSameStorage(result.storage(), zeros.storage());
    });
  };
  const auto range = c10::irange(pairs.originals().size());
  return std::all_of(range.begin(), range.end(), [&](std::size_t i) {
    const Tensor& original = pairs.originals()[i];
    const Tensor& zeros = pairs.substitutes()[i];
    const bool is_shared = isOnShared(zeros, original, pairs);
    const std::size_t nbytes = is_shared ? original.storage().nbytes() : neededBytes(zeros);
    const bool is_unchanged = zeros.sizes() == original.sizes() && zeros.strides() == original.strides() &&
                              zeros.storage_offset() == (is_shared ? original.storage_offset() : 0) &&
                              zeros.storage().nbytes() == nbytes;
    const bool can_change = is_shared && isFake(original) && zeros.storage_offset() == original.storage_offset();
    return can_change || (is_unchanged && !is_viewed(zeros));
  });
}

bool isPyTorchOperator(const OperatorHandle& op) {
  constexpr std::array<std::string_view, 3> kNamespaces{"aten", "prims", "quantized"};
  return isAmong(kNamespaces, namespaceOf(op.operator_name()));
}

bool areSmallAndPlain(const OperatorHandle& op, const Stack& stack) {
  std::size_t nbytes = 0;
  bool are_plain = true;
  forEachTensor(argumentsOf(op, stack), [&](const Tensor& tensor) {
    are_plain = are_plain && isPlain(tensor) && (!tensor.is_meta() || isFake(tensor));
    nbytes += are_plain ? storageBytes(tensor) : 0;
  });
  return are_plain && nbytes <= kMaxZeroBytes;
}

// Returns true if the operator returns only plain tensors. Numbers and booleans that a kernel returns depend on values.
bool areTensors(const OperatorHandle& op, const Stack& results) {
  const auto& returns = op.schema().returns();
  return allTensors(results, isPlain) && std::all_of(returns.begin(), returns.end(), isOfTensors);
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
  const auto arguments = argumentsOf(op, stack);
  Likeness likeness;
  likeness.fill = Fill::kZeros;
  likeness.dtypes = half ? Dtypes::kWide : Dtypes::kKept;
  likeness.is_whole = true;
  Substitution zeros;
  Stack real = standInsOf(op, arguments, likeness, zeros);
  if (!tryCall(op, real) || !areTensors(op, real) || !canBeDescribed(zeros, real)) {
    return nullptr;
  }
  const auto tensors = distinctTensors(arguments);
  RecipeBuilder recipe{op, tensors, zeros};
  for (const Tensor& original : zeros.originals()) {
    const IValue after = *zeros.substituteOf(original);
    if (isOnShared(after.toTensor(), original, zeros)) {
      recipe.addWritten(original, after.toTensor(), &after, /*has_sizes=*/true);
    }
  }
  mapTensors(real, real.size(), [&](const Tensor& result) { return onMeta(result, zeros, half); });
  return std::move(recipe).build(real, device, makesPinned(op, arguments));
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
  const auto half = halfOf(argumentsOf(op, stack));
  return half ? describe(op, stack, device, half) : nullptr;
}

}  // namespace torchext
