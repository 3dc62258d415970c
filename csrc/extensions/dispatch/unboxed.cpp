// NOTE [Unboxed calls]
//
// The fallback of the `Fake` key is called with boxed arguments. Boxing costs more than a view of a real tensor: a
// tensor that only Python holds gets a second reference, for which PyTorch takes the interpreter's lock, and lists of
// numbers are copied. So the operators that training loops call most have an unboxed kernel on the key. It describes
// the call by the same CallKey, and makes its results if the cache remembers them. It passes all other calls to the
// fallback, boxed, as the dispatcher does without such a kernel. A few operators need no key: aliases, fields of sparse
// tensors, and reading a known value. If the key is shared, all calls go to the fallback.

// NOTE [Resizing to the same size]
//
// Code that writes its results to a given tensor first calls `resize_()`, which mostly changes nothing. On a real
// tensor that costs three lookups in the dispatch table. To cost about the same on a fake one, the keys `Fake` and
// `DeferredInit` each have a kernel for `resize_` that checks the size first and passes on all other calls.

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/Operators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../core/deferred_init/record/recorder.h"
#include "../../core/fake/cache/call_key.h"
#include "../../core/fake/cache/result_recipe.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/fake/storage/fake_storage.h"
#include "../../core/fake/storage/fake_tensor_impl.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../composites/versions.h"
#include "../layouts/sparse_fakes.h"
#include "../support/registrations.h"
#include "../values/known_bytes.h"
#include "../values/known_values.h"
#include "hit_checks.h"

namespace torchext {

using at::Scalar;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::MemoryFormat;
using c10::SymIntArrayRef;

namespace {

bool needsHandler(const Tensor& fake) {
  return mayHaveProvenance(fake) && (hooks().recorder.concerns || hooks().values.has(fake));
}

// Returns true if a call of `tensors` needs its boxed arguments. `num_fakes` of them are fake.
bool needsHandler(ArrayRef<const Tensor*> tensors, std::size_t num_fakes) {
  if (num_fakes == 0 && !isFakeMode()) {
    return true;
  }
  if (num_fakes == tensors.size()) {
    return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* fake) { return needsHandler(*fake); });
  }
  // Stale keys are dropped by the handler.
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
    return isFake(*tensor) ? needsHandler(*tensor)
                           : tensor->key_set().has(DispatchKey::Fake) || hooks().values.mayBeChecked(*tensor);
  });
}

// Returns true if the results of `op` alone are not enough on this thread, for example because calls are recorded.
bool callsNeedHandler(const OperatorHandle& op) {
  const MemoryCounter* const counter = memoryCounter();
  return isRecording() || isInFakeImplementation() || hooks().values.areAssumed() ||
         (counter != nullptr && counter->observes(op)) ||
         c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit);
}

// Returns the recipe of an unboxed call that the cache remembers: NOTE [Unboxed calls]. Returns null for calls whose
// tensors need more than their recipe, or boxed arguments. The caller has checked `callsNeedHandler()`. `gives_values`:
// whether the caller gives the results the values that a factory makes.
std::shared_ptr<const ResultRecipe> recipeOfHit(const CallKey& key, bool gives_values) {
  if (!key.isComplete() || needsHandler(key.tensors(), key.numFakes())) {
    return nullptr;
  }
  const auto has_results = [](const ResultRecipe& found) { return !found.refuses(); };
  const auto has_only_results = [](const ResultRecipe& found) { return !found.refuses() && !found.makesValues(); };
  auto recipe = metadataCache().find(key, gives_values ? MetadataCache::Wanted{has_results} : has_only_results);
  return recipe != nullptr && recipe->canBeMade(key.tensors()) ? recipe : nullptr;
}

template <typename Return>
struct Returned {
  static Return of(IValue* results) {
    return std::move(*results).to<Return>();
  }
};

template <typename... Elements>
struct Returned<std::tuple<Elements...>> {
  static std::tuple<Elements...> of(IValue* results) {
    return make(results, std::index_sequence_for<Elements...>{});
  }

 private:
  template <std::size_t... Is>
  static std::tuple<Elements...> make(IValue* results, std::index_sequence<Is...> /*positions*/) {
    return {std::move(results[Is]).template to<Elements>()...};
  }
};

