#pragma once

// What the core needs from the language that the program is written in, in one table, as PyTorch has it in its
// `PyInterpreterVTable`. The core does not know Python: the bindings derive from the table and set it once, when they
// are loaded. The functions of the base are those of a program without another language than C++.

#include <cstdint>
#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include "macros.h"

namespace torchext {

// Errors that the language has classes for: torchext/fake/errors.py. PyTorch turns every c10::Error into one of its own
// few.
enum class ErrorKind : std::uint8_t { kDataDependent, kUnsupportedOperator };

class TORCHEXT_API Interpreter {
 public:
  Interpreter() = default;
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  Interpreter(Interpreter&&) = delete;
  Interpreter& operator=(Interpreter&&) = delete;
  virtual ~Interpreter();

  // Calls `run` without the interpreter's lock, if this thread holds it.
  virtual void withoutLock(c10::function_ref<void()> run) const;

  // Returns true if `error` asks the program to stop, as Python's KeyboardInterrupt does, and so must not be taken for
  // a failure of what raised it.
  virtual bool isInterrupt(const std::exception& error) const;

  // Where the program stands, as "file:line in function"; empty when that cannot be told.
  virtual std::string sourceHere() const;

  // Raises an error of the language's class for `kind`; returns when there is none.
  virtual void raise(ErrorKind kind, const std::string& message) const;

  // Raises what PyTorch would make of `error`, with `note` in whatever form the language has for notes; returns when it
  // has none.
  virtual void raiseWithNote(const c10::Error& error, const std::string& note) const;
};

// The table that is in force. `interpreter` must live until the process ends.
TORCHEXT_API void setInterpreter(const Interpreter& interpreter) noexcept;
const Interpreter& interpreter();

}  // namespace torchext
