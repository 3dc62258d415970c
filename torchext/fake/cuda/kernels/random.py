"""Permutations and samples: Randperm.cu, Distributions.cpp, MultinomialKernel.cu."""

from __future__ import annotations

import math

import torch

from .buffers import accumulator_bytes, radix_sort_bytes, reduce_on_gpu, scan_bytes
from .calls import KernelCall, rule
from .geometry import contiguous

__all__: list[str] = []


@rule("randperm.out", "randperm.generator_out")
def _randperm(call: KernelCall) -> None:
    # `randperm_out_cuda()`: sorts numbers by random keys with enough bits that two are rarely equal.
    n: int = call.arguments[0]
    element = call.result().element
    call.allocate_and_free(element)  # `check_supported_max_int_with_precision()`
    if n == 0:
        return
    log_threshold = math.log(0.9) * 12  # Note [Algorithm of randperm]
    bits = min(64, math.ceil(math.log2(n - (6.0 * n * n + 1) / log_threshold)))
    key = 4 if bits <= 32 else 8
    call.allocate(n * element)
    for _ in range(2):  # the keys, and the sorted ones
        call.allocate(n * key)
    call.allocate(radix_sort_bytes(n, key, element, bits))


def _sample_largest(call: KernelCall) -> None:
    """Follow `multinomial_out()` without replacement.

    It checks the probabilities and divides them by random numbers. The largest quotients are the samples.
    """
    source, samples = call.tensor(0), call.arguments[1]
    element = source.element
    distributions = 1 if source.dim == 1 else source.sizes[0]
    smallest, largest = call.allocate(element), call.allocate(element)
    with call:
        reduce_on_gpu(call, source, [contiguous([], source.dtype)], accumulator=2 * element)
        is_finite, is_positive, _ = (call.allocate(1) for _ in range(3))  # and whether all are valid
        call.free(is_positive, is_finite)
        sums = call.allocate(distributions * element)
        result = contiguous(source.sizes[:-1], source.dtype)
        reduce_on_gpu(call, source, [result], [source.dim - 1], accumulator=accumulator_bytes(source.dtype))
        are_zero = call.allocate(distributions)
        if source.dim > 1:
            call.allocate(1)  # whether any is zero
            call.free(are_zero)
        call.free(sums)
        call.allocate_and_free(1)
        call.copy(source)  # the quotients
        call.allocate(distributions * samples * element if samples > 1 else 0)
    call.free(smallest, largest)


@rule("multinomial")
def _multinomial(call: KernelCall) -> None:
    call.allocate_results()
    source, (samples, replaces) = call.tensor(0), call.arguments[1:3]
    if source.numel == 0:
        return
    if not replaces or samples == 1:
        _sample_largest(call)
        return
    for _ in range(2):  # normalized probabilities, and their sums
        call.copy(source)
    if source.numel == source.sizes[-1]:
        call.allocate(scan_bytes(source.numel, source.element))


@rule("normal.Tensor_float")
def _normal_around_means(call: KernelCall) -> None:
    # `normal_out_impl()`: draws, scales, and adds the means.
    call.allocate_results()
    call.copy(call.result())


@rule("bernoulli_.Tensor")
def _bernoulli_of_probabilities(call: KernelCall) -> None:
    # `bernoulli_tensor_cuda_kernel()` reads probabilities as float, or as double for a double result.
    result, probabilities = call.tensor(0), call.tensor(1)
    dtype = torch.float64 if result.dtype is torch.float64 else torch.float32
    if probabilities.dtype is not dtype:
        call.allocate(probabilities.numel * dtype.itemsize)
