#pragma once

// What differs between the supported releases of PyTorch and cannot be asked for itself at run time. C++ and Python ask
// the table below, so that an entry can go when its last release does. The release 2.11 is written 211.

#include <array>
#include <stdexcept>
#include <string_view>

#include <c10/core/StorageImpl.h>
#include <torch/version.h>

// For names that the compiler finds in some releases only.
#define TORCHEXT_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

namespace torchext::compat {

static_assert(TORCHEXT_TORCH >= 211, "torchext needs PyTorch 2.11 or later; upgrade with `pip install 'torch>=2.11'`");

struct Difference {
  std::string_view name;
  int since;
  int until;
  const char* what;
};

constexpr int kOpen = 9900;  // as `until`: no release has ended it

inline constexpr std::array<Difference, 16> kDifferences{{
    {"dynamo_keeps_parameters", 211, 211, "Dynamo does not compile again when parameters become AmpTensors in place"},
    {"storages_refuse_forever", 211, 211, "a `StorageImpl` that was told to refuse access cannot be told to allow it"},
    {"fake_above_python", 211, 212, "`Fake` is above `Python`, so that handlers of modes call operators below it"},
    {"dynamo_loses_generators", 211, 213, "Dynamo loses what decorated generators return, or cannot resume them"},
    {"dtypes_of_cuda", 211, 215, "CUDA kernels refuse the dtypes of refused_dtypes_table.h"},
    {"attention_state_on_cpu", 211, 213, "memory-efficient attention without dropout returns its state on the CPU"},
    {"pipelines_vote", 212, 214, "pipeline stages read what others have voted in `_warmup_p2p()`"},
    {"masks_of_truncated_normals", 212, kOpen, "`trunc_normal_` draws again while `mask.any()`"},
    {"workspaces_of_blackwell", 212, kOpen, "cuBLAS's large workspace is that of compute capability 9 to 12, not of 9"},
    {"shared_workspaces", 212, kOpen, "cuBLASLt takes cuBLAS's workspace; before, it had one of its own"},
    {"pipelines_meet", 215, kOpen, "pipeline stages meet in `_initialize_pipeline_distributed_state()`"},
    {"freed_workspaces", 215, kOpen, "each call of cuBLAS frees its workspace; before, the thread kept the first"},
    {"matrices_as_bias", 215, kOpen, "cuBLASLt adds a whole matrix of half precision, and not only a vector"},
    {"attention_heads", 215, kOpen, "all fused attention takes grouped heads, one head of keys, and no batch"},
    {"attention_alignment", 215, kOpen, "memory-efficient attention checks the offsets of its arguments"},
    {"cudnn_9_26", 215, kOpen, "builds for CUDA 13 bring cuDNN 9.26, which takes heads of 256, and not 9.19"},
}};

// Returns true if the PyTorch that this is compiled for is one of the releases of the entry.
constexpr bool applies(std::string_view name) {
  for (const Difference& entry : kDifferences) {
    if (entry.name == name) {
      return entry.since <= TORCHEXT_TORCH && TORCHEXT_TORCH <= entry.until;
    }
  }
  throw std::logic_error{"no difference between releases has this name"};
}

// Lets a storage that refused access to its data return pointers again. Takes effect with the next
// `set_data_ptr_noswap()`.
static_assert(applies("storages_refuse_forever") == (TORCHEXT_TORCH < 212));
#if TORCHEXT_TORCH >= 212

inline void allowDataAccess(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}

#else

// Only an explicit instantiation, which may name a private member ([temp.spec]), gives access to the flag.
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

}  // namespace torchext::compat
