#pragma once

// NOTE [Origins of inference tensors]
//
// Errors about inference tensors are raised far from where the tensors were made. While a thread traces, each inference
// tensor that an operator returns is marked with the line of the program that called the operator. The mark hangs on
// the TensorImpl, in the place that PyTorch has for a backend's own metadata, so it dies with the tensor; and all
// tensors of one line share one mark, so there are no more marks than lines.
//
// A thread that traces includes a key above all others that do anything, which PyTorch has for modes in tests. Marked
// tensors carry that key themselves, so that operators on them are met when nobody traces any more, on any thread: an
// error about inference tensors gets a note of where they come from. What is not marked does not meet the key, so a
// program that never traces pays nothing.

#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../macros.h"

namespace torchext {

constexpr c10::DispatchKey kOriginsKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Where `tensor` was made, as the source tracer told it (deferred_init/source_trace.h). Empty when nobody traced then.
TORCHEXT_API std::string originOf(const at::TensorBase& tensor);

// Unmarks `tensor`.
void forgetOrigin(c10::TensorImpl& impl);

// Makes this thread trace until the innermost guard of its dispatch keys is left.
TORCHEXT_API void traceOriginsHere();

// Whether each block of inference mode (mode_blocks.h) traces, on any thread, once it is entered.
TORCHEXT_API void traceOriginsInBlocks(bool enabled);
bool areBlocksTraced() noexcept;

// Raises `error` with `note` in whatever form the language of the caller has for notes; returns when it has none, and
// then the note becomes a line of the message. Set by the bindings; null before.
using NoteRaiser = void (*)(const c10::Error& error, const std::string& note);
void setNoteRaiser(NoteRaiser raiser);

// Held while the process forks, so that the child does not find it locked by a thread that it does not have.
void lockOrigins();
void unlockOrigins();

// The fallback of `kOriginsKey`.
void originsFallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace torchext
