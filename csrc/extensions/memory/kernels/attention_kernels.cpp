// Scaled dot product attention: transformers/cuda in ATen/native. The flash attention kernels are those for sm80 and
// later, the memory-efficient attention kernels the largest for sm80 in kernel_forward.h and kernel_backward.h.

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

constexpr std::int64_t kFloat = 4;  // bytes

std::int64_t blocksOf(std::int64_t size, std::int64_t block) {
  return (size + block - 1) / block;
}

std::int64_t roundedUp(std::int64_t size, std::int64_t block) {
  return blocksOf(size, block) * block;
}

// The sizes of an attention whose tensors are [batch, head, position, feature].
struct AttentionSizes {
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t key_heads;
  std::int64_t queries;
  std::int64_t keys;
  std::int64_t features;

  AttentionSizes(const Tensor& query, const Tensor& key)
      : batch{query.size(0)},
        heads{query.size(1)},
        key_heads{key.size(1)},
        queries{query.size(2)},
        keys{key.size(2)},
        features{query.size(3)} {}

  std::int64_t rows() const {
    return batch * heads * queries;
  }
  // The number of features that flash attention rounds to.
  std::int64_t roundedFeatures() const {
    constexpr std::int64_t kSmall = 128;
    return roundedUp(features, features <= kSmall ? 32 : 64);
  }
};

// `num_splits_heuristic()` in flash_api.cpp: the number of parts of the keys that keeps the device busy.
std::int64_t countSplits(const AttentionSizes& sizes, const GpuDescription& gpu) {
  constexpr std::int64_t kRowsOfBlock = 64;
  constexpr std::int64_t kMaxSplits = 128;
  const std::int64_t keys_of_block = sizes.features <= 64 ? 256 : sizes.features <= 128 ? 128 : 64;
  const std::int64_t num_blocks = sizes.batch * sizes.heads * blocksOf(sizes.queries, kRowsOfBlock);
  const std::int64_t key_blocks = blocksOf(sizes.keys, keys_of_block);
  const auto processors = toSigned(gpu.multiprocessors) * 2;
  if (static_cast<float>(num_blocks) >= 0.8F * static_cast<float>(processors)) {
    return 1;
  }
  const std::int64_t max_splits = std::min({kMaxSplits, processors, key_blocks});
  const auto is_eligible = [&](std::int64_t splits) {
    return splits == 1 || blocksOf(key_blocks, splits) != blocksOf(key_blocks, splits - 1);
  };
  const auto efficiency = [&](std::int64_t splits) {
    const float waves = static_cast<float>(num_blocks * splits) / static_cast<float>(processors);
    return waves / std::ceil(waves);
  };
  float best = 0;
  for (std::int64_t splits = 1; splits <= max_splits; ++splits) {
    best = is_eligible(splits) ? std::max(best, efficiency(splits)) : best;
  }
  for (std::int64_t splits = 1; splits <= max_splits; ++splits) {
    if (is_eligible(splits) && efficiency(splits) >= 0.85F * best) {
      return splits;
    }
  }
  return 1;
}

// The results are the output, the log-sum-exp, lengths that are not allocated, and the state of the generator.
void flashAttention(KernelCall& call) {
  AttentionSizes sizes{call.tensor(0), call.tensor(1)};
  call.allocateResults({0, 1});
  constexpr std::size_t kSeed = 6;
  constexpr std::size_t kOffset = 7;
  if (call.argument(3).toDouble() > 0) {
    const BlockNumber state = call.allocate(2 * toSigned(sizeof(std::int64_t)));
    call.allocateResults({kOffset, kSeed});
    call.free(state);
    return;
  }
  if (sizes.queries == 1 && sizes.heads > sizes.key_heads) {
    // The queries of a group of heads are processed as queries of one head.
    sizes.queries = sizes.heads / sizes.key_heads;
    sizes.heads = sizes.key_heads;
  }
  const std::int64_t splits = countSplits(sizes, call.gpu);
  const std::int64_t parts = splits == 1 ? 0 : splits * sizes.rows() * kFloat;
  const BlockNumber sums = call.allocate(parts);
  const BlockNumber outputs = call.allocate(parts * sizes.roundedFeatures());
  call.allocateResults({kSeed, kOffset});
  call.free({sums, outputs});
}

// The kernels read [batch, position, head, feature].
BlockNumber copyForKernel(KernelCall& call, const Tensor& tensor) {
  return tensor.transpose(1, 2).is_contiguous() ? -1 : call.copy(tensor);
}

void flashAttentionBackward(KernelCall& call) {
  const AttentionSizes sizes{call.tensor(1), call.tensor(2)};
  const BlockNumber gradient = copyForKernel(call, call.tensor(0));
  const BlockNumber output = copyForKernel(call, call.tensor(4));
  call.allocateResults();
  constexpr std::int64_t kRowsOfBlock = 128;
  const std::int64_t rows = sizes.batch * sizes.heads * roundedUp(sizes.queries, kRowsOfBlock);
  const BlockNumber softmax = call.allocate(rows * kFloat);
  const BlockNumber query = call.allocate(rows * sizes.roundedFeatures() * kFloat);
  const bool is_grouped = sizes.heads != sizes.key_heads;
  const std::int64_t expanded =
      is_grouped ? sizes.batch * sizes.keys * sizes.heads * sizes.features * toSigned(call.tensor(2).element_size())
                 : 0;
  const BlockNumber key = call.allocate(expanded);
  const BlockNumber value = call.allocate(expanded);
  call.free({value, key, query, softmax, output, gradient});
}

