#pragma once

// NOTE [Settings that kernels read]
//
// Kernels read more than their arguments: settings of the process (`at::Context`) and of the thread. A recorded call
// runs later, maybe in another function or on another thread. So each setting is handled in one of three ways, which
// docs/reference/deferred_init.md lists:
//
//   * Recorded with each call and restored for its replay. This is the rule. Settings of the process are written only
//     where they differ, because other threads read them without a lock.
//   * Compared at replay; a difference is an error. This applies where restoring is impossible or unsafe.
//   * Irrelevant to recorded calls, because the code that reads it has already run: Python and composite operators.

#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

namespace torchext {

// The numeric settings at the time when a call was recorded.
class KernelSettings {
 public:
  // Returns those of this thread. Consecutive calls share one object while nothing changes. Costs about 0.1 us.
  TORCHEXT_API static std::shared_ptr<const KernelSettings> current();

  bool isDeterministic() const noexcept;
  bool flushesDenormals() const noexcept;

  // The number of threads that kernels divided their work among.
  int threads() const noexcept;

  // Returns the name of a precision of CUDA matrix products that has changed since, or nothing.
  std::optional<std::string_view> changedCudaPrecision() const;

  // Returns all settings by name, for reports and digests.
  TORCHEXT_API std::vector<std::pair<std::string_view, int>> list() const;

  bool operator==(const KernelSettings& other) const noexcept {
    return values_ == other.values_;
  }

 private:
  friend class KernelSettingsGuard;

  static constexpr std::size_t kCount = 24;

  KernelSettings();

  std::array<int, kCount> values_{};
};

// While it lives, all settings except the number of threads are those of `wanted`. Restores them. `now` are the present
// settings.
class KernelSettingsGuard {
 public:
  KernelSettingsGuard(const KernelSettings& wanted, const KernelSettings& now);
  C10_DISABLE_COPY_AND_ASSIGN(KernelSettingsGuard);
  ~KernelSettingsGuard();

 private:
  void change(const KernelSettings& wanted);
  void restore() const;

  // Values to restore, by the number of the setting.
  std::vector<std::pair<std::size_t, int>> changed_;
};

}  // namespace torchext