// Returns the argument that an operator returns: `out`, the only reference that is not constant, or `self`, which is
// constant in `resize_` and others.
template <typename Return, typename First, typename... Others>
Return writtenOf(First& first, Others&... others) {
  if constexpr (sizeof...(Others) == 0 || std::is_same_v<First, std::remove_reference_t<Return>>) {
    return first;
  } else {
    return writtenOf<Return>(others...);
  }
}

template <typename Operator, typename... Operators>
constexpr bool kIsAmong = (std::is_same_v<Operator, Operators> || ...);

template <typename Operator>
constexpr bool kMakesFill = kIsAmong<Operator, at::_ops::zeros, at::_ops::zeros_like, at::_ops::ones>;

// Factories that are given their values here: NOTE [Known values].
template <typename Operator>
constexpr bool kMakesValues = kMakesFill<Operator> || kIsAmong<Operator, at::_ops::arange, at::_ops::arange_start_step>;

// Returns true if a mode or a subclass must receive the call first. Before 2.13: FakeCall::mustPassToPython().
bool isForPython(DispatchKeySet keys) {
  return (keys & kBelowFake).has(DispatchKey::Python);
}

// Counts the memory that the kernel of a call allocates: `scratch`, if any, and its results, which `results` returns.
template <typename MakeResults>
void countHit(const OperatorHandle& op, const KernelScratch* scratch, const MakeResults& results) {
  if (takeUncounted() || scratch != nullptr) {
    memoryCounter()->runKernel(op, scratch, results());
  }
}

template <typename Operator, typename Schema = typename Operator::schema>
struct UnboxedKernel;

// The kernel of `Operator`, one of the classes in `at::_ops`.
template <typename Operator, typename Return, typename... Arguments>
struct UnboxedKernel<Operator, Return(Arguments...)> {
  static OperatorHandle handle() {
    return c10::Dispatcher::singleton().findSchemaOrThrow(Operator::name, Operator::overload_name);
  }

  static Return call(DispatchKeySet keys, Arguments... arguments) {
    static const OperatorHandle op = handle();
    static const CallKey::Traits traits{op};
    if (!isForPython(keys) && !callsNeedHandler(op)) {
      const CallKey key{op, traits, arguments...};
      if (hooks().hit_checks.areDue()) {
        checkKey(op, key, arguments...);
      } else if (const auto recipe = recipeOfHit(key, kMakesValues<Operator>)) {
        return make(op, *recipe, key.tensors(), arguments...);
      }
    }
    static const auto fallback = c10::KernelFunction::makeFromBoxedFunction<&fakeFallback>();
    return fallback.template call<Return, Arguments...>(op, keys, std::forward<Arguments>(arguments)...);
  }

 private:
  static Return make(const OperatorHandle& op,
                     const ResultRecipe& recipe,
                     ArrayRef<const Tensor*> tensors,
                     std::remove_reference_t<Arguments>&... arguments) {
    if constexpr (std::is_void_v<Return> || std::is_reference_v<Return>) {
      recipe.changeArguments(tensors);
      countHit(op, recipe.scratch(), [&] { return recipe.make(tensors); });
      if constexpr (std::is_void_v<Return>) {
        countVersions(std::get<0>(std::tie(arguments...)));  // a foreach operator
      } else {
        return writtenOf<Return>(arguments...);
      }
    } else if constexpr (std::is_same_v<Return, Tensor>) {
      Tensor result = recipe.makeOne(tensors);
      countHit(op, recipe.scratch(), [&] { return Results{result}; });
      if constexpr (kMakesValues<Operator>) {
        if (recipe.makesValues() && isFakeMode()) {
          giveValues(op, result, arguments...);
        }
        countFill(result);
      }
      return result;
    } else {
      Results results = recipe.make(tensors);
      countHit(op, recipe.scratch(), [&]() -> const Results& { return results; });
      return Returned<Return>::of(results.data());
    }
  }

  static void giveValues(const OperatorHandle& op, const Tensor& result, const Arguments&... arguments) {
    if constexpr (kMakesFill<Operator>) {
      setFill(result, std::is_same_v<Operator, at::_ops::ones>);
    } else {
      const auto [start, end, step] = *rangeOf(op, {IValue(arguments)...});
      setRange(result, start, end, step);
    }
  }

