"""Calls that advance the generator of a CUDA device. `philox_facts.tsv` lists how far.

The facts come from PyTorch's host code (test/cuda_host/philox_facts.py), and test_philox.py compares fake devices with
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["CALLS", "Case", "cases", "facts_of", "offset_of"]

FACTS = Path(__file__).parent / "fake" / "philox_facts.tsv"
Make = Callable[[int, torch.dtype], Callable[[], object]]

GIB = 2**30
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
# Around one block, one wave of an L4, an A100 and an H100, four waves, and the largest 32-bit index.
SIZES = (
    *(0, 1, 3, 4, 5, 16, 17, 255, 256, 257, 1000, 65536),
    *(89087, 89088, 89089, 221184, 221185, 270336, 270337, 356353, 884737, 1081344, 1081345),
    *(2**20, 2**22 + 5, 10_000_001, 2**28),
)
LARGE = (2**28 + 1, 2**29, 2**29 + 1, 2**31 - 1, 2**31, 2**31 + 5, 3_000_000_001)


def _zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros, which every operator accepts as a probability, a deviation or a rate."""
    return torch.zeros(*size, dtype=dtype, device="cuda")


def _fill(fill: Callable[[Tensor], object]) -> Make:
    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        tensor = _zeros(n, dtype=dtype)
        return lambda: fill(tensor)

    return make


def _of_two(call: Callable[[Tensor, Tensor], object]) -> Make:
    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        first, second = _zeros(n, dtype=dtype), _zeros(n, dtype=dtype)
        return lambda: call(first, second)

    return make


def _strided(size: tuple[int, ...], stride: tuple[int, ...]) -> Make:
    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        reached = 1 + sum((one - 1) * step for one, step in zip(size, stride, strict=True))
        tensor = _zeros(reached, dtype=dtype).as_strided(size, stride)
        return tensor.normal_

    return make


def _multinomial(samples: int, replacement: bool) -> Make:
    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        weights = _zeros(n, 10, dtype=dtype).fill_(1)
        return lambda: torch.multinomial(weights, samples, replacement)

    return make


def _attention(name: str, dropout: float) -> Make:
    operator = getattr(torch.ops.aten, name)

    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        query, key = _zeros(2, 3, n, 64, dtype=dtype), _zeros(2, 3, n + 5, 64, dtype=dtype)
        if "efficient" in name:
            return lambda: operator(query, key, key, None, False, dropout, False)
        return lambda: operator(query, key, key, dropout, False)

    return make


def _attention_forward(name: str, dropout: float) -> Make:
    operator = getattr(torch.ops.aten, name)

    def make(n: int, dtype: torch.dtype) -> Callable[[], object]:
        query, key = _zeros(2, n, 3, 64, dtype=dtype), _zeros(2, n + 5, 3, 64, dtype=dtype)
        if "efficient" in name:
            return lambda: operator(query, key, key, None, None, None, None, None, dropout, 0)
        return lambda: operator(query, key, key, None, None, n, n + 5, dropout, False, False)

    return make


