#include "result_recipe.h"

#include <algorithm>
#include <typeinfo>
#include <utility>

#include <ATen/core/enum_tag.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../../libraries/support/sizes.h"
#include "../calls/errors.h"
#include "../calls/op_traits.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

using at::Tensor;
using c10::ArrayRef;
using c10::IValue;
using c10::Storage;

using CallTensors = ArrayRef<const Tensor*>;

namespace {

c10::intrusive_ptr<c10::TensorImpl> formOf(const Tensor& tensor) {
  const c10::DispatchKeySet keys{c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, c10::kMeta)};
  auto form = c10::make_intrusive<c10::TensorImpl>(keys | (tensor.key_set() & kLazyBits), tensor.dtype(), c10::kMeta);
  form->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return form;
}

// Throws a copy of `error`, because its catcher may add context to it, on any thread. Unknown types are thrown as
// c10::Error.
template <typename First, typename... Others>
[[noreturn]] void throwCopyOf(const c10::Error& error) {
  if (typeid(error) == typeid(First)) {
    throw First{static_cast<const First&>(error)};
  }
  if constexpr (sizeof...(Others) == 0) {
    throw c10::Error{error};
  } else {
    throwCopyOf<Others...>(error);
  }
}

}  // namespace

ArgumentsBefore::ArgumentsBefore(CallTensors arguments) {
  for (const Tensor* tensor : arguments) {
    entries_.push_back({tensor->storage().unsafeGetStorageImpl(), c10::DimVector(tensor->sizes())});
  }
}

bool ArgumentsBefore::areMovedOrWarnedOf(const c10::OperatorHandle& op, CallTensors arguments) const {
  const auto warns = [&op](const Entry& before, const Tensor& tensor) {
    return !op.hasTag(at::Tag::inplace_view) && c10::multiply_integers(before.sizes) != 0 &&
           tensor.sizes() != c10::IntArrayRef(before.sizes);
  };
  return !std::equal(entries_.begin(), entries_.end(), arguments.begin(), arguments.end(),
                     [&](const Entry& before, const Tensor* tensor) {
                       return before.storage == tensor->storage().unsafeGetStorageImpl() && !warns(before, *tensor);
                     });
}

// Determines where each result comes from.
class RecipeLearner {
 public:
  RecipeLearner(const c10::OperatorHandle& op, CallTensors arguments, ResultRecipe& recipe)
      : shared_{viewsAsDtype(op) ? Source::kOnArgument : Source::kViewOfArgument},
        arguments_{arguments},
        recipe_{recipe} {}

  // Returns false if `result` is neither a tensor, nor a list of tensors, nor a plain value.
  bool learn(const IValue& result);

 private:
  using TensorRecipe = ResultRecipe::TensorRecipe;
  using Source = TensorRecipe::Source;

  bool learnTensor(const Tensor& tensor, std::vector<TensorRecipe>& recipes);
  std::size_t numberOfNew(const Storage& storage);

  const Source shared_;  // of results on the storage of an argument
  const CallTensors arguments_;
  ResultRecipe& recipe_;
  std::vector<Storage> new_storages_;
};

// Makes results by their recipes.
class RecipeMaker {
 public:
  RecipeMaker(CallTensors arguments, const ResultRecipe& recipe) : arguments_{arguments} {
    for (const auto& storage : recipe.new_storages_) {
      new_storages_.push_back(makeFakeStorage(storage.nbytes, storage.device));
      if (storage.is_pinned) {
        pinStorage(new_storages_.back());
      }
    }
  }

  using TensorRecipe = ResultRecipe::TensorRecipe;

  IValue make(const ResultRecipe::ValueRecipe& recipe) const;
  Tensor makeTensor(const TensorRecipe& recipe) const;

 private:
  const CallTensors arguments_;
  c10::SmallVector<Storage, 4> new_storages_;
};

bool RecipeLearner::learn(const IValue& result) {
  ResultRecipe::ValueRecipe& recipe = recipe_.values_.emplace_back();
  if (result.isTensor()) {
    return learnTensor(result.toTensor(), recipe.tensors);
  }
  if (result.isTensorList()) {
    recipe.is_list = true;
    const auto tensors = result.toListRef();
    return std::all_of(tensors.begin(), tensors.end(), [&](const IValue& element) {
      return element.isTensor() && learnTensor(element.toTensor(), recipe.tensors);
    });
  }
  recipe.other = result;
  return result.isNone() || result.isInt() || result.isDouble() || result.isBool();
}