// Needs a buffer for the output only in half precision with more columns than a block.
void efficientAttention(KernelCall& call) {
  call.allocateResults({2, 3});
  call.allocateResults();
  constexpr std::int64_t kColumnsOfBlock = 128;
  const Tensor& value = call.tensor(2);
  if (value.scalar_type() != at::kFloat && value.size(3) > kColumnsOfBlock) {
    const AttentionSizes sizes{call.tensor(0), call.tensor(1)};
    call.allocateAndFree(sizes.rows() * value.size(3) * kFloat);
  }
}

// The block sizes of the `AttentionBackwardKernel` for sm80 with this many features.
struct EfficientBackwardBlocks {
  std::int64_t queries;
  std::int64_t keys = 64;
  std::int64_t columns;      // of the gradient of the queries
  bool accumulates_outside;  // of registers

  EfficientBackwardBlocks(c10::ScalarType dtype, std::int64_t features)
      : queries{features <= 64 ? 64 : 128},
        columns{dtype == at::kFloat || features <= 64 || features > 128 ? 64 : 128},
        accumulates_outside{dtype != at::kFloat && features > 128} {}
};

// `workspace_size()` in kernel_backward.h.
std::int64_t efficientWorkspace(const AttentionSizes& sizes, std::int64_t value_features, c10::ScalarType dtype) {
  const std::int64_t features = std::max(sizes.features, value_features);
  const EfficientBackwardBlocks blocks{dtype, features};
  constexpr std::int64_t kLocks = 16;  // bytes of counters for each block
  std::int64_t bytes = blocksOf(sizes.queries, blocks.queries) * blocksOf(sizes.features, blocks.columns) *
                       ((blocks.queries * blocks.columns * kFloat) + kLocks);
  if (blocks.accumulates_outside) {
    const std::int64_t keys = roundedUp(sizes.keys, blocks.keys);
    bytes += keys * kFloat * (roundedUp(sizes.features, blocks.queries) + roundedUp(value_features, blocks.queries));
  }
  return sizes.batch * sizes.heads * bytes;
}

// If query heads share keys and values, each head gets its own gradient. `_efficient_attention_backward()` sums them.
struct GradientsOfEachHead {
  BlockNumber key = -1;
  BlockNumber value = -1;

  GradientsOfEachHead(KernelCall& call, const AttentionSizes& sizes, const Tensor& of_key, const Tensor& of_value) {
    if (sizes.heads != sizes.key_heads) {
      const std::int64_t heads_for_each = sizes.heads / sizes.key_heads;
      key = call.allocate(KernelCall::bytesOf(of_key) * heads_for_each);
      value = call.allocate(KernelCall::bytesOf(of_value) * heads_for_each);
    }
  }
};

void efficientAttentionBackward(KernelCall& call) {
  const BlockNumber gradient = copyForKernel(call, call.tensor(0));
  const Tensor& query = call.tensor(1);
  const Tensor& output = call.tensor(5);
  const AttentionSizes sizes{query, call.tensor(2)};
  call.allocateResults({0, 1, 2});
  const GradientsOfEachHead expanded{call, sizes, call.tensor(2), call.tensor(3)};
  call.allocateResults();  // the gradient of a mask
  const std::int64_t delta = sizes.rows() * kFloat;
  const std::int64_t workspace = efficientWorkspace(sizes, call.tensor(3).size(3), query.scalar_type());
  if (query.scalar_type() != at::kFloat) {  // the kernel computes delta itself
    const BlockNumber of_kernel = call.allocate(delta);
    const BlockNumber buffer = call.allocate(workspace);
    call.free({of_kernel, buffer, expanded.value, expanded.key, gradient});
    return;
  }
  const BlockNumber product = call.copy(output);
  BlockNumber sum = call.allocate(delta);
  if (sizes.heads > 1 && sizes.queries > 1) {  // [batch, position, head] becomes [batch, head, position]
    const BlockNumber transposed = call.allocate(delta);
    call.free(sum);
    sum = transposed;
  }
  call.free(product);
  const BlockNumber buffer = call.allocate(workspace);
  call.free({sum, buffer, expanded.value, expanded.key, gradient});
}

const KernelRules kAttentionRules{
    {flashAttention, {"aten::_scaled_dot_product_flash_attention"}},
    {flashAttentionBackward, {"aten::_scaled_dot_product_flash_attention_backward"}},
    {efficientAttention, {"aten::_scaled_dot_product_efficient_attention"}},
    {efficientAttentionBackward, {"aten::_scaled_dot_product_efficient_attention_backward"}},
};

}  // namespace

}  // namespace torchext
