#include "meta_call.h"

#include <exception>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include "../../interrupts.h"
#include "../../stack_utils.h"
#include "../errors.h"
#include "../fake.h"
#include "../hidden_keys.h"
#include "../op_traits.h"
#include "../recording.h"
#include "../storage/fake_storage.h"
#include "../storage/fake_tensor_impl.h"
#include "device_hints.h"
#include "device_rules.h"
#include "memory_overlap.h"
#include "meta_kernel.h"
#include "refusals.h"
#include "shadows.h"
#include "zeros_call.h"

namespace torchext {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using c10::TensorImpl;
using torch::jit::Stack;

namespace {

// Meta kernels in Python call functions of torch, which are not the user's either: a TorchFunctionMode must not see
// them.
class NoTorchFunction {
 public:
  NoTorchFunction() : previous_{TorchFunctionTLS::get_disabled_state()} {
    TorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;
  NoTorchFunction(NoTorchFunction&&) = delete;
  NoTorchFunction& operator=(NoTorchFunction&&) = delete;
  ~NoTorchFunction() {
    TorchFunctionTLS::set_disabled_state(previous_);
  }

 private:
  using TorchFunctionTLS = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState previous_;
};

// `as_strided()` checks this on all devices but the meta device (`checkInBoundsForStorage`, Resize.h).
void checkInBounds(const TensorImpl& view, const Storage& storage) {
  TORCH_CHECK(view.storage_offset() >= 0, "Tensor: invalid storage offset ", view.storage_offset());
  const std::size_t itemsize = view.dtype().itemsize();
  const std::size_t needed = at::detail::computeStorageNbytes(view.sizes(), view.strides(), itemsize,
                                                              static_cast<std::size_t>(view.storage_offset()));
  TORCH_CHECK(view.numel() == 0 || needed <= storage.nbytes(), "setStorage: sizes ", view.sizes(), ", strides ",
              view.strides(), ", storage offset ", view.storage_offset(), ", and itemsize ", itemsize,
              " requiring a storage size of ", needed, " are out of bounds for storage of size ", storage.nbytes());
}

class MetaCall {
 public:
  MetaCall(const OperatorHandle& op, Stack& stack)
      : op_{op},
        stack_{stack},
        num_arguments_{op.schema().arguments().size()},
        bottom_{stack.size() - num_arguments_} {}

  void run();

 private:
  c10::Device prepare();
  bool runWithoutMetaKernel(const Stack& arguments, std::optional<c10::Device> device, const std::exception& error);
  void checkCanBeFaked() const;
  void convertArgumentsToMeta(const DeviceRules& rules);
  void callMetaKernel(c10::Device device);
  bool tryOnZeros(Stack arguments, c10::Device device);
  void correctMetaResults(const Stack& arguments, c10::Device device, const RealResults& real);
  void updateWrittenFakes();
  void convertOutputsToFake(c10::Device device);
  Tensor toFake(const Tensor& meta, c10::Device device);

