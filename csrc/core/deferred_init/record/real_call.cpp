#include "real_call.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include "../../../libraries/support/plain_tensors.h"
#include "../../../libraries/support/stack_utils.h"
#include "../../../libraries/support/substitution.h"
#include "../../fake/calls/op_traits.h"
#include "../../fake/fake.h"
#include "../../fake/storage/fake_keys.h"
#include "../../fake/storage/fake_storage.h"
#include "../../fake/storage/fake_tensor_impl.h"
#include "../graph/op_graph.h"
#include "../replay/replay.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

namespace {

constexpr DispatchKeySet kOurs({DispatchKey::DeferredInit, DispatchKey::Fake});

// Returns the deferred tensors of a call, and real ones with the same values. Tensors that share a storage still do.
Substitution realArguments(const Stack& stack, std::size_t count, bool keep_small) {
  std::vector<StorageValuePtr> values;
  std::vector<std::pair<Tensor, std::size_t>> deferred;  // and the numbers of their values
  forEachTensor(topOf(stack, count), [&](const Tensor& tensor) {
    if (StorageValuePtr value = valueOf(tensor)) {
      const auto known = std::find(values.begin(), values.end(), value);
      deferred.emplace_back(tensor, toSize(known - values.begin()));
      if (known == values.end()) {
        values.push_back(std::move(value));
      }
    }
  });
  const std::vector<Storage> storages = computeValues(values, keep_small, CacheUse::kReadsAndWrites);
  Substitution real;
  for (const auto& [tensor, number] : deferred) {
    // The tensor's kind, not the current mode, determines whether its versions are counted and writes are refused.
    const c10::InferenceMode mode{tensor.is_inference()};
    if (real.substituteOf(tensor) == nullptr) {
      real.add(tensor, Geometry::of(tensor).makeTensor(storages[number]));
    }
  }
  return real;
}

// Returns the deferred tensors that the call writes. Sets `writes_any` if it writes any tensor, deferred or real.
std::vector<Tensor> writtenDeferred(const OperatorHandle& op, const Stack& stack, bool& writes_any) {
  std::vector<Tensor> written;
  const std::size_t count = op.schema().arguments().size();
  for (const auto i : c10::irange(count)) {
    if (!writesArgument(op, stack, i)) {
      continue;
    }
    writes_any = true;
    forEachTensor(torch::jit::peek(stack, i, count), [&written](const Tensor& tensor) {
      if (valueOf(tensor) != nullptr) {
        written.push_back(tensor);
      }
    });
  }
  return written;
}

// The version counter of `real` began at 0, and an operator with an `out` argument may have resized it.
void followMetadata(const Tensor& fake, const Tensor& real) {
  for (int64_t i = 0; !fake.is_inference() && i < real._version(); ++i) {
    fake.unsafeGetTensorImpl()->bump_version();
  }
  FakeTensorImpl::resizeLike(*fake.unsafeGetTensorImpl(), *real.unsafeGetTensorImpl(), real.storage().nbytes());
}

// Returns true if `tensor` is one of `values`, or shows the memory of one.
bool showsOneOf(const Tensor& tensor, ArrayRef<IValue> values) {
  return hasTensor(values, [&tensor](const Tensor& value) {
    return value.is_same(tensor) ||
           (value.has_storage() && tensor.has_storage() && isSameStorage(value.storage(), tensor.storage()));
  });
}

// The memory of a file (`torch.from_file()`) has no allocator. Other processes may map it, so the tensor stays real.
// The caller owns the results of a custom operator.
bool isExternalMemory(const OperatorHandle& op, const Tensor& result) {
  return namespaceOf(op.operator_name()) == "aten" && result.storage().allocator() == nullptr;
}

// Returns true if the operator overwrites the `index`th tensor argument of `node`, whose values it does not need.
bool needsNoValues(const OpNode& node, std::size_t index) {
  constexpr std::array<std::string_view, 2> kNames{"aten::bernoulli_", "torchext::trunc_normal_"};
  return index == 0 && isAmong(kNames, node.op().schema().name());
}

// Returns the tensor arguments of `node`, with copies of its deferred ones. They have the recorded geometry: the fake
// of an `out` may have been resized since, but its storage has the old value.
std::vector<Tensor> scratchTensors(const OpNode& node) {
  const std::vector<TensorArgument>& arguments = node.tensors();
  std::vector<StorageValuePtr> values;
  for (const auto i : c10::irange(arguments.size())) {
    if (arguments[i].value != nullptr && !needsNoValues(node, i) &&
        std::find(values.begin(), values.end(), arguments[i].value) == values.end()) {
      values.push_back(arguments[i].value);
    }
  }
  const std::vector<Storage> storages = computeValues(values, /*keep_small=*/false, CacheUse::kReadsAndWrites);
  const RealDispatch guard;
  std::vector<Tensor> tensors;
  for (const auto i : c10::irange(arguments.size())) {
    const TensorArgument& argument = arguments[i];
    if (argument.number) {
      tensors.push_back(at::native::wrapped_scalar_tensor(*argument.number));
    } else if (argument.external != nullptr) {
      tensors.push_back(argument.external->tensor());
    } else if (argument.value == nullptr || needsNoValues(node, i)) {
      const c10::Device device = argument.device ? *argument.device : argument.value->device();
      tensors.push_back(argument.geometry().makeEmptyTensor(device));
    } else {
      const auto found = std::find(values.begin(), values.end(), argument.value) - values.begin();
      tensors.push_back(argument.geometry().makeTensor(storages[toSize(found)]));
    }
  }
  return tensors;
}

// An `out` that may be resized carries a bit of the meta device (NOTE [Shortcuts that read values]). Its real tensor
// must run the kernels of its device, so the bit is removed.
DispatchKeySet keysOfReal(DispatchKeySet keys, const Stack& stack, std::size_t count) {
  const bool is_marked = hasTensor(topOf(stack, count), &ResizableOutputs::isOne);
  return (is_marked ? keys.remove_backend(kWithoutValues) : keys) & kBelowFake;
}

}  // namespace

