#include "source_trace.h"

#include <atomic>
#include <cstddef>

#include <c10/util/Exception.h>

namespace torchext {

namespace {

std::atomic<SourceTracer> current_tracer{nullptr};

thread_local std::size_t depth = 0;

}  // namespace

void setSourceTracer(SourceTracer tracer) {
  current_tracer = tracer;
}

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
  const SourceTracer tracer = current_tracer;
  return tracer == nullptr ? std::string{} : tracer();
}

}  // namespace torchext
