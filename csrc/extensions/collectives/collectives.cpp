#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>
#include <torch/library.h>
#include <torchext/deferred_init.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/recording.h"
#include "../../core/fake/fake_handler.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"
#include "../values/assumed_values.h"
#include "../values/known_values.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

constexpr DispatchKeySet kOurs({DispatchKey::DeferredInit, DispatchKey::Fake});

// Namespaces `c10d`, `_c10d_functional` and its variants in other PyTorch releases.
bool isOfC10d(const OperatorHandle& op) {
  return namespaceOf(op.operator_name()).find("c10d") != std::string_view::npos;
}

// Set while the library is loaded, and only read after that.
GroupFunctions group_functions;

// Returns true for an argument that names a process group: the object, or a name that `c10d::resolve_process_group()`
// resolves.
bool namesProcessGroup(const c10::Argument& argument) {
  return argument.name() == "group_name" || isClassOfC10d(*argument.type(), "ProcessGroup");
}

bool takesGroup(const OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), namesProcessGroup);
}

// Returns the name of the backend that the call would use for tensors on `device`, or nothing if the call names no
// group, or a group of another library.
std::optional<std::string> communicationBackend(const OperatorHandle& op,
                                                ArrayRef<IValue> arguments,
                                                c10::Device device) {
  const auto& declared = op.schema().arguments();
  const auto group = std::find_if(declared.begin(), declared.end(), namesProcessGroup);
  return group == declared.end() || group_functions.backend_of == nullptr
             ? std::nullopt
             : group_functions.backend_of(arguments[toSize(group - declared.begin())], device);
}

// These operators access the memory of other processes through a handle, and name no group.
bool isOnSymmetricMemory(const OperatorHandle& op) {
  return op.schema().name().rfind("symm_mem::", 0) == 0;
}

template <typename Predicate>
std::optional<Tensor> findTensor(ArrayRef<IValue> arguments, Predicate is_wanted) {
  std::optional<Tensor> found;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (!found && is_wanted(tensor)) {
      found = tensor;
    }
  });
  return found;
}

std::string mixedMessage(const OperatorHandle& op, const Tensor& fake, const Tensor& real) {
  return c10::str(
      "`", op.operator_name(), "` takes a fake tensor of shape ", fake.sizes(), " together with a real one of shape ",
      real.sizes(),
      ", but fake tensors have no values to send, and received values would be lost in them. Make all tensors of the "
      "call real, or all of them fake with torchext.fake.fake_like(). Nothing has been sent or written.");
}

// Raises an error if the call must be refused. Does nothing for other calls, including those without fakes.
void refuseCollective(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto fake = findTensor(arguments, isFake);
  if (!fake || isInFakeImplementation()) {
    return;
  }
  const auto real = findTensor(arguments, [](const Tensor& tensor) { return !isFake(tensor); });
  TORCH_CHECK(!real, mixedMessage(op, *fake, *real));
  const auto backend = communicationBackend(op, arguments, fake->device());
  TORCH_CHECK(!backend || *backend == "fake", "`", op.operator_name(), "` on a fake tensor of shape ", fake->sizes(),
              " would communicate by the backend `", *backend,
              "`, but fake tensors have no values to send, and the other processes would wait for them. Use real "
              "tensors, or the backend \"fake\" (import torch.testing._internal.distributed.fake_pg), which runs "
              "collectives without communicating. Nothing has been sent or written.");
}

// Set while collectives are observed.
std::atomic<CollectiveObserver> observer{nullptr};

bool isObserved() noexcept {
  return observer.load() != nullptr;
}

// The schemas of c10d declare no writes. As everywhere in PyTorch, a trailing underscore means that the first argument
// is written.
void forgetWritten(const OperatorHandle& op, const Stack& arguments) {
  if (op.schema().name().back() != '_') {
    return;
  }
  if (assumesValues()) {
    const ValueKind kind = standingOn(arguments);
    // Until an observer provides the values.
    forEachTensor(arguments.front(), [kind](const Tensor& written) { markAssumed(written, kind); });
  } else {
    forgetElements(arguments.front());
  }
}