bool RecipeLearner::learnTensor(const Tensor& tensor, std::vector<TensorRecipe>& recipes) {
  TensorRecipe& recipe = recipes.emplace_back();
  if (!tensor.defined()) {
    return true;
  }
  const auto find_argument = [this](const auto& matches) {
    return toSize(std::find_if(arguments_.begin(), arguments_.end(), matches) - arguments_.begin());
  };
  recipe.number = find_argument([&tensor](const Tensor* argument) { return argument->is_same(tensor); });
  if (recipe.number != arguments_.size()) {
    recipe.source = Source::kArgument;
    return true;
  }
  if (!isFake(tensor) || !tensor.has_storage()) {
    return false;
  }
  const Storage& storage = tensor.storage();
  recipe.form = formOf(tensor);
  recipe.number = find_argument([&storage](const Tensor* argument) {
    return isSameStorage(argument->unsafeGetTensorImpl()->storage(), storage);
  });
  if (recipe.number != arguments_.size()) {
    recipe.source = shared_;
  } else {
    recipe.source = Source::kNewStorage;
    recipe.number = numberOfNew(storage);
  }
  return true;
}

std::size_t RecipeLearner::numberOfNew(const Storage& storage) {
  const auto known = std::find_if(new_storages_.begin(), new_storages_.end(),
                                  [&storage](const Storage& other) { return isSameStorage(other, storage); });
  const auto number = toSize(known - new_storages_.begin());
  if (known == new_storages_.end()) {
    new_storages_.push_back(storage);
    recipe_.new_storages_.push_back({storage.nbytes(), storage.device(), isPinnedStorage(storage)});
  }
  return number;
}

IValue RecipeMaker::make(const ResultRecipe::ValueRecipe& recipe) const {
  if (recipe.is_list) {
    c10::List<Tensor> tensors;
    tensors.reserve(recipe.tensors.size());
    for (const TensorRecipe& tensor : recipe.tensors) {
      tensors.push_back(makeTensor(tensor));
    }
    return tensors;
  }
  return recipe.tensors.empty() ? recipe.other : IValue{makeTensor(recipe.tensors.front())};
}

Tensor RecipeMaker::makeTensor(const TensorRecipe& recipe) const {
  switch (recipe.source) {
    case TensorRecipe::Source::kUndefined:
      return {};
    case TensorRecipe::Source::kArgument:
      return *arguments_[recipe.number];
    case TensorRecipe::Source::kViewOfArgument:
      return makeFakeView(*arguments_[recipe.number], *recipe.form);
    case TensorRecipe::Source::kOnArgument:
      return makeFakeTensor(Storage{arguments_[recipe.number]->storage()}, *recipe.form);
    case TensorRecipe::Source::kNewStorage:
      return makeFakeTensor(new_storages_[recipe.number], *recipe.form);
  }
  return {};
}

std::shared_ptr<const ResultRecipe> ResultRecipe::learn(const c10::OperatorHandle& op,
                                                        CallTensors arguments,
                                                        bool resizes,
                                                        bool makes_values,
                                                        ArrayRef<IValue> results,
                                                        std::shared_ptr<const KernelScratch> scratch) {
  if (!hasPureKernels(op)) {
    return nullptr;
  }
  const auto recipe = std::make_shared<ResultRecipe>();
  recipe->scratch_ = std::move(scratch);
  recipe->makes_values_ = makes_values;
  recipe->kernels_ = kernelsOf(op);
  for (std::size_t i = 0; resizes && i < arguments.size(); ++i) {
    if (isFake(*arguments[i])) {
      recipe->resized_.push_back({i, formOf(*arguments[i]), arguments[i]->storage().nbytes()});
    }
  }
  RecipeLearner learner{op, arguments, *recipe};
  const bool learned =
      std::all_of(results.begin(), results.end(), [&learner](const IValue& result) { return learner.learn(result); });
  return learned ? recipe : nullptr;
}

std::shared_ptr<const ResultRecipe> ResultRecipe::refusing(const c10::OperatorHandle& op, std::exception_ptr refusal) {
  if (!hasPureKernels(op)) {
    return nullptr;
  }
  const auto recipe = std::make_shared<ResultRecipe>();
  recipe->kernels_ = kernelsOf(op);
  recipe->refusal_ = std::move(refusal);
  return recipe;
}

bool ResultRecipe::canBeMade(CallTensors arguments) const {
  return std::all_of(resized_.begin(), resized_.end(), [&](const Resized& resized) {
    return arguments[resized.number]->unsafeGetTensorImpl()->allow_tensor_metadata_change();
  });
}

Tensor ResultRecipe::makeOne(CallTensors arguments) const {
  return RecipeMaker{arguments, *this}.makeTensor(values_.front().tensors.front());
}

void ResultRecipe::resize(CallTensors arguments) const {
  for (const Resized& resized : resized_) {
    FakeTensorImpl::resizeLike(*arguments[resized.number]->unsafeGetTensorImpl(), *resized.form, resized.nbytes);
  }
}

Results ResultRecipe::make(CallTensors arguments) const {
  if (refusal_) {
    try {
      std::rethrow_exception(refusal_);
    } catch (const c10::Error& error) {
      throwCopyOf<c10::IndexError, c10::ValueError, c10::TypeError, c10::NotImplementedError, c10::LinAlgError,
                  RefusedOnCudaError>(error);
    }
  }
  resize(arguments);
  const RecipeMaker maker{arguments, *this};
  Results results;
  for (const ValueRecipe& value : values_) {
    results.push_back(maker.make(value));
  }
  return results;
}

}  // namespace torchext