CALLS: dict[str, tuple[Make, tuple[torch.dtype, ...], tuple[int, ...]]] = {
    "normal_": (_fill(Tensor.normal_), (*FLOATS, *COMPLEX), SIZES + LARGE),
    "uniform_": (_fill(Tensor.uniform_), (*FLOATS, *COMPLEX), SIZES + LARGE),
    "log_normal_": (_fill(Tensor.log_normal_), FLOATS, SIZES),
    "exponential_": (_fill(Tensor.exponential_), FLOATS, SIZES + LARGE),
    "cauchy_": (_fill(Tensor.cauchy_), FLOATS, SIZES),
    "geometric_": (_fill(lambda t: t.geometric_(0.3)), (*FLOATS, torch.int64), SIZES),
    "bernoulli_": (_fill(lambda t: t.bernoulli_(0.3)), (*FLOATS, *INTEGERS), SIZES),
    "bernoulli_.Tensor": (_of_two(Tensor.bernoulli_), FLOATS, SIZES),
    "bernoulli of p": (_fill(lambda t: torch.bernoulli(t, 0.3)), FLOATS, SIZES),
    "bernoulli": (_fill(torch.bernoulli), FLOATS, SIZES),
    "random_": (_fill(Tensor.random_), (*FLOATS, *INTEGERS), SIZES + LARGE),
    "random_ to 5": (_fill(lambda t: t.random_(5)), FLOATS, SIZES),
    "random_ from 0 to 2": (_fill(lambda t: t.random_(0, 2)), INTEGERS, SIZES),
    "random_ from 0": (_fill(lambda t: t.random_(0, None)), (*FLOATS, *INTEGERS), SIZES),
    "random_ to 2^28 - 1": (_fill(lambda t: t.random_(2**28 - 1)), (torch.int64, torch.float32, torch.float64), SIZES),
    "random_ to 2^28": (_fill(lambda t: t.random_(2**28)), (torch.int64, torch.float32, torch.float64), SIZES),
    "random_ to 2^28 + 1": (_fill(lambda t: t.random_(2**28 + 1)), (torch.int64, torch.float32, torch.float64), SIZES),
    "random_ to 2^40": (_fill(lambda t: t.random_(2**40)), (torch.int64,), SIZES),
    "random_ all": (_fill(lambda t: t.random_(-(2**63), None)), (torch.int64,), SIZES),
    "randperm": (
        lambda n, dtype: lambda: torch.randperm(n, dtype=dtype, device="cuda"),
        (torch.int64,),
        (*SIZES, 2**28 + 1),
    ),
    "normal of two": (_of_two(torch.normal), FLOATS, SIZES),
    "normal of mean": (_fill(lambda t: torch.normal(t, 1.0)), FLOATS, SIZES),
    "normal of std": (_fill(lambda t: torch.normal(0.0, t.fill_(1))), FLOATS, SIZES),
    "normal broadcast": (_fill(lambda t: torch.normal(t[:, None], _zeros(1, 3))), (torch.float32,), SIZES),
    "poisson": (_fill(torch.poisson), FLOATS, SIZES),
    "gamma": (_fill(torch._standard_gamma), FLOATS[:2], SIZES),
    "native_dropout": (_fill(lambda t: torch.native_dropout(t, 0.5, True)), FLOATS, SIZES),
    "native_dropout in evaluation": (_fill(lambda t: torch.native_dropout(t, 0.5, False)), FLOATS[:1], SIZES),
    "native_dropout of all": (_fill(lambda t: torch.native_dropout(t, 1.0, None)), FLOATS[:1], SIZES),
    "native_dropout of none": (_fill(lambda t: torch.native_dropout(t, 0.0, None)), FLOATS[:1], SIZES),
    "_fused_dropout": (_fill(lambda t: torch._fused_dropout(t, 0.5)), FLOATS, SIZES),
    "dropout": (_fill(lambda t: functional.dropout(t.detach().requires_grad_(), 0.5)), FLOATS, SIZES),
    "alpha_dropout": (_fill(lambda t: functional.alpha_dropout(t, 0.5, True)), FLOATS[:1], SIZES),
    "rrelu": (_fill(lambda t: functional.rrelu(t, training=True)), FLOATS, SIZES),
    "rrelu_": (_fill(lambda t: functional.rrelu_(t, training=True)), FLOATS[:2], SIZES),
    "rrelu in evaluation": (_fill(lambda t: functional.rrelu(t, training=False)), FLOATS[:1], SIZES),
    "multinomial of 1": (_multinomial(1, False), FLOATS, SIZES[:-3]),
    "multinomial of 3": (_multinomial(3, False), FLOATS, SIZES[:-3]),
    "multinomial with replacement of 3": (_multinomial(3, True), FLOATS, SIZES[:-3]),
    "multinomial with replacement of 300": (_multinomial(300, True), FLOATS[:1], SIZES[:-4]),
    "multinomial of many": (
        lambda n, dtype: partial(torch.multinomial, _zeros(33, 2**24, dtype=dtype).fill_(1), 2),
        (torch.float32,),
        (1,),
    ),
    "normal_ transposed": (_strided((1024, 1024), (1, 1024)), FLOATS[:2], (1,)),
    "normal_ with gaps": (_strided((1024, 1024), (2048, 1)), FLOATS[:2], (1,)),
    "normal_ in steps": (_strided((3, 5, 7), (70, 14, 2)), FLOATS[:2], (1,)),
    "normal_ of a large matrix": (_strided((70000, 40000), (40000, 1)), FLOATS[:1], (1,)),
    "normal_ of a large transposed matrix": (_strided((70000, 40000), (1, 70000)), FLOATS[:1], (1,)),
    "normal_ of every second column": (_strided((70000, 20000), (40000, 2)), FLOATS[:1], (1,)),
    "normal_ of large blocks": (_strided((5, 20000, 9000), (20000 * 10000, 10000, 1)), (torch.float16,), (1,)),
    "_flash_attention_forward": (_attention_forward("_flash_attention_forward", 0.1), FLOATS[2:], (1, 17, 128)),
    "_efficient_attention_forward": (_attention_forward("_efficient_attention_forward", 0.1), FLOATS[:1], (1, 17, 128)),
    "flash attention": (_attention("_scaled_dot_product_flash_attention", 0.1), FLOATS[2:], (1, 17, 128)),
    "flash attention without dropout": (_attention("_scaled_dot_product_flash_attention", 0.0), FLOATS[2:], (1, 17)),
    "efficient attention": (_attention("_scaled_dot_product_efficient_attention", 0.1), FLOATS[:1], (1, 17, 128)),
    "efficient attention without dropout": (
        _attention("_scaled_dot_product_efficient_attention", 0.0),
        FLOATS[:1],
        (1, 17),
    ),
}


class Case(NamedTuple):
    """A call. `size` is a number of elements, or of other items."""

    call: str
    dtype: torch.dtype
    size: int

    def run(self) -> None:
        CALLS[self.call][0](self.size, self.dtype)()


def cases() -> Iterator[Case]:
    for call, (_, dtypes, sizes) in CALLS.items():
        for dtype, size in itertools.product(dtypes, sizes):
            if size * dtype.itemsize <= 12 * GIB:
                yield Case(call, dtype, size)


def offset_of(case: Case, generator: torch.Generator) -> int:
    """Return how far `case` advances `generator`, the default one of the device."""
    make = CALLS[case.call][0](case.size, case.dtype)
    generator.manual_seed(7)
    generator.set_offset(4096)
    make()
    return generator.get_offset() - 4096


def facts_of(gpu: str) -> list[tuple[Case, int]]:
    """Return how far each call advances the generator of `gpu`, by its name in the file."""
    facts = []
    for line in FACTS.read_text().splitlines():
        of, call, dtype, offsets = line.split("\t")
        for size, offset in (pair.split(":") for pair in offsets.split() if of == gpu):
            facts.append((Case(call, getattr(torch, dtype), int(size)), int(offset)))
    return facts