Communication communicationOf(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (namespaceOf(op.operator_name()) == "aten") {
    return Communication::kNone;
  }
  if (name == "_c10d_functional::wait_tensor" || name == "_c10d_functional::_wrap_tensor_autograd") {
    return Communication::kWaits;
  }
  if (name == "c10d::barrier" || name == "c10d::monitored_barrier_") {
    return Communication::kSynchronizes;
  }
  return takesGroup(op) || isOnSymmetricMemory(op) ? Communication::kCollective : Communication::kNone;
}

// Makes the deferred tensors among the arguments real. Returns false if no argument is deferred. If there are other
// fakes, raises an error before changing anything.
bool makeDeferredReal(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  std::vector<Tensor> deferred;
  std::optional<Tensor> other_fake;
  forEachTensor(arguments, [&](const Tensor& tensor) {
    if (isFake(tensor) && tensor.key_set().has(DispatchKey::DeferredInit)) {
      deferred.push_back(tensor);
    } else if (isFake(tensor)) {
      other_fake = tensor;
    }
  });
  if (deferred.empty()) {
    return false;
  }
  TORCH_CHECK(!other_fake, mixedMessage(op, *other_fake, deferred.front()));
  materialize(deferred);
  return true;
}

// Makes the processes wait for each other, although the tensor on top of `stack` is fake.
void synchronize(const OperatorHandle& op, Stack& stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard{kOurs};
  mapTensors(stack, op.schema().arguments().size(), [](const Tensor& tensor) {
    const bool device_exists = !tensor.is_cuda() || hasRealCuda();
    return isFake(tensor)
               ? at::empty(tensor.sizes(), tensor.options().device(device_exists ? tensor.device() : c10::kCPU))
               : tensor;
  });
  op.callBoxed(stack);
}

// Returns true for a call that makes processes wait for each other. The backend "fake" has no other processes, and the
// group may have no backend for devices other than those of fakes.
bool isSynchronizing(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto fake = findTensor(arguments, isFake);
  return communicationOf(op) == Communication::kSynchronizes &&
         !(fake && communicationBackend(op, arguments, fake->device()) == "fake");
}

// Runs PyTorch's kernels of collectives on fakes, or refuses the calls, and synchronizes processes.
class CollectiveHandler final : public CallHandler {
 public:
  constexpr CollectiveHandler() = default;

  std::optional<HandledCall> decide(const OperatorHandle& op,
                                    const Stack& stack,
                                    const ArgumentFacts& facts) const override {
    const bool may_send = facts.has_fake && !isInFakeImplementation();
    const Communication communication = may_send ? communicationOf(op) : Communication::kNone;
    if (communication == Communication::kNone) {
      return std::nullopt;
    }
    if (isSynchronizing(op, argumentsOf(op, stack))) {
      return HandledCall{nullptr, HandledCall::Effect::kDecomposes, "makes the call now, on a real tensor"};
    }
    if (communication == Communication::kCollective) {
      try {
        refuseCollective(op, argumentsOf(op, stack));
      } catch (const c10::Error&) {
        return HandledCall{std::current_exception()};
      }
      if (!isOfC10d(op)) {
        return std::nullopt;
      }
    }
    return HandledCall{nullptr, HandledCall::Effect::kPassesOn, "the collective runs on the fakes"};
  }

  // Kernels allocate on the device of their arguments, also outside of fake_mode(), and these allocations must be fake.
  void run(const OperatorHandle& op, DispatchKeySet below, Stack& stack) const override {
    const Stack arguments = argumentsOf(op, stack).vec();
    if (isSynchronizing(op, arguments)) {
      synchronize(op, stack);
      return;
    }
    countCall(op, arguments, /*scratch=*/nullptr, {}, /*has_new=*/false);
    const FakeFactoriesGuard guard;
    op.redispatchBoxed(below, &stack);
    if (!isObserved()) {
      forgetWritten(op, arguments);
    }
  }
};

bool takesNestedLists(const OperatorHandle& op) {
  const auto nested = c10::ListType::create(c10::ListType::ofTensors());
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(),
                     [&nested](const c10::Argument& argument) { return *argument.type() == *nested; });
}

