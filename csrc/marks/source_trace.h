#pragma once

// Which line of the user's program makes a call: the interpreter is asked (interpreter.h), and only on threads that
// want to know, because it takes longer than recording does.

#include <string>

#include "../support/macros.h"

namespace torchext {

// While at least one lives on a thread, operators are recorded with their lines. Nests.
class TORCHEXT_API TracingGuard {
 public:
  TracingGuard();
  TracingGuard(const TracingGuard&) = delete;
  TracingGuard& operator=(const TracingGuard&) = delete;
  TracingGuard(TracingGuard&&) = delete;
  TracingGuard& operator=(TracingGuard&&) = delete;
  ~TracingGuard();
};

// For languages without guards: NOTE [Guards and blocks]. Leaving raises where no block is open on this thread.
TORCHEXT_API void enterTracing();
TORCHEXT_API void leaveTracing();

// What the interpreter says, or an empty string on a thread that does not trace.
std::string currentSource();

// What the interpreter says, on any thread.
std::string sourceHere();

}  // namespace torchext