void callForReal(const OperatorHandle& op, DispatchKeySet keys, Stack& stack) {
  const auto count = op.schema().arguments().size();
  bool writes_any = false;
  const std::vector<Tensor> written = writtenDeferred(op, stack, writes_any);
  const Substitution arguments = realArguments(stack, count, /*keep_small=*/!writes_any);
  const auto real_of = [&arguments](const Tensor& tensor) {
    const Tensor* real = arguments.substituteOf(tensor);
    return real == nullptr ? tensor : *real;
  };
  const DispatchKeySet keys_of_real = keysOfReal(keys, stack, count);
  {
    const c10::impl::ExcludeDispatchKeyGuard guard{kOurs};
    mapTensors(stack, count, real_of);
    const Stack called(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    op.redispatchBoxed(keys_of_real, &stack);
    const auto to_deferred = [&](const Tensor& result) {
      if (const Tensor* original = arguments.originalOf(*result.unsafeGetTensorImpl())) {
        return *original;
      }
      if (!isPlain(result) || isExternalMemory(op, result)) {
        return result;
      }
      if (arguments.originalWithSubstituteOn(result.storage()) != nullptr) {
        return deferConstant(result.clone());
      }
      return showsOneOf(result, called) ? result : deferConstant(result);
    };
    mapTensors(stack, op.schema().returns().size(), to_deferred);
  }
  for (const Tensor& tensor : written) {
    const Tensor real = real_of(tensor);
    followMetadata(tensor, real);
    setValue(tensor.storage(), std::make_shared<StorageValue>(real.storage()));
  }
}

void callInScratch(const OpNode& node) {
  Stack stack = node.arguments(scratchTensors(node));
  const RealDispatch guard;
  node.op().callBoxed(stack);
}

Tensor deferConstant(const Tensor& constant) {
  Tensor deferred = fakeLike(constant);
  setValue(deferred.storage(), std::make_shared<StorageValue>(constant.storage()));
  return deferred;
}

namespace {

// Returns true if all fakes in `arguments` are deferred.
bool haveRecords(const Stack& arguments) {
  return allTensors(arguments, [](const Tensor& tensor) { return !isFake(tensor) || valueOf(tensor) != nullptr; });
}

bool isDeferredIndex(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && valueOf(tensor) != nullptr;
}

// Replaces deferred integer tensors by real ones, except for arguments that results may alias. Returns true if there
// are any.
bool computeIndices(const OperatorHandle& op, Stack& arguments) {
  bool has_any = false;
  for (const auto i : c10::irange(arguments.size())) {
    if (op.schema().arguments()[i].alias_info() != nullptr) {
      continue;
    }
    arguments[i] = mapTensors(arguments[i], [&has_any](const Tensor& tensor) {
      if (!isDeferredIndex(tensor)) {
        return tensor;
      }
      has_any = true;
      return computeTensor(tensor);
    });
  }
  return has_any;
}

// A call that can be repeated.
class Composite {
 public:
  Composite(const OperatorHandle& op, DispatchKeySet below, Stack& stack)
      : op_{op},
        below_{below},
        stack_{stack},
        bottom_{stack.size() - op.schema().arguments().size()},
        arguments_(stack.begin() + static_cast<std::ptrdiff_t>(bottom_), stack.end()) {}

  void run() {
    if (tryCall() || tryWithRealFactories()) {
      return;
    }
    if (computeIndices(op_, arguments_) && (tryAgain() || tryWithRealFactories())) {
      return;
    }
    putBack();
    refuseToLoseGradients();
    callForReal(op_, below_, stack_);
  }

 private:
  // Returns false if the kernel reads the memory of a deferred tensor.
  bool tryCall() {
    try {
      op_.redispatchBoxed(below_, &stack_);
      return true;
    } catch (const c10::Error& error) {
      if (!isNoDataError(error) || !haveRecords(arguments_)) {
        throw;
      }
      return false;
    }
  }

  // For kernels that access the memory of tensors that they allocate: NOTE [Composites that read memory].
  bool tryWithRealFactories() {
    const RealFactoriesGuard guard;
    return tryAgain();
  }

  bool tryAgain() {
    putBack();
    return tryCall();
  }

  void refuseToLoseGradients() const {
    const auto needs_gradient = [](const Tensor& tensor) {
      return tensor.requires_grad() && valueOf(tensor) != nullptr;
    };
    TORCH_CHECK(!c10::GradMode::is_enabled() || !hasTensor(topOf(arguments_, arguments_.size()), needs_gradient), "`",
                op_.operator_name(),
                "` reads the values of a deferred tensor that requires gradients, which would be lost. Materialize the "
                "tensor first, or make the call under torch.no_grad().");
  }

  // Restores the arguments that a failed call has consumed.
  void putBack() {
    stack_.resize(bottom_);
    stack_.insert(stack_.end(), arguments_.begin(), arguments_.end());
  }

  const OperatorHandle& op_;
  const DispatchKeySet below_;
  Stack& stack_;
  const std::size_t bottom_;
  Stack arguments_;
};

}  // namespace

void callComposite(const OperatorHandle& op, DispatchKeySet below, Stack& stack) {
  Composite{op, below, stack}.run();
}

}  // namespace torchext
