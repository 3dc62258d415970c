#pragma once

// NOTE [Collectives]
//
// A collective sends values to other processes, or writes the values that they send. Fakes have no values. Without this
// file the mistake would go unnoticed: c10d has Meta kernels that do nothing
// (torch/distributed/_meta_registrations.py), a backend would write real memory that another process reads, and the
// other processes would wait. So every operator that names a process group is decided here, before anything is sent or
// written:
//
//   * Deferred tensors among the arguments become real first, and the call is then made with them. A collective cannot
//     be recorded and made later, because other processes wait for it now.
//   * Fakes alone, on PyTorch's backend "fake", run through PyTorch's own kernels. These check arguments and count
//     versions as for real tensors, and send nothing. Values received from other processes are unknown: NOTE [Known
//     values].
//   * Fakes on any other backend, and fakes together with real tensors, are refused.
//   * A barrier has a tensor only to find its backend (`ProcessGroup::barrier()`). In fake_mode() that tensor is fake,
//     but the barrier must still happen. On the backend "fake", it runs on the fake tensor.
//   * Waiting for a tensor that no collective has made returns it immediately, as `c10d::wait_tensor()` does.

#include <optional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

// Handles communicating operators on fakes and deferred tensors: the hooks `CallHandler` and `Collectives`. Call while
// the library is loaded.
void registerCollectives();

// Registers kernels for the operators of c10d that take lists of lists of tensors. The dispatcher does not look for
// keys in such lists (`DispatchKeyExtractor`). Call before there are fakes. Repeated calls do nothing.
TORCHEXT_API void watchNestedLists();

// Calls `run`, which makes the call and returns its results, or raises an error without calling it.
using CollectiveObserver = void (*)(const c10::OperatorHandle& op,
                                    c10::ArrayRef<c10::IValue> arguments,
                                    c10::function_ref<c10::ArrayRef<c10::IValue>()> run);

// Sets the observer of every call of a c10d operator that names a process group, and of
// `_c10d_functional::wait_tensor`, on any thread, with real and with fake tensors. Functional collectives and
// `torch.distributed` end in these operators. Null stops observing. Must not be called while another thread
// communicates.
TORCHEXT_API void observeCollectives(CollectiveObserver observer);

// Returns the name of a reduction, such as "SUM", if `value` is one.
TORCHEXT_API std::string nameOfReduction(const c10::IValue& value);

// The functions that need PyTorch's process groups. A PyTorch that was built without them has no operators that name
// one, and lacks the functions that `process_groups.cpp` calls. Then setup.py omits that file, and these are null.
struct GroupFunctions {
  // Returns the name of the backend that a group, or its name, has for a device. Nothing if it has none, or if the
  // group is one of another library.
  std::optional<std::string> (*backend_of)(const c10::IValue& group, c10::Device device) = nullptr;
  // For `nameOfReduction()`.
  std::string (*name_of_reduction)(const c10::IValue& value) = nullptr;
};

// Sets them. Call while the library is loaded. Returns true.
bool setGroupFunctions(const GroupFunctions& functions) noexcept;

// Returns true for the TorchScript class of c10d called `name`.
bool isClassOfC10d(const c10::Type& type, const std::string& name);

}  // namespace torchext
