#pragma once

// NOTE [What results depend on]
//
// Kernels read more than their arguments: settings of the process (`at::Context`) and of the thread. A recorded call
// runs later, maybe in another function or on another thread, so each of these settings has one of three answers, which
// docs/how_to/deferred_init.md lists:
//
//   * It is recorded with each call and put back for its replay. That is the rule. Settings of the process are written
//     only where they differ, because other threads read them without a lock.
//   * It is compared at replay, and a difference is an error. That is so where putting it back is impossible or not
//   safe.
//   * It cannot reach a recorded call, because what reads it has run by then: Python and composite operators.

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <torchext/macros.h>

namespace torchext {

// The settings that are numbers, as they were when a call was recorded.
class KernelSettings {
 public:
  // Those of this thread. Consecutive calls share one object while nothing changes. Costs about 0.1 microseconds.
  TORCHEXT_API static std::shared_ptr<const KernelSettings> current();

  bool isDeterministic() const noexcept;
  bool flushesDenormals() const noexcept;

  // Among how many threads kernels divided their work.
  int threads() const noexcept;

  // Returns true if the process has been forked since.
  bool wereReadBeforeFork() const noexcept;

  // The name of a precision of products on CUDA that is another now, or nothing.
  std::optional<std::string_view> changedCudaPrecision() const;

  // Each by its name, for reports and digests.
  TORCHEXT_API std::vector<std::pair<std::string_view, int>> list() const;

  bool operator==(const KernelSettings& other) const noexcept {
    return values_ == other.values_ && forks_ == other.forks_;
  }

 private:
  friend class KernelSettingsGuard;

  static constexpr std::size_t kCount = 24;

  KernelSettings();

  std::array<int, kCount> values_{};
  // How many forks led to the process.
  int forks_;
};

// While it lives, the settings but for the number of threads are those of `wanted`. Restores them.
class KernelSettingsGuard {
 public:
  explicit KernelSettingsGuard(const KernelSettings& wanted);
  C10_DISABLE_COPY_AND_ASSIGN(KernelSettingsGuard);
  ~KernelSettingsGuard();

 private:
  void change(const KernelSettings& wanted);
  void restore() const;

  // What to set, by the number of the setting.
  std::vector<std::pair<std::size_t, int>> changed_;
};

}  // namespace torchext
