#include "source_lines.h"

#include <cstddef>

#include "interpreter.h"
#include "open_blocks.h"

namespace torchext {

namespace {

thread_local std::size_t depth = 0;

}  // namespace

TracingGuard::TracingGuard() {
  ++depth;
}

TracingGuard::~TracingGuard() {
  --depth;
}

void enterTracing() {
  OpenGuards<TracingGuard>::enter(kAnyOwner);
}

void leaveTracing() {
  OpenGuards<TracingGuard>::leave(kAnyOwner, "tracing()");
}

std::string tracedSourceLine() {
  return depth == 0 ? std::string{} : sourceLineHere();
}

std::string sourceLineHere() {
  return interpreter().sourceLineHere();
}

}  // namespace torchext
