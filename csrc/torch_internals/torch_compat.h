#pragma once

// The differences between PyTorch 2.11 and 2.15 for which the C++ must be compiled differently, and nothing else. What
// can be asked at run time is asked where it matters. Each entry names the release that changed, so that it can go when
// the oldest supported release does.

#include <cstddef>
#include <type_traits>

#include <c10/core/AllocatorConfig.h>
#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#define TORCHEXT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

static_assert(TORCHEXT_TORCH_AT_LEAST(2, 11),
              "torchext needs PyTorch 2.11 or later; upgrade with `pip install 'torch>=2.11'`");

namespace torchext::compat {

#if TORCHEXT_TORCH_AT_LEAST(2, 13)

// Lets a storage that refused access to its data return pointers again. Takes effect with the next
// `set_data_ptr_noswap()`.
inline void allowDataAccess(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}

#else

// Before 2.13 StorageImpl can be told to refuse access, but not to allow it again. Only an explicit instantiation,
// which may name a private member ([temp.spec]), gives access to its flag.
template <auto Member>
struct PrivateFlag {
  friend bool& refusesDataAccess(c10::StorageImpl& storage) {
    return storage.*Member;
  }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
bool& refusesDataAccess(c10::StorageImpl& storage);

inline void allowDataAccess(c10::StorageImpl& storage) {
  refusesDataAccess(storage) = false;
}

#endif

// Returns the size of the segments that allocations between 1 and 10 MiB share, in bytes. The setting
// `large_segment_size_mb` came within the supported releases.
template <typename Settings = c10::CachingAllocator::AcceleratorAllocatorConfig, typename = void>
struct LargeSegment {
  static std::size_t size() {
    return std::size_t{20} << 20;
  }
};
template <typename Settings>
struct LargeSegment<Settings, std::void_t<decltype(Settings::large_segment_size())>> {
  static std::size_t size() {
    return Settings::large_segment_size();
  }
};

inline std::size_t largeSegmentSize() {
  return LargeSegment<>::size();
}

}  // namespace torchext::compat
