#include "source_trace.h"

#include <cstddef>

#include "../support/interpreter.h"
#include "../support/open_blocks.h"

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
  OpenGuards<TracingGuard>::enter();
}

void leaveTracing() {
  OpenGuards<TracingGuard>::leave("tracing()");
}

std::string currentSource() {
  return depth == 0 ? std::string{} : sourceHere();
}

std::string sourceHere() {
  return interpreter().sourceHere();
}

}  // namespace torchext
