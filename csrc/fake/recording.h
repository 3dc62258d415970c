#pragma once

namespace torchext {

// Lives while the recorder of deferred_init runs an operator as a fake one on this thread. It catches what the `Fake`
// handler refuses as not implemented, and runs the operator for real then. Nests.
//
// That the thread excludes the key `DeferredInit` does not tell: so it does in the handler of a TorchDispatchMode.
class RecordingGuard {
 public:
  RecordingGuard() noexcept;
  RecordingGuard(const RecordingGuard&) = delete;
  RecordingGuard& operator=(const RecordingGuard&) = delete;
  RecordingGuard(RecordingGuard&&) = delete;
  RecordingGuard& operator=(RecordingGuard&&) = delete;
  ~RecordingGuard();
};

bool isRecording() noexcept;

}  // namespace torchext
