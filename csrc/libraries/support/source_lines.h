#pragma once

// The line of the user's program that makes a call, from the interpreter (interpreter.h). It is computed only on
// threads that trace, because it costs more than recording.

#include <string>

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

namespace torchext {

// While at least one guard lives on a thread, operators are recorded with their lines. Guards nest.
class TORCHEXT_API TracingGuard {
 public:
  TracingGuard();
  C10_DISABLE_COPY_AND_ASSIGN(TracingGuard);
  ~TracingGuard();
};

// Returns the current line, or an empty string on a thread that does not trace.
std::string tracedSourceLine();

// Returns the current line, on any thread.
std::string sourceLineHere();

}  // namespace torchext
