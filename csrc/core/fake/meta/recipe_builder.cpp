#include "recipe_builder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/sizes.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../calls/errors.h"
#include "../calls/op_traits.h"
#include "../calls/recording.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;

namespace {

Storage makeMetaStorage(std::size_t nbytes) {
  return Storage{c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t{}, toSigned(nbytes),
                                                       c10::DataPtr{nullptr, c10::kMeta}, c10::GetAllocator(c10::kMeta),
                                                       /*resizable=*/true)};
}

// Returns a tensor on `storage`, which is on the meta device, with the metadata of `tensor`.
Tensor metaOf(const Tensor& tensor, Storage storage) {
  DispatchKeySet keys{c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::kMeta)};
  keys = keys | (tensor.key_set() & kLazyBits);
  auto impl = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->set_allow_tensor_metadata_change(tensor.unsafeGetTensorImpl()->allow_tensor_metadata_change());
  return Tensor{std::move(impl)};
}

}  // namespace

Tensor realNumber(const Tensor& number) {
  if (!isFake(number)) {
    return number;
  }
  const HiddenCalls guard;
  Tensor zero = at::zeros(number.sizes(), at::TensorOptions(number.scalar_type()).device(c10::kCPU));
  zero.unsafeGetTensorImpl()->set_wrapped_number(true);
  return zero;
}

Tensor Shadows::of(const Tensor& tensor) {
  if (const Tensor* known = substitution_.substituteOf(tensor)) {
    return *known;
  }
  // Meta kernels written in Python receive a wrapped number as a Python number, which requires it to be on the CPU
  // (`toPyObject()` in pybind_utils.cpp).
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return realNumber(tensor);
  }
  if (hooks().layouts.isSparse(tensor)) {
    return emptyOnMeta(tensor);  // for operators whose results do not depend on the layout
  }
  Tensor shadow = kind_ == Kind::kMeta ? metaOf(tensor, of(tensor.storage()))
                                       : makeFakeTensor(of(tensor.storage()), *tensor.unsafeGetTensorImpl());
  substitution_.add(tensor, shadow);
  return shadow;
}

Storage Shadows::of(const Storage& storage) {
  if (const Storage* known = substitution_.substituteOf(storage)) {
    return *known;
  }
  Storage shadow = kind_ == Kind::kMeta ? makeMetaStorage(storage.nbytes())
                                        : makeFakeStorage(storage.nbytes(), storage.device(), isPinnedStorage(storage));
  substitution_.add(storage, shadow);
  return shadow;
}

namespace {

bool mayChangeShape(const OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view) || hasOut(op) || namespaceOf(op.operator_name()) != "aten";
}

// Makes the checks that `as_strided()` makes on all devices except the meta device (`checkInBoundsForStorage`,
// Resize.h).
void checkInBounds(const TensorImpl& view, std::size_t nbytes) {
  TORCH_CHECK(view.storage_offset() >= 0, "Tensor: invalid storage offset ", view.storage_offset());
  TORCH_CHECK(neededBytes(view) <= nbytes, "setStorage: sizes ", view.sizes(), ", strides ", view.strides(),
              ", storage offset ", view.storage_offset(), ", and itemsize ", view.itemsize(),
              " requiring a storage size of ", neededBytes(view), " are out of bounds for storage of size ", nbytes);
}

bool hasSameGeometry(const Tensor& tensor, const TensorImpl& form) {
  return tensor.sizes() == form.sizes() && tensor.strides() == form.strides() &&
         tensor.storage_offset() == form.storage_offset() &&
         (tensor.key_set() & kLazyBits) == (form.key_set() & kLazyBits);
}

}  // namespace

RecipeBuilder::RecipeBuilder(const OperatorHandle& op, CallTensors arguments, const Substitution& substitutes)
    : op_{op}, arguments_{arguments}, substitutes_{substitutes}, recipe_{std::make_shared<ResultRecipe>(op)} {
  for (const Tensor* argument : arguments) {
    argument_numbers_.add(argument->unsafeGetTensorImpl());
  }
}

std::size_t RecipeBuilder::numberOf(const Tensor& argument) const {
  const std::size_t number = argument_numbers_.find(argument.unsafeGetTensorImpl());
  TORCH_INTERNAL_ASSERT(number < arguments_.size());
  return number;
}

void RecipeBuilder::addWritten(const Tensor& argument, const Tensor& written, const IValue* real, bool has_sizes) {
  // The message of a TensorIterator (`TensorIteratorBase::mark_resize_outputs()`), which most of these operators use.
  TORCH_CHECK(real != nullptr || argument.sizes() == written.sizes() || mayChangeShape(op_), "output with shape ",
              argument.sizes(), " doesn't match the broadcast shape ", written.sizes());
  const Storage* known = substitutes_.originalOf(written.storage());
  const std::size_t present = (known == nullptr ? written.storage() : *known).nbytes();
  const auto resize = [&](c10::IntArrayRef sizes, c10::IntArrayRef strides, std::size_t nbytes) {
    auto form = makeForm(argument, sizes, strides);
    nbytes = std::max({nbytes, present, neededBytes(*form)});
    addChanged(argument, written, std::move(form), nbytes);
  };
  if (real == nullptr) {
    addChanged(argument, written, makeForm(written), written.storage().nbytes());
  } else if (!real->isTensor()) {
    addChanged(argument, written, makeForm(argument), present);
  } else if (has_sizes) {
    resize(real->toTensor().sizes(), real->toTensor().strides(), real->toTensor().storage().nbytes());
  } else if (written.sizes() != argument.sizes()) {
    resize(written.sizes(), hooks().trials.stridesLike(real->toTensor(), written), written.storage().nbytes());
  } else {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("`", op_.operator_name(), "` resizes an argument of shape ", argument.sizes(),
                            ", but the call is too large to determine the new shape. Pass an argument that already has "
                            "the new shape, or make the call on real tensors."));
  }
}

