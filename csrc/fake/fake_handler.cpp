#include "fake_handler.h"

#include <utility>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../stack_utils.h"
#include "device_hints.h"
#include "device_rules.h"
#include "errors.h"
#include "fake.h"
#include "fake_storage.h"
#include "fake_tensor_impl.h"
#include "op_traits.h"
#include "shadows.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using c10::TensorImpl;
using torch::jit::Stack;

namespace {

constexpr DispatchKeySet kFake{DispatchKey::Fake};
const DispatchKeySet kBelowFake{DispatchKeySet::FULL_AFTER, DispatchKey::Fake};

// `Meta` kernels allocate, view and write meta tensors. None of that is the user's: it must reach neither autograd nor
// a mode.
const DispatchKeySet kAboveMeta =
    c10::autograd_dispatch_keyset |
    DispatchKeySet({DispatchKey::Fake, DispatchKey::DeferredInit, DispatchKey::ADInplaceOrView, DispatchKey::Python,
                    DispatchKey::PythonTLSSnapshot});

// Handles one call. csrc/README.md tells the steps.
class FakeCall {
 public:
  FakeCall(const OperatorHandle& op, DispatchKeySet keys, Stack& stack)
      : op_{op}, keys_{keys}, stack_{stack}, num_arguments_{op.schema().arguments().size()} {}

  void run();

 private:
  void lookAtArguments();
  bool isPythonsFirst() const;
  bool isAboutFakes() const;
  void runOnRealTensors();
  void liftConstant();
  bool tryDecompose();
  void runOnMeta();

  void checkCanBeFaked() const;
  void refuseToWriteIntoRealTensors() const;
  void convertArgumentsToMeta(const DeviceRules& rules);
  void callMetaKernel(c10::Device device);
  void updateWrittenFakes();
  void convertOutputsToFake(c10::Device device);
  Tensor toFake(const Tensor& meta, c10::Device device);

  std::ptrdiff_t numArguments() const noexcept {
    return static_cast<std::ptrdiff_t>(num_arguments_);
  }

  const OperatorHandle& op_;
  const DispatchKeySet keys_;
  Stack& stack_;
  const std::size_t num_arguments_;
  Shadows shadows_;
  // The fake arguments that the operator writes into, by data or by metadata.
  std::vector<Tensor> written_;
  bool has_fake_ = false;
};

void FakeCall::run() {
  lookAtArguments();
  if (isPythonsFirst()) {
    op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
  } else if (!isAboutFakes()) {
    runOnRealTensors();
  } else if (isLiftFresh(op_)) {
    liftConstant();
  } else if (!tryDecompose()) {
    runOnMeta();
  }
}

void FakeCall::lookAtArguments() {
  const auto visit = [this](const Tensor& tensor) {
    if (tensor.key_set().has(DispatchKey::Fake)) {
      dropStaleKeys(tensor);
      has_fake_ = has_fake_ || isFake(tensor);
    }
  };
  forEachTensor(stack_, num_arguments_, visit);
}

// Modes and subclasses of the user's see the operator before it is faked. Before 2.13 their key is below ours.
bool FakeCall::isPythonsFirst() const {
  return keys_.has(DispatchKey::Python) && kBelowFake.has(DispatchKey::Python);
}

bool FakeCall::isAboutFakes() const {
  return has_fake_ || (c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake) && isFactory(op_, stack_));
}

// Kernels allocate their results with factories of their own, which must not be fake then.
void FakeCall::runOnRealTensors() {
  const c10::impl::ExcludeDispatchKeyGuard guard{kFake};
  op_.redispatchBoxed(keys_ & kBelowFake, &stack_);
}

void FakeCall::liftConstant() {
  const Tensor constant = torch::jit::pop(stack_).toTensor();
  torch::jit::push(stack_, isFake(constant) ? constant : fakeLike(constant));
}

// A composite operator does what the operators that it calls do, so let those come here. They arrive here whole when
// autograd is skipped, as in inference mode; the random ones always do.
bool FakeCall::tryDecompose() {
  const auto composite = compositeKernelOf(op_);
  if (!composite) {
    return false;
  }
  op_.callBoxedForDispatchKey(*composite, stack_);
  return true;
}

void FakeCall::runOnMeta() {
  checkCanBeFaked();
  refuseToWriteIntoRealTensors();
  const DeviceRules rules{op_, stack_};
  const c10::Device device = rules.outputDevice();
  const Stack arguments = decidesByDevice(op_, device) ? Stack(stack_.end() - numArguments(), stack_.end()) : Stack{};
  convertArgumentsToMeta(rules);
  callMetaKernel(device);
  if (!arguments.empty()) {
    const c10::impl::ExcludeDispatchKeyGuard guard{kAboveMeta};
    correctForDevice(op_, arguments, stack_);
  }
  updateWrittenFakes();
  convertOutputsToFake(device);
}

void FakeCall::checkCanBeFaked() const {
  if (needsValues(op_, stack_)) {
    TORCHEXT_THROW(
        DataDependentError,
        c10::str("`", op_.operator_name(),
                 "` needs the values of its arguments, but at least one is a fake tensor, which has none. Run "
                 "it on real tensors, or move it out of the code that runs on fake tensors."));
  }
  if (!op_.hasComputedKernelForDispatchKey(DispatchKey::Meta)) {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("`", op_.operator_name(),
                            "` has no Meta kernel, so its result on fake tensors cannot be told. Register one with "
                            "torch.library.register_fake(\"",
                            op_.operator_name(), "\")."));
  }
}

