// Another owner of the `Fake` key, registered when this library is loaded, modeled on PyTorch's C++ FakeTensor
// (pytorch/pytorch#183776): its tensors are meta tensors with the key, its mode makes the thread include the key, and
// its fallback runs the Meta kernel without the key, adds the key to the results, and enters and leaves the mode for
// that. Tests use it through foreign_fakes.py.

#include <atomic>

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>

namespace {

using c10::DispatchKey;

std::atomic<std::int64_t> calls = 0;
std::atomic<std::int64_t> own_calls = 0;

struct OpenImpl : c10::TensorImpl {
  static c10::DispatchKeySet& keysOf(c10::TensorImpl& impl) {
    return impl.*(&OpenImpl::key_set_);
  }
};

at::Tensor giveKey(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_meta()) {
    c10::DispatchKeySet& keys = OpenImpl::keysOf(*tensor.unsafeGetTensorImpl());
    keys = keys.add(DispatchKey::Fake);
  }
  return tensor;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  ++calls;
  const auto num_arguments = op.schema().arguments().size();
  for (const auto i : c10::irange(num_arguments)) {
    if (op.schema().arguments()[i].name() == "device") {
      torch::jit::peek(*stack, i, num_arguments) = c10::Device{c10::kMeta};
    }
  }
  {
    const c10::impl::ExcludeDispatchKeyGuard exclude{DispatchKey::Fake};
    const c10::impl::IncludeDispatchKeyGuard include{DispatchKey::Meta};
    op.redispatchBoxed(c10::DispatchKeySet{DispatchKey::Meta}, stack);
  }
  const auto num_returns = op.schema().returns().size();
  for (const auto i : c10::irange(num_returns)) {
    const c10::IValue& result = torch::jit::peek(*stack, i, num_returns);
    if (result.isTensor()) {
      giveKey(result.toTensor());
    }
  }
  // Like `FakeTensorModeTLS::reset_state()` for tensors of a mode that the thread has not entered.
  if (num_arguments > 0 && torch::jit::peek(*stack, 0, num_returns).isTensor() && op.schema().name() == "aten::neg") {
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, false);
  }
}

at::Tensor next(const at::Tensor& tensor) {
  return at::add(tensor, 1);
}

at::Tensor nextMeta(const at::Tensor& tensor) {
  return at::empty_like(tensor);
}

at::Tensor nextFake(const at::Tensor& tensor) {
  ++own_calls;
  const c10::impl::ExcludeDispatchKeyGuard exclude{DispatchKey::Fake};
  return giveKey(at::empty_like(tensor));
}

TORCH_LIBRARY(torchext_foreign, library) {
  library.def("give_key(Tensor tensor) -> Tensor", torch::dispatch(DispatchKey::CompositeExplicitAutograd, giveKey));
  library.def("calls() -> int", [] { return calls.load(); });
  library.def("own_calls() -> int", [] { return own_calls.load(); });
  library.def("next(Tensor tensor) -> Tensor");
  library.impl("next", torch::dispatch(DispatchKey::CPU, next));
  library.impl("next", torch::dispatch(DispatchKey::Meta, nextMeta));
  library.impl("next", torch::dispatch(DispatchKey::Fake, nextFake));
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
