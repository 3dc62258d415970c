#include "source_trace.h"

#include <cstddef>

#include <c10/util/Exception.h>

#include "../support/interpreter.h"

namespace torchext {

namespace {

thread_local std::size_t depth = 0;

}  // namespace

void enterTracing() {
  ++depth;
}

void leaveTracing() {
  TORCH_CHECK(depth > 0, "leave_tracing() was called without enter_tracing() on this thread.");
  --depth;
}

TracingGuard::TracingGuard() {
  enterTracing();
}

TracingGuard::~TracingGuard() {
  leaveTracing();
}

std::string currentSource() {
  return depth == 0 ? std::string{} : sourceHere();
}

std::string sourceHere() {
  return interpreter().sourceHere();
}

}  // namespace torchext