  // NOTE [Checking hits]
  static void checkKey(const OperatorHandle& op, const CallKey& key, const Arguments&... arguments) {
    const CallKey boxed{op, {IValue(arguments)...}};
    TORCH_INTERNAL_ASSERT(key.isComplete() == boxed.isComplete() && (!key.isComplete() || key.words() == boxed.words()),
                          "an unboxed call of `", op.operator_name(), "` has another key than a boxed one");
    checkNextHit();
  }
};

// Returns true if a call needs neither Python nor the handler, and no comparison: NOTE [Checking hits].
bool isAnsweredHere(const OperatorHandle& op, DispatchKeySet keys) {
  return !isForPython(keys) && !callsNeedHandler(op) && !hooks().hit_checks.areDue();
}

// An operator that returns an alias of its argument with the same geometry, which a recipe would only copy.
template <typename Operator>
Tensor aliasFake(DispatchKeySet keys, const Tensor& self) {
  using Kernel = UnboxedKernel<Operator>;
  static const OperatorHandle op = Kernel::handle();
  static const auto kernels = hasPureKernels(op) ? std::optional{kernelsOf(op)} : std::nullopt;
  if (isAnsweredHere(op, keys) && kernels && areUnchanged(*kernels, op) && isPlainFake(self) && !needsHandler(self)) {
    Tensor result = makeFakeView(self, *self.unsafeGetTensorImpl());
    countHit(op, /*scratch=*/nullptr, [&] { return Results{result}; });
    return result;
  }
  return Kernel::call(keys, self);
}

// An operator that returns or sets a field of a sparse tensor, by the same kernel on all devices.
template <typename Operator, typename Schema = typename Operator::schema>
struct SparseField;

template <typename Operator, typename Return, typename Self, typename... Others>
struct SparseField<Operator, Return(Self, Others...)> {
  static Return call(DispatchKeySet keys, Self self, Others... others) {
    static const OperatorHandle op = UnboxedKernel<Operator>::handle();
    if (isAnsweredHere(op, keys) && !hooks().recorder.concerns && isSparseFake(self)) {
      const DispatchKey kernel = c10::computeDispatchKey(c10::kFloat, self.layout(), c10::kCPU);
      if (op.hasComputedKernelForDispatchKey(kernel)) {
        return Operator::redispatch(DispatchKeySet{kernel}, self, others...);
      }
    }
    return UnboxedKernel<Operator>::call(keys, self, others...);
  }
};

// Reads a known value: `item()`.
Scalar readKnown(DispatchKeySet keys, const Tensor& self) {
  using Operator = at::_ops::_local_scalar_dense;
  static const OperatorHandle op = UnboxedKernel<Operator>::handle();
  if (isAnsweredHere(op, keys)) {
    if (const Tensor value = knownValueOf(self); value.defined() && !value.key_set().has_any(kLazyBits)) {
      return Operator::redispatch(DispatchKeySet{DispatchKey::CPU}, value);
    }
  }
  return UnboxedKernel<Operator>::call(keys, self);
}

// NOTE [Resizing to the same size]. Decides as `resize_impl_cpu_()` does. With a memory format the strides may change.
bool isResizeToSameSize(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  return !format && self.has_storage() && isFake(self) && self.sym_sizes() == size;
}

const OperatorHandle& resizeOperator() {
  static const OperatorHandle op = UnboxedKernel<at::_ops::resize_>::handle();
  return op;
}

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter): so do all in-place operators

const Tensor& resizeFake(DispatchKeySet keys,
                         const Tensor& self,
                         SymIntArrayRef size,
                         std::optional<MemoryFormat> format) {
  const bool is_done = isResizeToSameSize(self, size, format) && !isForPython(keys);
  return is_done ? self : UnboxedKernel<at::_ops::resize_>::call(keys, self, size, format);
}

const Tensor& resizeDeferred(DispatchKeySet keys,
                             const Tensor& self,
                             SymIntArrayRef size,
                             std::optional<MemoryFormat> format) {
  if (isResizeToSameSize(self, size, format)) {
    const DispatchKeySet below{DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit};
    return at::_ops::resize_::redispatch(keys & below, self, size, format);
  }
  static const auto fallback = c10::KernelFunction::makeFromBoxedFunction<&deferredInitFallback>();
  return fallback.call<const Tensor&, const Tensor&, SymIntArrayRef, std::optional<MemoryFormat>>(
      resizeOperator(), keys, self, size, format);
}

