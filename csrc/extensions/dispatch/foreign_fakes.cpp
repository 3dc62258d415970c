#include "foreign_fakes.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/fake_handler.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/hooks/hooks.h"
#include "../../core/torch_internals/dispatcher_internals.h"
#include "../../core/torch_internals/private_members.h"
#include "../../core/torch_internals/self_tests.h"
#include "../../libraries/support/held_warnings.h"
#include "../../libraries/support/included_key.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/stack_utils.h"
#include "../../libraries/support/take_key.h"

TORCHEXT_OPEN_MEMBER(Fallbacks, &c10::Dispatcher::backendFallbackKernels_)
TORCHEXT_OPEN_MEMBER(FallbackRemoval, &c10::Dispatcher::deregisterFallback_)
TORCHEXT_OPEN_MEMBER(DispatcherGuard, &c10::Dispatcher::guard_)

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

// Returns the backend fallback of `key`.
RegisteredKernel fallbackOf(DispatchKey key) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const std::lock_guard lock((dispatcher.*memberOf(opened::DispatcherGuard{}))->mutex);
  const auto index = static_cast<std::size_t>(c10::getDispatchTableIndexForDispatchKey(key));
  const c10::impl::AnnotatedKernel& found = (dispatcher.*memberOf(opened::Fallbacks{})).at(index);
  return {found.kernel, found.debug};
}

// Removes the backend fallback of `key`, also one of another library. Calls that have reached it continue.
//
// PyTorch removes a fallback when the object that `registerFallback()` returned is destroyed, but only the library that
// registered the fallback has that object.
void removeFallback(DispatchKey key) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const std::lock_guard lock((dispatcher.*memberOf(opened::DispatcherGuard{}))->mutex);
  (dispatcher.*memberOf(opened::FallbackRemoval{}))(key);
}

// Returns the fallback of the other owner, or null. Leaked: kernels may be in flight until the process ends.
std::atomic<const RegisteredKernel*>& foreignFallback() {
  static std::atomic<const RegisteredKernel*> fallback{nullptr};
  return fallback;
}

// Returns true for our fakes, and for tensors with stale keys: a real tensor that was given the `.data` of a fake keeps
// our keys when the fake becomes real (`dropStaleKeys()`).
bool isOrWasOurs(const at::TensorBase& tensor) {
  return isFake(tensor) || tensor.key_set().has_all(kFakeKeys);
}

bool isForeign(const at::TensorBase& tensor) {
  return tensor.key_set().has(DispatchKey::Fake) && !isOrWasOurs(tensor);
}

// The owners of the fakes among the arguments of a call.
struct Fakes {
  bool ours = false;
  bool foreign = false;
};

Fakes fakesAmong(ArrayRef<IValue> arguments) {
  Fakes fakes;
  forEachTensor(arguments, [&fakes](const Tensor& tensor) {
    fakes.ours = fakes.ours || isOrWasOurs(tensor);
    fakes.foreign = fakes.foreign || isForeign(tensor);
  });
  return fakes;
}

[[noreturn]] void refuseToMixFakes(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  std::string ours;
  std::string foreign;
  for (const auto i : c10::irange(arguments.size())) {
    const Fakes fakes = fakesAmong(arguments[i]);
    const std::string name = c10::str(" `", op.schema().arguments()[i].name(), "`");
    ours += fakes.ours ? name : "";
    foreign += fakes.foreign ? name : "";
  }
  const RegisteredKernel* fallback = foreignFallback();
  const std::string owner = fallback == nullptr        ? "removed"
                            : fallback->source.empty() ? "by another library"
                                                       : fallback->source;
  TORCH_CHECK(false, "`", op.operator_name(), "` was called with fake tensors of two kinds: of torchext in", ours,
              ", and of the library whose fallback of the dispatch key `Fake` was ", owner, ", in", foreign,
              ". Make all fake tensors of the call with the same library.");
}

// If the thread does not include the key, a call without fakes has the key from one of our tensors that was already
// real, and whose stale keys the recorder of deferred_init has just removed.
bool isInForeignBlock() {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake) && !areFactoriesFake() &&
         !c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit);
}

bool isOurs(const OperatorHandle& op, const Stack& stack) {
  const ArrayRef<IValue> arguments = argumentsOf(op, stack);
  const Fakes fakes = fakesAmong(arguments);
  if (fakes.ours && fakes.foreign) {
    refuseToMixFakes(op, arguments);
  }
  return fakes.ours || (!fakes.foreign && !isInForeignBlock());
}