// PyTorch warns about resizing a tensor that has elements, except by operators whose purpose is to change metadata. A
// call that warns must warn again.
void RecipeBuilder::addChanged(const Tensor& argument,
                               const Tensor& written,
                               c10::intrusive_ptr<TensorImpl> form,
                               std::size_t nbytes) {
  for (const auto& changed : recipe_->changed_) {
    const Tensor* other = substitutes_.substituteOf(*arguments_[changed.number]);
    nbytes = isSameStorage(other->storage(), written.storage()) ? std::max(nbytes, changed.nbytes) : nbytes;
  }
  const Storage* known = substitutes_.originalOf(written.storage());
  const bool moves = known == nullptr || !isSameStorage(*known, argument.storage());
  if (!moves && hasSameGeometry(argument, *form) && known->nbytes() == nbytes) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(known == nullptr || isFakeStorage(*known) || neededBytes(*form) <= known->nbytes(), "`",
                              op_.operator_name(), "` would resize the storage of a real tensor from ", known->nbytes(),
                              " to ", neededBytes(*form),
                              " bytes, but another argument is fake. Make all arguments fake "
                              "with torchext.fake.fake_like(), or all real.");
  const bool warns = !op_.hasTag(at::Tag::inplace_view) && argument.numel() != 0 && argument.sizes() != form->sizes();
  recipe_->is_repeatable_ = recipe_->is_repeatable_ && !warns;
  const auto moved_to = moves ? std::optional{numberOfStorage(written.storage(), argument.device())} : std::nullopt;
  recipe_->changed_.push_back({numberOf(argument), std::move(form), nbytes, moved_to});
}

void RecipeBuilder::addResult(const IValue& result, c10::Device device) {
  ResultRecipe::ValueRecipe& value = recipe_->values_.emplace_back();
  const auto add = [&](const Tensor& tensor) { value.tensors.push_back(describe(tensor, device)); };
  if (result.isTensor()) {
    add(result.toTensor());
    return;
  }
  const auto elements = result.isTensorList() ? result.toListRef() : ArrayRef<IValue>{};
  value.is_list = result.isTensorList() && std::all_of(elements.begin(), elements.end(),
                                                       [](const IValue& element) { return element.isTensor(); });
  if (value.is_list) {
    std::for_each(elements.begin(), elements.end(), [&add](const IValue& element) { add(element.toTensor()); });
    return;
  }
  value.other = result;
  forEachTensor(result, add);
  const bool is_plain = result.isNone() || result.isInt() || result.isDouble() || result.isBool();
  recipe_->is_repeatable_ = recipe_->is_repeatable_ && is_plain;
}

RecipeBuilder::TensorRecipe RecipeBuilder::describe(const Tensor& result, c10::Device device) {
  using Source = TensorRecipe::Source;
  if (!result.defined()) {
    return {};
  }
  if (const Tensor* argument = substitutes_.originalOf(*result.unsafeGetTensorImpl())) {
    return {Source::kArgument, numberOf(*argument), nullptr};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided && result.has_storage(), "`", op_.operator_name(),
                              "` returns a tensor of layout ", result.layout(),
                              ", but fake tensors must be strided. Call it on real tensors.");
  const Storage* known = substitutes_.originalOf(result.storage());
  TORCH_CHECK_NOT_IMPLEMENTED(known == nullptr || isFakeStorage(*known), "`", op_.operator_name(),
                              "` returns a view of a real argument although another argument is fake. Make all "
                              "arguments fake with torchext.fake.fake_like(), or all real.");
  auto form = makeForm(result);
  const Tensor* base = substitutes_.originalWithSubstituteOn(result.storage());
  if (base == nullptr) {
    const c10::Device own = isFake(result) || !result.is_meta() ? result.device() : device;
    return {Source::kNewStorage, numberOfStorage(result.storage(), own), std::move(form)};
  }
  // The inference mode of the call, not the argument, decides whether the result of `view(dtype)` is an inference
  // tensor: `view_dtype()` (TensorConversions.cpp) makes a new tensor on the storage.
  if (op_.schema().name() == "aten::view" && op_.schema().overload_name() == "dtype") {
    return {Source::kOnArgument, numberOf(*base), std::move(form)};
  }
  checkInBounds(*form, result.storage().nbytes());
  return {Source::kViewOfArgument, numberOf(*base), std::move(form)};
}

// A recipe with a storage of the program cannot be repeated.
std::size_t RecipeBuilder::numberOfStorage(const Storage& storage, c10::Device device) {
  const auto listed = std::find_if(storages_.begin(), storages_.end(),
                                   [&storage](const Storage& other) { return isSameStorage(other, storage); });
  const std::size_t number = toSize(listed - storages_.begin());
  if (listed == storages_.end()) {
    const Storage* known = substitutes_.originalOf(storage);
    recipe_->is_repeatable_ = recipe_->is_repeatable_ && known == nullptr;
    storages_.push_back(storage);
    recipe_->storages_.push_back(
        {storage.nbytes(), device, isPinnedStorage(storage), known == nullptr ? Storage{} : *known});
  }
  return number;
}

std::shared_ptr<ResultRecipe> RecipeBuilder::build(ArrayRef<IValue> results, c10::Device device, bool pins) && {
  for (const IValue& result : results) {
    addResult(result, device);
  }
  for (auto& storage : recipe_->storages_) {
    storage.is_pinned = storage.is_pinned || pins;
  }
  return std::move(recipe_);
}

}  // namespace torchext