void FakeCall::refuseToWriteIntoRealTensors() const {
  const auto& arguments = op_.schema().arguments();
  for (const auto i : c10::irange(num_arguments_)) {
    if (!isWritten(arguments[i])) {
      continue;
    }
    const auto visit = [&](const Tensor& tensor) {
      TORCH_CHECK(isFake(tensor), "`", op_.operator_name(),
                  "` would write the result of fake tensors into the real tensor `", arguments[i].name(), "` of shape ",
                  tensor.sizes(),
                  ". Make that tensor fake too, with "
                  "torchext.fake.fake_like(), or make the other arguments real.");
    };
    forEachTensor(torch::jit::peek(stack_, i, num_arguments_), visit);
  }
}

void FakeCall::convertArgumentsToMeta(const DeviceRules& rules) {
  const auto& arguments = op_.schema().arguments();
  for (const auto i : c10::irange(num_arguments_)) {
    IValue& value = torch::jit::peek(stack_, i, num_arguments_);
    if (static_cast<int>(i) == rules.deviceArgument()) {
      value = c10::Device{c10::kMeta};
    } else if (value.isBool() && arguments[i].name() == "pin_memory") {
      value = false;  // there is nothing to pin, and the meta device refuses to
    } else if (value.isGenerator()) {
      value = IValue{};  // nothing is drawn, and Meta kernels that are Python functions refuse it
    } else if (value.isStorage()) {
      value = shadows_.of(value.toStorage());
    } else if (!value.isNone()) {
      const bool is_written = isWritten(arguments[i]);
      const auto to_meta = [&](const Tensor& tensor) {
        if (is_written) {
          written_.push_back(tensor);
        }
        return shadows_.of(tensor);
      };
      value = mapTensors(value, to_meta);
    }
  }
}

void FakeCall::callMetaKernel(c10::Device device) {
  const MetaCallOnDevice hint{device};
  const c10::impl::ExcludeDispatchKeyGuard guard{kAboveMeta};
  try {
    op_.redispatchBoxed(DispatchKeySet{DispatchKey::Meta}, &stack_);
  } catch (const c10::NotImplementedError& error) {
    // A kernel is registered, but only says that there is none, or none for these arguments.
    TORCHEXT_THROW(
        UnsupportedOperatorError,
        c10::str("`", op_.operator_name(), "` cannot be run on fake tensors: ", error.what_without_backtrace()));
  }
}

// In-place operators may change more than data: `resize_`, `set_`, `t_` and their kin change the metadata of the
// shadow, and the fake follows.
void FakeCall::updateWrittenFakes() {
  for (const Tensor& fake : written_) {
    const Tensor shadow = shadows_.of(fake);
    const Storage storage = shadows_.originalOf(shadow.storage(), fake.device());
    auto* impl = dynamic_cast<FakeTensorImpl*>(fake.unsafeGetTensorImpl());
    if (impl == nullptr) {
      continue;  // a real tensor that was given fake `.data`: its kernels write data only
    }
    if (!isSameStorage(storage, fake.storage())) {
      impl->moveTo(storage);  // which makes it a real tensor if the storage is real, as `torch.load()` does
    }
    if (isFakeStorage(storage)) {
      storage.unsafeGetStorageImpl()->set_nbytes(shadow.storage().nbytes());
    }
    impl->copyGeometry(*shadow.unsafeGetTensorImpl());
  }
}

void FakeCall::convertOutputsToFake(c10::Device device) {
  const auto to_fake = [&](const Tensor& meta) { return toFake(meta, device); };
  mapTensors(stack_, op_.schema().returns().size(), to_fake);
}

Tensor FakeCall::toFake(const Tensor& meta, c10::Device device) {
  Tensor original = shadows_.originalOf(*meta.unsafeGetTensorImpl());
  if (original.defined()) {
    return original;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(meta.layout() == c10::kStrided && meta.has_storage(), "`", op_.operator_name(),
                              "` returns a tensor of layout ", meta.layout(),
                              ", but fake tensors are strided. Call it on real tensors.");
  TensorImpl& meta_impl = *meta.unsafeGetTensorImpl();
  Storage storage = shadows_.originalOf(meta.storage(), device);
  TORCH_CHECK_NOT_IMPLEMENTED(isFakeStorage(storage), "`", op_.operator_name(),
                              "` returns a view of a real argument although another argument "
                              "is fake. Make all its arguments fake, with torchext.fake.fake_like(), or all real.");
  c10::intrusive_ptr<FakeTensorImpl> fake;
  if (const Tensor* base = shadows_.findTensorOn(storage)) {
    // Whether a view is an inference tensor is decided by its base.
    fake = c10::make_intrusive<FakeTensorImpl>(TensorImpl::VIEW, std::move(storage), base->key_set(), meta.dtype());
  } else {
    const DispatchKeySet backend_keys = fakeBackendKeys(meta.scalar_type(), storage.device());
    fake = c10::make_intrusive<FakeTensorImpl>(std::move(storage), backend_keys, meta.dtype());
  }
  fake->copyGeometry(meta_impl);
  return Tensor{std::move(fake)};
}

}  // namespace

void fakeFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  try {
    FakeCall{op, keys, *stack}.run();
  } catch (const DataDependentError& error) {
    translateError(ErrorKind::kDataDependent, error);
    throw;
  } catch (const UnsupportedOperatorError& error) {
    // The recorder, which excludes its key while it runs an operator as a fake one, runs it for real then.
    if (!c10::impl::tls_is_dispatch_key_excluded(DispatchKey::DeferredInit)) {
      translateError(ErrorKind::kUnsupportedOperator, error);
    }
    throw;
  }
}

}  // namespace torchext
