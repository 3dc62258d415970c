#include "interpreter.h"

#include <atomic>

#include "locks.h"

namespace torchext {

namespace {

std::atomic<const Interpreter*> current{nullptr};

}  // namespace

Interpreter::~Interpreter() = default;

void Interpreter::withoutLock(c10::function_ref<void()> run) const {
  run();
}

void Interpreter::withLock(c10::function_ref<void()> run) const {
  run();
}

bool Interpreter::isInterrupt(const std::exception& /*error*/) const {
  return false;
}

std::string Interpreter::sourceLineHere() const {
  return {};
}

std::vector<StackFrame> Interpreter::stackHere() const {
  return {};
}

bool Interpreter::hasFakeImplementation(const std::string& /*name*/) const {
  return false;
}

void Interpreter::raise(ErrorKind /*kind*/, const std::string& /*message*/) const {}

void Interpreter::raiseWithNote(const c10::Error& /*error*/, const std::string& /*note*/) const {}

void setInterpreter(const Interpreter& interpreter) noexcept {
  current.store(&interpreter, std::memory_order_release);
}

const Interpreter& interpreter() {
  checkMayNeedInterpreter();
  static const auto* none = new Interpreter;
  const Interpreter* set = current.load(std::memory_order_acquire);
  return set == nullptr ? *none : *set;
}

}  // namespace torchext
