#pragma once

// Differences between the supported releases of PyTorch that cannot be detected at run time. C++ and Python look them
// up in the table below, so that an entry can be removed with its last release. Release 2.11 is written 211.

#include <array>
#include <stdexcept>
#include <string_view>

#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include "private_members.h"

// For names that only some releases declare.
#define TORCHEXT_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

#if TORCHEXT_TORCH < 212
TORCHEXT_OPEN_MEMBER(RefusalOfDataAccess, &c10::StorageImpl::throw_on_immutable_data_ptr_)
#endif

namespace torchext::compat {

static_assert(TORCHEXT_TORCH >= 211, "torchext needs PyTorch 2.11 or later; upgrade with `pip install 'torch>=2.11'`");

struct Difference {
  std::string_view name;
  int since;
  int until;
  const char* what;
};

constexpr int kOpen = 9900;  // as `until`: in all later releases

inline constexpr std::array<Difference, 16> kDifferences{{
    {"dynamo_keeps_parameters", 211, 211, "Dynamo does not recompile when parameters become AmpTensors in place"},
    {"storages_refuse_forever", 211, 211, "a `StorageImpl` that rejects data access cannot allow it again"},
    {"fake_above_python", 211, 212, "`Fake` is above `Python`, so that handlers of modes call operators below it"},
    {"dynamo_loses_generators", 211, 213,
     "Dynamo loses the return values of decorated generators, or cannot resume them"},
    {"dtypes_of_cuda", 211, 215, "CUDA kernels reject the dtypes of refused_dtypes.tsv"},
    {"attention_state_on_cpu", 211, 213, "memory-efficient attention without dropout returns its state on the CPU"},
    {"pipelines_vote", 212, 214, "pipeline stages read the votes of other stages in `_warmup_p2p()`"},
    {"masks_of_truncated_normals", 212, kOpen, "`trunc_normal_` draws again while `mask.any()`"},
    {"workspaces_of_blackwell", 212, kOpen, "compute capability 9 to 12, not only 9, has the large cuBLAS workspace"},
    {"shared_workspaces", 212, kOpen, "cuBLASLt uses the cuBLAS workspace; before, it had a separate one"},
    {"pipelines_meet", 215, kOpen, "pipeline stages synchronize in `_initialize_pipeline_distributed_state()`"},
    {"freed_workspaces", 215, kOpen, "each cuBLAS call frees its workspace; before, the thread kept the first one"},
    {"matrices_as_bias", 215, kOpen, "cuBLASLt adds a whole matrix of half precision, not only a vector"},
    {"attention_heads", 215, kOpen, "all fused attention accepts grouped heads, one key head, and no batch"},
    {"attention_alignment", 215, kOpen, "memory-efficient attention checks the offsets of its arguments"},
    {"cudnn_9_26", 215, kOpen, "builds for CUDA 13 have cuDNN 9.26, which accepts heads of 256, not 9.19"},
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

static_assert(applies("storages_refuse_forever") == (TORCHEXT_TORCH < 212));

// Lets a storage that rejected access to its data return pointers again. Takes effect with the next
// `set_data_ptr_noswap()`.
inline void allowDataAccess(c10::StorageImpl& storage) {
#if TORCHEXT_TORCH >= 212
  storage.clear_data_ptr_access_error_msg_();
#else
  storage.*memberOf(opened::RefusalOfDataAccess{}) = false;
#endif
}

}  // namespace torchext::compat
