#pragma once

// The services that the core needs from the program's language, in one table, like PyTorch's `PyInterpreterVTable`. The
// core does not depend on Python: the bindings derive from the table and set it once, when they are loaded. The
// functions of the base class serve programs written in C++ only.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <c10/macros/Macros.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

// Kinds of errors that the language has classes for: torchext/errors.py. PyTorch translates every c10::Error into one
// of a few classes.
enum class ErrorKind : std::uint8_t { kDataDependent, kUnsupportedOperator, kMaterialization };
constexpr std::size_t kErrorKinds = 3;

// A function on the call stack.
struct StackFrame {
  std::string function;
  std::string file;
  int line;
};

class TORCHEXT_API Interpreter {
 public:
  Interpreter() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Interpreter);
  virtual ~Interpreter();

  // Calls `run` without the interpreter's lock, if this thread holds it.
  virtual void withoutLock(c10::function_ref<void()> run) const {
    run();
  }

  // Calls `run` with the interpreter's lock. For code that needs that lock while it holds one of our locks that other
  // threads wait for with the interpreter's lock held: it takes this one first, as they do. Threads give up the
  // interpreter's lock while they wait for locks that are held for long: NOTE [The order of locks].
  virtual void withLock(c10::function_ref<void()> run) const {
    run();
  }

  // Returns true if `error` stops the program, as Python's KeyboardInterrupt does. It must not be treated as a failure
  // of the operator that raised it.
  virtual bool isInterrupt(const std::exception& /*error*/) const {
    return false;
  }

  // Returns the source line that runs now, as "file:line in function", or an empty string if it cannot be determined.
  virtual std::string sourceLineHere() const {
    return {};
  }

  // Returns the functions on the call stack, innermost first.
  virtual std::vector<StackFrame> stackHere() const {
    return {};
  }

  // Returns true if the program has registered a fake implementation of the operator `name`, as
  // `torch.library.register_fake()` does, which also registers a Meta kernel.
  virtual bool hasFakeImplementation(const std::string& /*name*/) const {
    return false;
  }

  // Raises an error of the language's class for `kind`. Returns if the language has no such class.
  virtual void raise(ErrorKind /*kind*/, const std::string& /*message*/) const {}

  // Raises the error that PyTorch would translate `error` into, with `note` attached in the language's form for notes.
  // Returns if the language has no notes.
  virtual void raiseWithNote(const c10::Error& /*error*/, const std::string& /*note*/) const {}
};

// Set and return the current table. It must live until the process ends.
TORCHEXT_API void setInterpreter(const Interpreter& interpreter) noexcept;
TORCHEXT_API const Interpreter& interpreter();

// While at least one guard lives on a thread, operators are recorded with the lines of the program that call them.
// Guards nest. Other threads do without, because finding a line costs more than recording.
class TORCHEXT_API TracingGuard {
 public:
  TracingGuard();
  C10_DISABLE_COPY_AND_ASSIGN(TracingGuard);
  ~TracingGuard();
};

// Returns `Interpreter::sourceLineHere()`, or an empty string on a thread that does not trace.
std::string tracedSourceLine();

}  // namespace torchext