// NOLINTEND(bugprone-return-const-ref-from-parameter)

// Handles the boxed calls of `resize_` to the same size.
class NothingToResize final : public CallHandler {
 public:
  constexpr NothingToResize() = default;

  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& /*facts*/) const override {
    if (op != resizeOperator()) {
      return std::nullopt;
    }
    const auto arguments = argumentsOf(op, stack);
    if (!isResizeToSameSize(arguments[0].toTensor(), arguments[1].toSymIntVector(),
                            arguments[2].toOptional<MemoryFormat>())) {
      return std::nullopt;
    }
    return HandledCall{nullptr, HandledCall::Effect::kComputes, "the argument has this size already"};
  }

  void run(const OperatorHandle& op, DispatchKeySet /*below*/, Stack& stack) const override {
    torch::jit::drop(stack, op.schema().arguments().size() - 1);
  }
};

template <template <typename...> class Kernel, typename Operator>
void registerOne(torch::Library& library) {
  const std::string name = c10::toString(UnboxedKernel<Operator>::handle().operator_name());
  library.impl(name.c_str(), TORCH_FN((Kernel<Operator, typename Operator::schema>::call)));
}

template <typename... Operators>
void registerAll(torch::Library& library) {
  (registerOne<UnboxedKernel, Operators>(library), ...);
}

template <typename... Operators>
void registerFields(torch::Library& library) {
  (registerOne<SparseField, Operators>(library), ...);
}

void registerKernelsOnFake() {
  if (isFakeKeyShared()) {
    return;
  }
  torch::Library& library = permanentLibrary(DispatchKey::Fake);
  library.impl("resize_", &resizeFake);
  library.impl("alias", &aliasFake<at::_ops::alias>);
  library.impl("detach", &aliasFake<at::_ops::detach>);
  library.impl("_local_scalar_dense", &readKnown);
  using namespace at::_ops;  // NOLINT(google-build-using-namespace): only the names of operators
  // Views.
  registerAll<view, t, transpose_int, slice_Tensor, select_int, expand, permute, unsqueeze, squeeze, squeeze_dim,
              split_Tensor, as_strided, _unsafe_view, unbind_int, diagonal>(library);
  // Changes of metadata.
  registerAll<t_, transpose_, unsqueeze_, squeeze__dim, set__source_Tensor>(library);
  // Factories.
  registerAll<empty_memory_format, empty_like, empty_strided, new_empty, at::_ops::clone, _to_copy, zeros_like>(
      library);
  registerAll<zeros, ones, arange, arange_start_step>(library);
  registerFields<_nnz, _indices, _values, sparse_dim, dense_dim, is_coalesced, _coalesced_, at::_ops::values,
                 crow_indices, col_indices, ccol_indices, row_indices>(library);
  // Forward and backward passes.
  registerAll<mm, bmm, addmm, add_Tensor, sub_Tensor, mul_Tensor, mul_Scalar, div_Tensor, div_Scalar, neg, sum,
              sum_dim_IntList, mean_dim, pow_Tensor_Scalar, rsqrt, at::_ops::sqrt, cat, relu, threshold_backward, silu,
              silu_backward, gelu, gelu_backward, _softmax, _softmax_backward_data, native_layer_norm,
              native_layer_norm_backward, slice_backward, copy_, add_out>(library);
  // Accumulation of gradients, and optimizers.
  registerAll<add__Tensor, mul__Tensor, mul__Scalar, div__Scalar, lerp__Scalar, addcmul_, addcdiv_, zero_,
              _foreach_add__Scalar, _foreach_add__List, _foreach_add__Tensor, _foreach_mul__Scalar,
              _foreach_mul__Tensor, _foreach_lerp__Scalar, _foreach_addcmul__Scalar, _foreach_addcdiv__Scalar,
              _foreach_addcdiv__ScalarList, _foreach_div__ScalarList, _foreach_sqrt, _foreach_norm_Scalar>(library);
}

}  // namespace

void registerUnboxedCalls() {
  static constexpr NothingToResize nothing;
  hooks().handlers.add(&nothing);
  hooks().on_fake_key.add(&registerKernelsOnFake);
  hooks().on_deferred_init_key = [] { permanentLibrary(DispatchKey::DeferredInit).impl("resize_", &resizeDeferred); };
}

}  // namespace torchext
