#include "fake.h"

#include <memory>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../libraries/support/sizes.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"
#include "../hooks/hooks.h"
#include "../torch_internals/open_tensor_impl.h"
#include "calls/op_traits.h"
#include "fake_handler.h"
#include "meta/recipe_builder.h"
#include "storage/fake_keys.h"
#include "storage/fake_storage.h"
#include "storage/fake_tensor_impl.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

void checkFake(const Tensor& fake) {
  TORCH_CHECK_VALUE(isFake(fake), "`fake` was expected to be a fake tensor, but it is a real one.");
  TORCH_CHECK_NOT_IMPLEMENTED(fake.has_storage(), "`fake` was expected to be strided, but it has the layout ",
                              fake.layout(), " and no storage. Use its indices and values.");
}

Tensor metaLike(const Tensor& fake) {
  checkFake(fake);
  return Shadows{Shadows::Kind::kMeta}.of(fake);
}

Tensor viewStorageLike(const Tensor& fake, const Tensor& like) {
  checkFake(fake);
  const c10::Storage& storage = fake.storage();
  auto impl =
      c10::make_intrusive<FakeTensorImpl>(storage, fakeBackendKeys(like.scalar_type(), storage.device()), like.dtype());
  FakeTensorImpl::copyGeometry(*impl, *like.unsafeGetTensorImpl());
  return Tensor{std::move(impl)};
}

struct FakeModeGuard::State {
  FakeFactoriesGuard factories;
};

FakeModeGuard::FakeModeGuard() {
  takeFakeKeys();
  shareFakeKernels();
  state_ = std::make_unique<State>();
}

FakeModeGuard::~FakeModeGuard() = default;

namespace {

Tensor allBytes(c10::Storage storage) {
  const auto nbytes = toSigned(storage.nbytes());
  const c10::DispatchKeySet keys = fakeBackendKeys(c10::kByte, storage.device());
  auto impl = c10::make_intrusive<FakeTensorImpl>(std::move(storage), keys, caffe2::TypeMeta::Make<std::uint8_t>());
  impl->set_sizes_contiguous({nbytes});
  return Tensor{std::move(impl)};
}

}  // namespace

Tensor fakeBytes(std::int64_t nbytes, c10::Device device) {
  TORCH_CHECK_VALUE(nbytes >= 0, "`nbytes` was expected to be at least 0, but is ", nbytes, ".");
  return allBytes(makeFakeStorage(toSize(nbytes), device));
}

Tensor bytesOfStorage(const c10::Storage& storage) {
  TORCH_CHECK_VALUE(isFakeStorage(storage), "`storage` was expected to be a fake storage, but it has memory.");
  return allBytes(storage);
}

namespace {

void registerFakeKey() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(DispatchKey::Fake)) {
    hooks().owners.share();
  } else {
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&fakeFallback>());
  }
  for (const OnKeyTaken prepare : hooks().on_fake_key) {
    prepare();
  }
}

void takeFakeKey() {
  static LazyKey key{DispatchKey::Fake, "Fake and deferred tensors need",
                     hooks().owners.share ? LazyKey::IfTaken::kShares : LazyKey::IfTaken::kRaises};
  key.take(registerFakeKey);
  if (isFakeKeyShared()) {
    hooks().owners.repair();
  }
}

// The fallback of the key of composites if the `Fake` key has another owner, which may have registered a kernel for the
// operator.
void sharesKernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  hooks().owners.shareKernelOf(op);
  op.redispatchBoxed(keys & kBelowComposites, stack);
}

void registerComposites() {
  registerFallback(kCompositesKey, isFakeKeyShared() ? torch::CppFunction::makeFromBoxedFunction<&sharesKernel>()
                                                     : torch::CppFunction::makeFallthrough());
  torch::Library& library = permanentLibrary(kCompositesKey);
  for (const RegisterKernels register_kernels : hooks().on_composites_key) {
    register_kernels(library);
  }
}

void takeCompositesKey() {
  static LazyKey key{kCompositesKey, "Fake and deferred tensors need"};
  key.take(registerComposites);
}

}  // namespace

void takeFakeKeys() {
  takeFakeKey();
  takeCompositesKey();
}

void shareFakeKernels() {
  if (isFakeKeyShared()) {
    hooks().owners.shareKernels();
  }
}

bool ResizableOutputs::existFor(const OperatorHandle& op) {
  return hasOut(op) || op.schema().name() == "aten::resize_as_";
}

ResizableOutputs::ResizableOutputs(const OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const bool is_resized = op.schema().name() == "aten::resize_as_";
  for (const auto i : c10::irange(arguments.size())) {
    if (arguments[i].is_out() || (is_resized && i == 0)) {
      forEachTensor(torch::jit::peek(stack, i, arguments.size()), [this](const Tensor& output) {
        if (isFake(output) && output.has_storage() && !output.key_set().has_backend(kWithoutValues)) {
          DispatchKeySet& keys = OpenTensorImpl::keysOf(*output.unsafeGetTensorImpl());
          keys = keys | DispatchKeySet{kWithoutValues};
          outputs_.push_back(output);
        }
      });
    }
  }
}

ResizableOutputs::~ResizableOutputs() {
  for (const Tensor& output : outputs_) {
    DispatchKeySet& keys = OpenTensorImpl::keysOf(*output.unsafeGetTensorImpl());
    keys = keys.remove_backend(kWithoutValues);  // a difference of sets does not remove backends
  }
}

bool ResizableOutputs::isOne(const Tensor& tensor) {
  return !tensor.is_meta() && tensor.key_set().has_backend(kWithoutValues);
}

}  // namespace torchext
