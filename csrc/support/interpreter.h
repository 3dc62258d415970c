#pragma once

// What the core needs from the language that the program is written in, in one table, like PyTorch's
// `PyInterpreterVTable`. The core does not know Python: the bindings derive from the table, and set it once, when they
// are loaded. The functions of the base class are for programs written in C++ only.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <torchext/macros.h>

namespace torchext {

// Errors for which the language has classes of its own: torchext/errors.py. PyTorch translates every c10::Error
// into one of a few classes.
enum class ErrorKind : std::uint8_t { kDataDependent, kUnsupportedOperator };

// A function that is running.
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
  virtual void withoutLock(c10::function_ref<void()> run) const;

  // Calls `run` with the interpreter's lock. For code that needs it while it holds a lock of ours that others wait for
  // with the interpreter's: it takes this one first, as they do. Locks that are held for long are waited for without
  // it: NOTE [The order of locks].
  virtual void withLock(c10::function_ref<void()> run) const;

  // Returns true if `error` asks the program to stop, as Python's KeyboardInterrupt does. It must not be taken for a
  // failure of the operator that raised it.
  virtual bool isInterrupt(const std::exception& error) const;

  // Returns the source line that runs now, as "file:line in function"; empty if that cannot be told.
  virtual std::string sourceLineHere() const;

  // Returns the functions that are running, the innermost first.
  virtual std::vector<StackFrame> stackHere() const;

  // Raises an error of the language's class for `kind`; returns if there is none.
  virtual void raise(ErrorKind kind, const std::string& message) const;

  // Raises what PyTorch would translate `error` into, with `note` in the form that the language has for notes; returns
  // if it has none.
  virtual void raiseWithNote(const c10::Error& error, const std::string& note) const;
};

// Set and return the table that is in use. It must live until the process ends.
TORCHEXT_API void setInterpreter(const Interpreter& interpreter) noexcept;
const Interpreter& interpreter();

}  // namespace torchext
