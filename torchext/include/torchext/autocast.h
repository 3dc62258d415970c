#pragma once

/// @file
/// Regions in which operators choose the dtypes that they compute in: the kernels of `torch.autocast`.

#include <cstdint>
#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

namespace torchext {

/// What an AutocastRegion sets.
struct RegionOptions {
  /// A type of devices that autocasts: canAutocast().
  c10::DeviceType device_type;
  /// The dtype to cast to; the one that is set on this thread if absent.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  /// Without effect where canAutocastTo() is false.
  bool is_enabled = true;
  /// Whether casts of weights are remembered until the outermost region ends; as on this thread if absent.
  std::optional<bool> is_caching = std::nullopt;
  /// Whether what operators make inside, in a lower precision, is cast back to float32 where it is met outside.
  bool is_self_cleaning = false;
};

/// While it lives, operators on this thread autocast, as in `torch.autocast`. Regions of both kinds nest.
class TORCHEXT_API AutocastRegion {
 public:
  /// @throws c10::Error The type of devices does not autocast.
  explicit AutocastRegion(const RegionOptions& options);
  C10_DISABLE_COPY_AND_ASSIGN(AutocastRegion);
  ~AutocastRegion();

 private:
  std::uint64_t owner_;
};

/// Can tensors on `device_type` be autocast at all?
TORCHEXT_API bool canAutocast(c10::DeviceType device_type) noexcept;

/// Can operators on `device_type` autocast to `dtype`, or, if absent, to the dtype that is set on this thread? On all
/// devices but CUDA `torch.autocast` disables itself where they cannot.
TORCHEXT_API bool canAutocastTo(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype);

/// Do operators autocast on this thread, for tensors on `device_type`?
TORCHEXT_API bool isAutocasting(c10::DeviceType device_type);

}  // namespace torchext