  const OperatorHandle& op_;
  Stack& stack_;
  const std::size_t num_arguments_;
  const std::size_t bottom_;  // where the arguments begin
  Shadows shadows_;
  // The fake arguments that the operator writes into, by data or by metadata.
  std::vector<Tensor> written_;
};

void MetaCall::run() {
  const Stack arguments(stack_.end() - static_cast<std::ptrdiff_t>(num_arguments_), stack_.end());
  std::optional<c10::Device> device;
  try {
    device = prepare();
    callMetaKernel(*device);
  } catch (const DataDependentError&) {
    refuseAsRealIfCheap(op_, arguments);  // whose kernel computes when it does not refuse
    throw;
  } catch (const std::exception& error) {
    if (isInterrupt(error) || !runWithoutMetaKernel(arguments, device, error)) {
      throw;
    }
    return;
  }
  RealResults real;
  if (!needsValues(op_, arguments)) {  // which stand-ins do not have
    real = refuseAsReal(op_, arguments, topOf(stack_, op_.schema().returns().size()));
  }
  correctMetaResults(arguments, *device, real);
  updateWrittenFakes();
  convertOutputsToFake(*device);
}

// What a smaller call has shown is less certain than what is known of the device, and what this call has shown is more.
void MetaCall::correctMetaResults(const Stack& arguments, c10::Device device, const RealResults& real) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  if (device.is_cpu() && !real.has_sizes) {
    correctByReal(real, op_, stack_);
  }
  if (decidesByDevice(op_, device)) {
    correctForDevice(op_, arguments, device, stack_);
  }
  if (device.is_cpu() && real.has_sizes) {
    correctByReal(real, op_, stack_);
  }
}

c10::Device MetaCall::prepare() {
  checkCanBeFaked();
  refuseToWriteIntoRealTensors(op_, stack_);
  checkMemoryOverlap(op_, stack_);
  const DeviceRules rules{op_, stack_};
  const c10::Device device = rules.outputDevice();
  convertArgumentsToMeta(rules);
  return device;
}

// Called when preparing, or the Meta kernel on `device`, has raised `error`. Raises what real tensors would raise, NOTE
// [Refusing what real tensors refuse], or what makes the recorder run the operator for real. Returns true when there
// are results of the kernel for the CPU in the place of the arguments, and false when `error` stands.
bool MetaCall::runWithoutMetaKernel(const Stack& arguments,
                                    std::optional<c10::Device> device,
                                    const std::exception& error) {
  if (!device) {
    refuseAsReal(op_, arguments);
    return false;
  }
  // A kernel is registered, but only says that there is none, or none for these arguments.
  const auto* missing = dynamic_cast<const c10::NotImplementedError*>(&error);
  if (missing != nullptr && !isRecording() && tryOnZeros(arguments, *device)) {
    return true;
  }
  const bool is_accepted = refuseAsReal(op_, arguments);
  if (missing != nullptr) {
    TORCHEXT_THROW(
        UnsupportedOperatorError,
        c10::str("`", op_.operator_name(), "` cannot be run on fake tensors: ", missing->what_without_backtrace()));
  }
  if (is_accepted && device->is_cpu() && !isRecording() && tryOnZeros(arguments, *device)) {
    return true;
  }
  if (canRunForReal()) {
    // It refuses the call, but real tensors may not.
    TORCHEXT_THROW(UnsupportedOperatorError, c10::str("`", op_.operator_name(), "` is refused by its Meta kernel."));
  }
  return false;
}

// NOTE [Asking the kernel of the CPU]
bool MetaCall::tryOnZeros(Stack arguments, c10::Device device) {
  if (!tryRunOnZeros(op_, arguments, device)) {
    return false;
  }
  stack_.resize(bottom_);
  std::move(arguments.begin(), arguments.end(), std::back_inserter(stack_));
  return true;
}

void MetaCall::checkCanBeFaked() const {
  if (lacksValues(op_, stack_)) {
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

void MetaCall::convertArgumentsToMeta(const DeviceRules& rules) {
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

void MetaCall::callMetaKernel(c10::Device device) {
  const MetaCallOnDevice hint{device};
  const NoTorchFunction no_torch_function;
  const c10::impl::ExcludeDispatchKeyGuard guard{kHiddenFromUsers};
  callMetadataKernel(op_, stack_);
}

// In-place operators may change more than data: `resize_`, `set_`, `t_` and their kin change the metadata of the
// shadow, and the fake follows.
void MetaCall::updateWrittenFakes() {
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

void MetaCall::convertOutputsToFake(c10::Device device) {
  const auto to_fake = [&](const Tensor& meta) { return toFake(meta, device); };
  mapTensors(stack_, op_.schema().returns().size(), to_fake);
}

Tensor MetaCall::toFake(const Tensor& meta, c10::Device device) {
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
  if (const Tensor* base = shadows_.findTensorOn(storage)) {
    checkInBounds(meta_impl, storage);
    return makeFakeView(*base, meta_impl);
  }
  return makeFakeTensor(std::move(storage), meta_impl);
}

}  // namespace

void refuseToWriteIntoRealTensors(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t num_arguments = arguments.size();
  for (const auto i : c10::irange(num_arguments)) {
    if (!writesArgument(op, stack, i)) {
      continue;
    }
    const auto visit = [&](const Tensor& tensor) {
      TORCH_CHECK(isFake(tensor), "`", op.operator_name(),
                  "` would write the result of fake tensors into the real tensor `", arguments[i].name(), "` of shape ",
                  tensor.sizes(),
                  ". Make that tensor fake too, with "
                  "torchext.fake.fake_like(), or make the other arguments real.");
    };
    forEachTensor(torch::jit::peek(stack, i, num_arguments), visit);
  }
}

void runOnMeta(const OperatorHandle& op, Stack& stack) {
  MetaCall{op, stack}.run();
}

}  // namespace torchext
