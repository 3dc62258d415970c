#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

// The effect of a kernel on a call.
enum class RouteTurn : std::uint8_t {
  kSkipped,      // the key falls through
  kPassesOn,     // the kernel passes the call to the keys below its own
  kStartsOver,   // the kernel repeats the call with its own key excluded
  kDecomposes,   // the kernel calls other operators, each with its own route
  kComputes,     // the kernel makes the results
  kCallsPython,  // the kernel passes the call to a mode or a subclass written in Python
  kRaises,       // an error: the kernel is missing, or torchext rejects the call
};

struct RouteStep {
  c10::DispatchKey key;
  RouteTurn turn;
  std::string origin;   // see TableEntry
  std::string source;   // see TableEntry
  bool is_python;       // see TableEntry
  std::string comment;  // details of this kernel or call; may be empty
};

// NOTE [Following a call]
//
// The dispatcher begins with the keys of the tensor arguments and those that the thread includes, without those that it
// excludes, and picks the highest. Each kernel decides where the call goes next. A kernel may do anything, but
// PyTorch's kernels follow a few patterns:
//
// - A kernel above the backends redispatches to the keys below its own. It does not read the arguments again, but
//   removes keys from the key set that it received. Autograd kernels remove all autograd keys.
// - An autocast kernel casts the arguments and repeats the call with its own key excluded, so keys above it are visited
//   twice.
// - A BackendSelect kernel adds the backend for `dtype`, `layout` and `device` to the key set.
// - A composite kernel calls other operators.
// - The next step of kernels that wrap tensors (functionalization, torch.func) or are written in Python cannot be
//   predicted here, so a route ends there.
// - torchext's fallbacks report the decision that they would make (`predictFake()`, `predictRecorder()`, and a similar
//   function for AmpTensors).
//
// A kernel of another library, at a key above the backends, is assumed to pass the call on.

// Returns the keys that the call of `op` with `arguments` would visit on this thread now, in order. Calls no operator.
TORCHEXT_API std::vector<RouteStep> routeOf(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Returns a text such as "passes on".
TORCHEXT_API const char* toString(RouteTurn turn) noexcept;

}  // namespace torchext
