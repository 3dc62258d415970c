#include "region.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../hooks/hooks.h"
#include "../torch_internals/autocast_mode.h"

namespace torchext {

using c10::DeviceType;
using c10::ScalarType;

namespace {

// The thread state before a region.
struct Previous {
  bool is_enabled;
  bool is_caching;
  ScalarType dtype;
};

struct OpenRegion {
  BlockOwner owner;
  DeviceType device_type;
  bool is_enabled;
  bool is_self_cleaning;
  Previous previous;
  LeaseHold lease;
  std::optional<LeaseHold> marks_lease;  // of a self-cleaning region: its results will be marked
};

std::vector<OpenRegion>& openRegions() {
  thread_local std::vector<OpenRegion> regions;
  return regions;
}

// The keys that were excluded where compiled code was entered; nullopt outside of compiled code.
thread_local std::optional<c10::DispatchKeySet> excluded_around_compiled_code;

// PyTorch caches one cast per weight, of any dtype: a region of another dtype would get the casts of the region
// around it.
void setDtype(DeviceType device_type, ScalarType dtype) {
  if (autocast::get_autocast_dtype(device_type) != dtype) {
    autocast::set_autocast_dtype(device_type, dtype);
    autocast::clear_cache();
  }
}

// Restores the state before `left`. If regions that were entered later are still open, from `begin` to `end`, the next
// one of them inherits this state, to restore it.
void restore(const OpenRegion& left, OpenRegion* begin, OpenRegion* end) {
  if (begin != end) {
    begin->previous.is_caching = left.previous.is_caching;
  } else {
    autocast::set_autocast_cache_enabled(left.previous.is_caching);
  }
  const auto next =
      std::find_if(begin, end, [&left](const OpenRegion& later) { return later.device_type == left.device_type; });
  if (next != end) {
    next->previous.is_enabled = left.previous.is_enabled;
    next->previous.dtype = left.previous.dtype;
  } else {
    autocast::set_autocast_enabled(left.device_type, left.previous.is_enabled);
    setDtype(left.device_type, left.previous.dtype);
  }
}

DeviceType findAccelerator() {
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  const bool is_usable = accelerator && autocast::is_autocast_available(*accelerator) &&
                         at::globalContext().getAcceleratorHooksInterface(accelerator).isAvailable();
  return is_usable ? *accelerator : c10::kCPU;
}

}  // namespace

void enterRegion(BlockOwner owner, const RegionOptions& options) {
  const DeviceType device_type = options.device_type;
  const Previous previous{autocast::is_autocast_enabled(device_type), autocast::is_autocast_cache_enabled(),
                          autocast::get_autocast_dtype(device_type)};
  const bool is_enabled = options.is_enabled && canAutocastTo(device_type, options.dtype);
  const bool is_self_cleaning = options.is_self_cleaning && is_enabled;
  OpenRegion region{owner, device_type, is_enabled, is_self_cleaning, previous, LeaseHold{leaseOfRegions()}, {}};
  if (is_self_cleaning) {
    const auto& begin_cleaning = hooks().guards.beginCleaning;
    TORCH_CHECK_NOT_IMPLEMENTED(begin_cleaning, "This build of torchext has no self-cleaning regions.");
    region.marks_lease.emplace(leaseOfMarks());
    begin_cleaning();
  }
  openRegions().push_back(std::move(region));
  autocast::set_autocast_enabled(device_type, is_enabled);
  if (options.dtype) {
    setDtype(device_type, *options.dtype);
  }
  autocast::set_autocast_cache_enabled(options.is_caching.value_or(previous.is_caching));
  autocast::increment_nesting();
}

void leaveRegion(BlockOwner owner) {
  auto& regions = openRegions();
  const auto position = innermostOf(regions, owner);
  TORCH_CHECK(position != regions.end(),
              "Cannot leave a region of torchext.amp.autocast that is not open on this thread. Leave it once for each "
              "time that it was entered, on the same thread, or use `with`.");
  const OpenRegion left = std::move(*position);
  const auto later = regions.erase(position);
  OpenRegion* const end = regions.data() + regions.size();
  restore(left, end - (regions.end() - later), end);
  if (left.is_self_cleaning) {
    hooks().guards.endCleaning();
  }
  if (autocast::decrement_nesting() == 0) {
    autocast::clear_cache();
  }
}

AutocastRegion::AutocastRegion(const RegionOptions& options) : owner_{newBlockOwner()} {
  enterRegion(owner_, options);
}

AutocastRegion::~AutocastRegion() {
  leaveRegion(owner_);
}

bool isInSelfCleaningRegion() noexcept {
  const auto& regions = openRegions();
  return std::any_of(regions.begin(), regions.end(), [](const OpenRegion& open) { return open.is_self_cleaning; });
}

CompiledCodeGuard::CompiledCodeGuard() : previous_{excluded_around_compiled_code} {
  if (!previous_) {
    excluded_around_compiled_code = c10::impl::tls_local_dispatch_key_set().excluded_;
  }
}

CompiledCodeGuard::~CompiledCodeGuard() {
  excluded_around_compiled_code = previous_;
}

bool isAutocastingAroundCompiledCode(DeviceType device_type) {
  return excluded_around_compiled_code && canAutocast(device_type) &&
         !excluded_around_compiled_code->has(autocast::get_autocast_dispatch_key_from_device_type(device_type));
}

bool canAutocast(DeviceType device_type) noexcept {
  return autocast::is_autocast_available(device_type);
}

bool canAutocastTo(DeviceType device_type, std::optional<ScalarType> dtype) {
  const ScalarType target = dtype ? *dtype : autocast::get_autocast_dtype(device_type);
  return device_type == c10::kCUDA || target == at::kBFloat16 || target == at::kHalf;
}

DeviceType deviceTypeInUse() {
  if (hooks().devices.count() > 0) {
    return c10::kCUDA;
  }
  static const DeviceType accelerator = findAccelerator();
  return accelerator;
}

bool isAutocasting(DeviceType device_type) {
  return autocast::is_autocast_enabled(device_type);
}

// PyTorch has no function that only returns the depth.
int regionDepth() noexcept {
  autocast::increment_nesting();
  return autocast::decrement_nesting();
}

bool isInEnabledRegion() noexcept {
  const auto& regions = openRegions();
  return std::any_of(regions.begin(), regions.end(), [](const OpenRegion& open) {
    return open.is_enabled && autocast::is_autocast_enabled(open.device_type);
  });
}

}  // namespace torchext
