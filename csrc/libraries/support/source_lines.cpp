#include "source_lines.h"

#include <cstddef>

#include "interpreter.h"

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

std::string tracedSourceLine() {
  return depth == 0 ? std::string{} : sourceLineHere();
}

std::string sourceLineHere() {
  return interpreter().sourceLineHere();
}

}  // namespace torchext
