#include "error_texts.h"

#include <string>

#include <c10/core/TensorImpl.h>

namespace torchext {

namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Calls `raise`, and returns true if `recognizes` recognizes the error.
template <typename Raise, typename Recognizes>
bool isRecognized(Raise raise, Recognizes recognizes) {
  try {
    raise();
  } catch (const c10::Error& error) {
    return recognizes(error);
  }
  return false;
}

}  // namespace

bool isInternalAssert(const c10::Error& error) {
  return contains(error.msg(), "INTERNAL ASSERT FAILED");
}

bool isAboutInferenceTensors(const c10::Error& error) {
  return contains(error.what_without_backtrace(), "nference tensor");
}

bool isWriteToInferenceTensor(const c10::Error& error) {
  return contains(error.what_without_backtrace(), "Inplace update to inference tensor");
}

bool isOutOfMemory(std::string_view message) {
  return contains(message, "allocate memory");
}

bool testErrorTexts(bool is_broken) {
  const auto write = [is_broken] {
    if (is_broken) {
      TORCH_CHECK(false, "in other words");
    }
    c10::VariableVersion{c10::VariableVersion::DISABLED}.bump();
  };
  const auto fail = [] { TORCH_INTERNAL_ASSERT(false); };
  return isRecognized(write, isWriteToInferenceTensor) && isRecognized(write, isAboutInferenceTensors) &&
         isRecognized(fail, isInternalAssert);
}

}  // namespace torchext
