#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// What becomes of a call after a kernel has got it.
enum class RouteTurn : std::uint8_t {
  kSkipped,      // no kernel: the key falls through
  kPassesOn,     // the kernel hands the call to the keys below its own
  kStartsOver,   // the kernel makes the call again, with its own key excluded
  kDecomposes,   // the kernel calls other operators, and each of those has a route of its own
  kComputes,     // the kernel makes the results
  kCallsPython,  // the kernel hands the call to a mode or a subclass that is written in Python
  kRaises,       // an error is raised: there is no kernel, or one of ours refuses the call
};

struct RouteStep {
  c10::DispatchKey key;
  RouteTurn turn;
  std::string origin;   // see TableEntry
  std::string source;   // see TableEntry
  bool is_python;       // see TableEntry
  std::string comment;  // in words, what is special about this kernel or this call; may be empty
};

// NOTE [Following a call]
//
// Where a call begins is what the dispatcher computes: the keys of the tensor arguments and those that the thread
// includes, without those that it excludes, the highest first. Where it goes on is decided by each kernel. A kernel is
// a function that may do anything, but PyTorch's keep to a few manners:
//
//   * a kernel above the backends hands the call on to the keys below its own, and not by looking at the arguments
//     again, but with what is left of the set of keys that it got. Those of autograd take off all keys of autograd;
//   * a kernel of autocast casts the arguments and makes the call again, with its own key excluded. So keys above it
//     are visited twice;
//   * a kernel of BackendSelect puts the backend that `dtype`, `layout` and `device` name into the set;
//   * a composite kernel calls other operators;
//   * what wraps tensors (functionalization, torch.func) and what is written in Python decides by means that cannot be
//     known from here, so a route ends there;
//   * our own two fallbacks report the decision that they would carry out (`predictFake()`, `predictRecorder()`).
//
// A kernel of another library at a key above the backends is taken to pass the call on.

// The keys that the call of `op` with `arguments` would visit on this thread now, in order. Nothing is called.
std::vector<RouteStep> routeOf(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// As a word for people: "passes on".
const char* toString(RouteTurn turn) noexcept;

}  // namespace torchext