// Handles a call that has arrived at the `Fake` key, or passes it to the other owner's kernel, which may be null.
void callOwner(const RegisteredKernel* foreign, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (foreign == nullptr || isOurs(op, *stack)) {
    fakeFallback(op, keys, stack);
    return;
  }
  // PyTorch's fallback enters the mode of its tensors for a call, and leaving it removes the key from the thread
  // (`FakeTensorModeTLS::reset_state()`), even in our blocks.
  const IncludedKey unchanged{DispatchKey::Fake, c10::impl::tls_is_dispatch_key_included(DispatchKey::Fake)};
  if (foreign->kernel.isFallthrough()) {
    op.redispatchBoxed(keys & kBelowFake, stack);
  } else {
    foreign->kernel.callBoxed(op, keys, stack);
  }
}

// Replaces a kernel that the other owner has registered for one operator.
class SharedKernel final : public c10::OperatorKernel {
 public:
  explicit SharedKernel(RegisteredKernel foreign) : foreign_{std::move(foreign)} {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    callOwner(&foreign_, op, keys, stack);
  }

 private:
  const RegisteredKernel foreign_;
};

void sharedFallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  callOwner(foreignFallback(), op, keys, stack);
}

// Our kernels on the `Fake` key of single operators.
using SharedKernels = std::unordered_map<c10::OperatorName, KernelIdentity>;

SharedKernels& sharedKernels() {
  static auto* kernels = new SharedKernels;
  return *kernels;
}

void replaceKernelOf(const OperatorHandle& op, RegisteredKernel foreign) {
  const NoWarnings no_warnings;  // PyTorch warns about replaced kernels
  permanentLibrary(DispatchKey::Fake, std::string{namespaceOf(op.operator_name())})
      .impl(c10::toString(op.operator_name()).c_str(),
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<SharedKernel>(std::move(foreign))));
}

void shareKernelOf(const OperatorHandle& op) {
  if (!op.hasKernelForDispatchKey(DispatchKey::Fake)) {
    return;
  }
  const Locked lock{LockRank::kForeignKernels};
  RegisteredKernel kernel = tableKernel(op, DispatchKey::Fake).registered;
  KernelIdentity& identity = sharedKernels()[op.operator_name()];
  if (identityOf(kernel.kernel) != identity) {
    replaceKernelOf(op, std::move(kernel));
    identity = identityOf(tableKernel(op, DispatchKey::Fake).registered.kernel);
  }
}

void shareKernels() {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::Fake)) {
    if (const auto op = dispatcher.findSchema(name)) {
      shareKernelOf(*op);
    }
  }
}

void shareKey() {
  TORCH_CHECK(
      passesSelfTest("fallbacks"),
      "Fake and deferred tensors need the dispatch key `Fake`, which already has a fallback, and torchext cannot "
      "share it: the self-test of `fallbacks` fails with this version of PyTorch. Use "
      "fake and deferred tensors in a process that does not load the library that registered the fallback. "
      "Inference mode and autocast do not need the key.");
  foreignFallback().store(new RegisteredKernel{fallbackOf(DispatchKey::Fake)}, std::memory_order_release);
  setFakeKeyShared();
  removeFallback(DispatchKey::Fake);
  registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&sharedFallback>());
  shareKernels();
}

// PyTorch removes our fallback when the other owner unregisters its own.
void repairFallback() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(DispatchKey::Fake)) {
    return;
  }
  const Locked lock{LockRank::kForeignKernels};
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(DispatchKey::Fake)) {
    registerFallback(DispatchKey::Fake, torch::CppFunction::makeFromBoxedFunction<&sharedFallback>());
  }
}

}  // namespace

// The public function returns whether a fallback exists.
bool testFallbacks(bool is_broken) {
  constexpr std::array kKeys{DispatchKey::CPU,         DispatchKey::BackendSelect, DispatchKey::Python,
                             DispatchKey::Fake,        DispatchKey::AutogradCPU,   DispatchKey::ADInplaceOrView,
                             DispatchKey::AutocastCPU, DispatchKey::DeferredInit};
  return std::all_of(kKeys.begin(), kKeys.end(), [is_broken](DispatchKey key) {
    const bool is_found = fallbackOf(key).kernel.isValid();
    return (is_found == c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) != is_broken;
  });
}

void registerKeyOwners() {
  KeyOwners& owners = hooks().owners;
  owners.share = &shareKey;
  owners.repair = &repairFallback;
  owners.shareKernels = &shareKernels;
  owners.shareKernelOf = &shareKernelOf;
  owners.isForeign = &isForeign;
  owners.refuseToMix = &refuseToMixFakes;
}

}  // namespace torchext
