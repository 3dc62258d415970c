#pragma once

/// @file
/// Regions in which operators autocast, by the kernels of `torch.autocast`.

#include <cstdint>
#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

namespace torchext {

/// The settings of an AutocastRegion.
struct RegionOptions {
  /// A device type for which canAutocast() returns true.
  c10::DeviceType device_type;
  /// The dtype to cast to. Defaults to the one that is set on this thread.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  /// False disables autocast inside. Ignored if canAutocastTo() returns false.
  bool is_enabled = true;
  /// Whether casts of weights are cached until the outermost region ends. Defaults to the setting of this thread.
  std::optional<bool> is_caching = std::nullopt;
  /// Whether results that operators make inside in a lower precision are cast to float32 by operators outside.
  bool is_self_cleaning = false;
};

/// Enables autocast for operators on this thread while it lives, like `torch.autocast`. Both kinds of regions nest.
class TORCHEXT_API AutocastRegion {
 public:
  /// @throws c10::Error The device type does not support autocast.
  explicit AutocastRegion(const RegionOptions& options);
  C10_DISABLE_COPY_AND_ASSIGN(AutocastRegion);
  ~AutocastRegion();

 private:
  std::uint64_t owner_;
};

/// Returns true if tensors on `device_type` can be autocast.
TORCHEXT_API bool canAutocast(c10::DeviceType device_type) noexcept;

/// Returns true if operators on `device_type` can autocast to `dtype`, which defaults to the one that is set on this
/// thread. On devices other than CUDA, `torch.autocast` disables itself if they cannot.
TORCHEXT_API bool canAutocastTo(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype);

/// Returns true if operators autocast on this thread, for tensors on `device_type`.
TORCHEXT_API bool isAutocasting(c10::DeviceType device_type);

}  // namespace torchext
