#include "real_dispatch.h"

#include <utility>

#include <c10/core/DefaultDtype.h>

#include "../../../libraries/support/recently_shared.h"
#include "../../fake/calls/recording.h"
#include "../../torch_internals/autocast_mode.h"

namespace torchext {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

constexpr std::array<c10::DeviceType, 2> kAutocastDevices{c10::kCPU, c10::kCUDA};

// Removed from both sets of the recorded state, then excluded.
const DispatchKeySet kSkipped =
    kHiddenFromUsers | DispatchKeySet({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                       DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode});

// Sets the part of the state that no PyTorch guard covers. The default dtype is that of the process, and other threads
// read it without a lock, so it is written only if it differs from that of the recording
// (docs/reference/limitations.md).
void setDtypes(const ThreadState& state) {
  if (c10::get_default_dtype_as_scalartype() != state.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(state.default_dtype));
  }
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    autocast::set_autocast_dtype(kAutocastDevices[i], state.autocast_dtypes[i]);
  }
}

}  // namespace

ThreadState ThreadState::current() {
  ThreadState state{c10::impl::tls_local_dispatch_key_set(),
                    c10::get_default_dtype_as_scalartype(),
                    {},
                    c10::GradMode::is_enabled(),
                    KernelSettings::current()};
  for (std::size_t i = 0; i < kAutocastDevices.size(); ++i) {
    state.autocast_dtypes[i] = autocast::get_autocast_dtype(kAutocastDevices[i]);
  }
  return state;
}

std::shared_ptr<const ThreadState> ThreadState::shared() {
  thread_local RecentlyShared<ThreadState, 2> recent;
  const ThreadState now = current();
  const auto is_same = [&now](const ThreadState& known) {
    return known.keys.included_ == now.keys.included_ && known.keys.excluded_ == now.keys.excluded_ &&
           known.default_dtype == now.default_dtype && known.autocast_dtypes == now.autocast_dtypes &&
           known.grad_mode == now.grad_mode && known.settings == now.settings;
  };
  return recent.get(is_same, [&now] { return now; });
}

NoFunctionModes::NoFunctionModes() {
  using at::impl::PythonTorchFunctionTLS;
  if (PythonTorchFunctionTLS::stack_len() > 0) {
    previous_ = PythonTorchFunctionTLS::get_state();
    PythonTorchFunctionTLS::set_state({});
  }
}

NoFunctionModes::~NoFunctionModes() {
  if (previous_) {
    at::impl::PythonTorchFunctionTLS::set_state(*previous_);
  }
}

RealDispatch::RealDispatch(ThreadState now, const ThreadState* state)
    : previous_{std::move(now)},
      keys_{(state != nullptr ? *state : previous_).keys.included_ - kSkipped,
            (state != nullptr ? *state : previous_).keys.excluded_ | kSkipped},
      grad_mode_{state != nullptr && state->grad_mode},
      settings_{state != nullptr ? *state->settings : *previous_.settings, *previous_.settings},
      had_autocast_cache_{autocast::is_autocast_cache_enabled()} {
  setDtypes(state != nullptr ? *state : previous_);
  autocast::set_autocast_cache_enabled(false);
}

RealDispatch::~RealDispatch() {
  autocast::set_autocast_cache_enabled(had_autocast_cache_);
  setDtypes(previous_);
}

}  // namespace torchext