// `FakeProcessGroup::alltoall_base` fills the output by copying the input, in as many pieces as needed, and refuses an
// empty input, which a rank without tokens has. The values are unused, so no output is filled.
void emptyExchange(const OperatorHandle& op, Stack& stack) {
  if (op.schema().name() != "c10d::alltoall_base_") {
    return;
  }
  const std::size_t count = op.schema().arguments().size();
  const auto at = [&](const char* name) -> IValue& {
    return torch::jit::peek(stack, toSize(findArgument(op.schema(), name)), count);
  };
  IValue& sizes = at("output_split_sizes");
  const Tensor output = at("output").toTensor();
  const bool is_exchanged = !sizes.toIntVector().empty() && isFake(output) && at("input").toTensor().dim() > 0;
  const auto sent = at("input_split_sizes").toIntVector();
  const auto total = c10::sum_integers(sizes.toIntVector());
  if (is_exchanged && !sent.empty() && output.dim() > 0 && total == output.size(0)) {
    at("output") = output.narrow(0, 0, 0);
    sizes = std::vector<int64_t>(sizes.toIntVector().size(), 0);
  }
}

void callObserved(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet{DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect};
  const CollectiveObserver current_observer = observer.load();
  if (current_observer == nullptr || isInFakeImplementation()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const Stack arguments = argumentsOf(op, *stack).vec();
  current_observer(op, arguments, [&]() -> ArrayRef<IValue> {
    emptyExchange(op, *stack);
    op.redispatchBoxed(below, stack);
    forgetWritten(op, arguments);  // before the observer may replace the written values
    return topOf(*stack, op.schema().returns().size());
  });
}

void handleNestedLists(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const auto arguments = argumentsOf(op, *stack);
  if (makeDeferredReal(op, arguments)) {
    op.callBoxed(*stack);  // with the current keys of the tensors
    return;
  }
  refuseCollective(op, arguments);
  callObserved(op, keys, stack);
}

// Registers `Kernel` for the operators of a namespace that satisfy `is_wanted`. Every call has the key `BackendSelect`,
// regardless of its tensors.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* Kernel, typename Predicate>
std::unique_ptr<torch::Library> registerBefore(const char* space, Predicate is_wanted) {
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, space, DispatchKey::BackendSelect, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = namespaceOf(name) == space ? dispatcher.findSchema(name) : std::nullopt;
    if (op && is_wanted(*op)) {
      library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<Kernel>());
    }
  }
  return library;
}

// The kernels that are registered while collectives are observed.
std::vector<std::unique_ptr<torch::Library>>& observingLibraries() {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;  // leaked: calls may be in flight at exit
  return *libraries;
}

void registerObservingKernels() {
  observingLibraries().push_back(registerBefore<&callObserved>(
      "c10d", [](const OperatorHandle& op) { return takesGroup(op) && !takesNestedLists(op); }));
  observingLibraries().push_back(registerBefore<&callObserved>("_c10d_functional", [](const OperatorHandle& op) {
    return op.schema().name() == "_c10d_functional::wait_tensor";
  }));
}

}  // namespace

void watchNestedLists() {
  // Leaked: kernels may be in flight until the process ends.
  static const auto* library = registerBefore<&handleNestedLists>("c10d", takesNestedLists).release();
  static_cast<void>(library);
}

void registerCollectives() {
  static constexpr CollectiveHandler collectives;
  Collectives& all = hooks().collectives;
  all.of = &communicationOf;
  all.makeDeferredReal = [](const OperatorHandle& op, Arguments arguments) { makeDeferredReal(op, arguments); };
  all.synchronize = &synchronize;
  hooks().handlers.add(&collectives);
}

bool isClassOfC10d(const c10::Type& type, const std::string& name) {
  const auto* named = dynamic_cast<const c10::NamedType*>(&type);
  return named != nullptr && named->name() && named->name()->qualifiedName() == "__torch__.torch.classes.c10d." + name;
}

bool setGroupFunctions(const GroupFunctions& functions) noexcept {
  group_functions = functions;
  return true;
}

std::string nameOfReduction(const IValue& value) {
  return group_functions.name_of_reduction == nullptr ? std::string{} : group_functions.name_of_reduction(value);
}

void observeCollectives(CollectiveObserver observing) {
  observer = observing;
  if (observing == nullptr) {
    observingLibraries().clear();
  } else if (observingLibraries().empty()) {
    watchNestedLists();
    registerObservingKernels();
  }
}

}  // namespace torchext
