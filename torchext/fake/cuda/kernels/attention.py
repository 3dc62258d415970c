"""Scaled dot product attention: transformers/cuda in ATen/native.

The flash attention kernels are those for sm80 and later, the memory-efficient attention kernels the largest for sm80 in
kernel_forward.h and kernel_backward.h.
"""

from __future__ import annotations

import math
import struct

import torch

from .calls import Gpu, KernelCall, rule
from .geometry import Geometry, divide_up

__all__: list[str] = []

FLOAT = 4  # bytes


def _rounded_up(size: int, block: int) -> int:
    return divide_up(size, block) * block


class _Sizes:
    """The sizes of an attention whose tensors are [batch, head, position, feature]."""

    def __init__(self, query: Geometry, key: Geometry) -> None:
        self.batch, self.heads, self.queries, self.features = query.sizes
        self.key_heads, self.keys = key.sizes[1], key.sizes[2]
        self.rows = self.batch * self.heads * self.queries
        # Flash attention rounds the number of features.
        self.rounded_features = _rounded_up(self.features, 32 if self.features <= 128 else 64)


def _as_float(number: float) -> float:
    """Round to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _count_splits(sizes: _Sizes, gpu: Gpu) -> int:
    """Follow `num_splits_heuristic()` in flash_api.cpp: the number of parts of the keys that keeps the device busy."""
    keys_of_block = 256 if sizes.features <= 64 else 128 if sizes.features <= 128 else 64
    num_blocks = sizes.batch * sizes.heads * divide_up(sizes.queries, 64)
    key_blocks = divide_up(sizes.keys, keys_of_block)
    processors = gpu.multiprocessors * 2
    if num_blocks >= _as_float(_as_float(0.8) * processors):
        return 1

    def efficiency(splits: int) -> float:
        waves = _as_float(num_blocks * splits / processors)
        return _as_float(waves / max(math.ceil(waves), 1))

    eligible = [
        splits
        for splits in range(1, min(128, processors, key_blocks) + 1)
        if splits == 1 or divide_up(key_blocks, splits) != divide_up(key_blocks, splits - 1)
    ]
    best = max(map(efficiency, eligible), default=0.0)
    enough = _as_float(_as_float(0.85) * best)
    return next((splits for splits in eligible if efficiency(splits) >= enough), 1)


@rule("_scaled_dot_product_flash_attention")
def _flash_attention(call: KernelCall) -> None:
    # The results are the output, the log-sum-exp, lengths that are not allocated, and the state of the generator.
    seed, offset = 6, 7
    sizes = _Sizes(call.tensor(0), call.tensor(1))
    call.allocate_results(0, 1)
    if call.arguments[3] > 0:
        call.allocate(2 * 8)  # the state
        call.allocate_results(offset, seed)
        return
    if sizes.queries == 1 and sizes.heads > sizes.key_heads:
        # The queries of a group of heads are processed as queries of one head.
        sizes.queries, sizes.heads = sizes.heads // sizes.key_heads, sizes.key_heads
    splits = _count_splits(sizes, call.gpu)
    parts = 0 if splits == 1 else splits * sizes.rows * FLOAT
    sums = call.allocate(parts)
    outputs = call.allocate(parts * sizes.rounded_features)
    call.allocate_results(seed, offset)
    call.free(sums, outputs)


def _copy_for_kernel(call: KernelCall, tensor: Geometry) -> None:
    """Copy a tensor unless it is contiguous as [batch, position, head, feature]."""
    call.copy_unless(tensor.transpose(1, 2).is_contiguous(), tensor)


@rule("_scaled_dot_product_flash_attention_backward")
def _flash_attention_backward(call: KernelCall) -> None:
    sizes = _Sizes(call.tensor(1), call.tensor(2))
    _copy_for_kernel(call, call.tensor(0))
    _copy_for_kernel(call, call.tensor(4))
    call.allocate_results()
    rows = sizes.batch * sizes.heads * _rounded_up(sizes.queries, 128)
    call.allocate(rows * FLOAT)  # of the softmax
    call.allocate(rows * sizes.rounded_features * FLOAT)  # the gradient of the queries
    if sizes.heads != sizes.key_heads:  # the gradients of keys and values, expanded to all heads
        for _ in range(2):
            call.allocate(sizes.batch * sizes.keys * sizes.heads * sizes.features * call.tensor(2).element)


@rule("_scaled_dot_product_efficient_attention")
def _efficient_attention(call: KernelCall) -> None:
    call.allocate_results(2, 3)
    call.allocate_results()
    value = call.tensor(2)
    if value.dtype is not torch.float32 and value.sizes[3] > 128:  # the columns of a block
        call.allocate(_Sizes(call.tensor(0), call.tensor(1)).rows * value.sizes[3] * FLOAT)  # the output


def _efficient_workspace(sizes: _Sizes, value_features: int, dtype: torch.dtype) -> int:
    """Follow `workspace_size()` in kernel_backward.h, with the blocks of the `AttentionBackwardKernel` for sm80."""
    features = max(sizes.features, value_features)
    is_float = dtype is torch.float32
    query_block, key_block = 64 if features <= 64 else 128, 64
    column_block = 64 if is_float or features <= 64 or features > 128 else 128  # of the gradient of the queries
    counters = 16  # bytes for each block
    blocks = divide_up(sizes.queries, query_block) * divide_up(sizes.features, column_block)
    nbytes = blocks * (query_block * column_block * FLOAT + counters)
    if not is_float and features > 128:  # accumulates outside of registers
        rounded = _rounded_up(sizes.features, query_block) + _rounded_up(value_features, query_block)
        nbytes += _rounded_up(sizes.keys, key_block) * FLOAT * rounded
    return sizes.batch * sizes.heads * nbytes


@rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(call: KernelCall) -> None:
    query, key, value, output = call.tensor(1), call.tensor(2), call.tensor(3), call.tensor(5)
    sizes = _Sizes(query, key)
    _copy_for_kernel(call, call.tensor(0))
    call.allocate_results(0, 1, 2)
    if sizes.heads != sizes.key_heads:  # `_efficient_attention_backward()` sums the gradients of each head
        for tensor in (key, value):
            call.allocate(tensor.nbytes * (sizes.heads // sizes.key_heads))
    call.allocate_results()  # the gradient of a mask
    if query.dtype is torch.float32:
        product = call.copy(output)
        delta = call.allocate(sizes.rows * FLOAT)
        if sizes.heads > 1 and sizes.queries > 1:  # [batch, position, head] becomes [batch, head, position]
            transposed = call.allocate(sizes.rows * FLOAT)
            call.free(delta)
            delta = transposed
        call.free(product)
    else:  # the kernel computes delta itself
        delta = call.allocate(sizes.rows * FLOAT)
    buffer = call.allocate(_efficient_workspace(sizes, value.sizes[3], query.dtype))
    call.free(delta, buffer)
