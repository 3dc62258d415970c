#include "recording.h"

namespace torchext {

namespace {

thread_local int depth = 0;

}  // namespace

RecordingGuard::RecordingGuard() noexcept {
  ++depth;
}

RecordingGuard::~RecordingGuard() {
  --depth;
}

bool isRecording() noexcept {
  return depth > 0;
}

}  // namespace torchext
