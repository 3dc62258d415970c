#include "errors.h"

#include <atomic>

namespace torchext {

namespace {

std::atomic<ErrorTranslator> current_translator{nullptr};

}  // namespace

void setErrorTranslator(ErrorTranslator translator) {
  current_translator = translator;
}

void translateError(ErrorKind kind, const c10::Error& error) {
  if (const ErrorTranslator translator = current_translator) {
    translator(kind, error.what_without_backtrace());
  }
}

}  // namespace torchext
