#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

// What a kernel does with a call.
enum class RouteTurn : std::uint8_t {
  kSkipped,      // no kernel: the key falls through
  kPassesOn,     // the kernel hands the call to the keys below its own
  kStartsOver,   // the kernel makes the call again, with its own key excluded
  kDecomposes,   // the kernel calls other operators, each with a route of its own
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
  std::string comment;  // what is special about this kernel or this call, in words; may be empty
};

// NOTE [Following a call]
//
// The dispatcher decides where a call begins: it takes the keys of the tensor arguments and those that the thread
// includes, without those that it excludes, and picks the highest. Each kernel decides where the call goes next. A
// kernel may do anything, but PyTorch's follow a few patterns:
//
//   * a kernel above the backends redispatches to the keys below its own. It does not look at the arguments again, but
//     removes keys from the key set that it got. Kernels of autograd remove all keys of autograd;
//   * a kernel of autocast casts the arguments, and makes the call again with its own key excluded, so keys above it
//     are visited twice;
//   * a kernel of BackendSelect adds the backend that `dtype`, `layout` and `device` name to the key set;
//   * a composite kernel calls other operators;
//   * what kernels that wrap tensors (functionalization, torch.func), or that are written in Python, do next cannot be
//     predicted from here, so a route ends there;
//   * our own fallbacks report the decision that they would carry out (`predictFake()`, `predictRecorder()`, and
//     another such function for AmpTensors).
//
// A kernel of another library, at a key above the backends, is assumed to pass the call on.

// Returns the keys that the call of `op` with `arguments` would visit on this thread now, in order. Calls no operator.
TORCHEXT_API std::vector<RouteStep> routeOf(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Returns words to print, such as "passes on".
TORCHEXT_API const char* toString(RouteTurn turn) noexcept;

}  // namespace torchext
