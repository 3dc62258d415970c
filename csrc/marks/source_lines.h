#pragma once

// Which line of the user's program makes a call. The interpreter tells (interpreter.h). It is asked only on threads
// that trace, because that takes longer than recording does.

#include <string>

#include <torchext/macros.h>

namespace torchext {

// While at least one lives on a thread, operators are recorded with their lines. Nests.
class TORCHEXT_API TracingGuard {
 public:
  TracingGuard();
  C10_DISABLE_COPY_AND_ASSIGN(TracingGuard);
  ~TracingGuard();
};

// For languages without guards: NOTE [Guards and blocks]. Leaving raises where no block is open on this thread.
TORCHEXT_API void enterTracing();
TORCHEXT_API void leaveTracing();

// Returns the line that runs now, or an empty string on a thread that does not trace.
std::string tracedSourceLine();

// Returns the line that runs now, on any thread.
std::string sourceLineHere();

}  // namespace torchext
