#pragma once

// A call is described before any fake is touched: its kernel runs on substitutes, usually shadows, whose changes and
// results become a recipe (result_recipe.h).
//
// NOTE [Arguments that change shape]
//
// Meta kernels do not always resize written arguments as real kernels do:
//
//   * Python functions resize an `out` contiguously, whereas a TensorIterator gives it the order of its input's
//     strides, and LAPACK needs columns.
//   * Meta kernels of in-place operators are made of functions with an `out`, and resize their argument: `a &= b` grows
//     `a`.
//   * Some kernels resize arguments that their Meta kernels leave unchanged: `_fused_moving_avg_obs_fq_helper` gives
//     its scales one element for each channel.
//   * Some kernels resize an argument twice, which leaves a larger storage (`mse_loss` with an `out`).
//
// So the trial of the call decides, if there was one (NOTE [Errors of real tensors]): fakes change like
// their stand-ins. Without a trial, the Meta kernel decides, but of PyTorch's operators only an `out`, and the
// argument of an operator with the tag `inplace_view`, may change its shape.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include "../../../libraries/support/pointer_numbers.h"
#include "../../../libraries/support/substitution.h"
#include "../cache/result_recipe.h"

namespace torchext {

// Returns a real tensor with the value of the wrapped number `number`. A fake one is zero: it is the tangent of a
// number in forward AD (`2 * dual`).
at::Tensor realNumber(const at::Tensor& number);

// Maps the storages and tensors of one call to their shadows, with which its Meta kernel is called. Shadows live as
// long as the call.
class Shadows {
 public:
  enum class Kind : std::uint8_t {
    kMeta,  // on the meta device
    kFake,  // fakes on the device of the original: NOTE [Fake implementations]
  };

  explicit Shadows(Kind kind) : kind_{kind} {}

  // Returns the shadow of `tensor`, always the same one. A real tensor also has a shadow: only its metadata matter. For
  // a tensor of another layout, returns a strided stand-in, which is not among the pairs.
  at::Tensor of(const at::Tensor& tensor);

  // Returns the shadow of `storage`.
  c10::Storage of(const c10::Storage& storage);

  // Returns all tensors and storages that have a shadow.
  const Substitution& pairs() const noexcept {
    return substitution_;
  }

 private:
  Kind kind_;
  Substitution substitution_;
};

// Describes a call whose kernel ran on substitutes of its arguments. Changes no tensor.
class RecipeBuilder {
 public:
  // `arguments`: the distinct tensors of a call of `op`. `substitutes`: the tensors and storages that the kernel
  // received and may have changed. All must outlive this object.
  RecipeBuilder(const c10::OperatorHandle& op, CallTensors arguments, const Substitution& substitutes);

  // Adds the metadata of a written argument after the call. `written` is its substitute, `real` its entry of
  // `RealResults`, or null without a trial. `has_sizes`: whether a trial had the sizes of the call. Raises c10::Error
  // if an in-place operator would change the shape, UnsupportedOperatorError for an unknown shape, and
  // NotImplementedError if the call would resize the storage of a real tensor.
  void addWritten(const at::Tensor& argument, const at::Tensor& written, const c10::IValue* real, bool has_sizes);

  // Returns the recipe of a call whose kernel returned `results`. A new tensor is on its own device if it is fake or
  // not on the meta device, else on `device`. `pins`: whether new storages are pinned. Raises NotImplementedError for
  // tensors that cannot be fake, and for views of real arguments.
  std::shared_ptr<ResultRecipe> build(c10::ArrayRef<c10::IValue> results, c10::Device device, bool pins) &&;

 private:
  using TensorRecipe = ResultRecipe::TensorRecipe;

  void addChanged(const at::Tensor& argument,
                  const at::Tensor& written,
                  c10::intrusive_ptr<c10::TensorImpl> form,
                  std::size_t nbytes);
  void addResult(const c10::IValue& result, c10::Device device);
  TensorRecipe describe(const at::Tensor& result, c10::Device device);
  std::size_t numberOf(const at::Tensor& argument) const;
  std::size_t numberOfStorage(const c10::Storage& storage, c10::Device device);

  const c10::OperatorHandle& op_;
  const CallTensors arguments_;
  const Substitution& substitutes_;
  PointerNumbers argument_numbers_;
  std::vector<c10::Storage> storages_;  // substitutes of those that the recipe lists
  std::shared_ptr<ResultRecipe> recipe_;
};

}  // namespace torchext
