#include "interpreter.h"

#include <atomic>
#include <cstddef>

#include "locks.h"

namespace torchext {

namespace {

std::atomic<const Interpreter*> current{nullptr};

thread_local std::size_t tracing_guards = 0;

}  // namespace

Interpreter::~Interpreter() = default;  // places the virtual table in this library

void setInterpreter(const Interpreter& interpreter) noexcept {
  current.store(&interpreter, std::memory_order_release);
}

const Interpreter& interpreter() {
  checkMayNeedInterpreter();
  static const auto* none = new Interpreter;
  const Interpreter* set = current.load(std::memory_order_acquire);
  return set == nullptr ? *none : *set;
}

TracingGuard::TracingGuard() {
  ++tracing_guards;
}

TracingGuard::~TracingGuard() {
  --tracing_guards;
}

std::string tracedSourceLine() {
  return tracing_guards == 0 ? std::string{} : interpreter().sourceLineHere();
}

}  // namespace torchext
