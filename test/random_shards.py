"""Random programs that make tensors, write parts of them in all ways, and return parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

__all__ = ["random_program"]

SHAPES = [(64, 48), (16, 6, 24), (4096,), (8, 32, 4, 4), (100, 37), (37, 100), (1000,), (3, 500), (128, 16)]
DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
# Dtypes of views of memory. Regions of it may be as narrow as one byte.
VIEWED_DTYPES = [torch.uint8, torch.int8, torch.bool, torch.int16, torch.int32, torch.int64]
VIEWED_DTYPES += [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]

Refused = (RuntimeError, NotImplementedError, IndexError, ValueError)

WRITES: list[Callable[[Tensor], object]] = [
    lambda t: t.normal_(0.1, 2),
    lambda t: t.uniform_(-1, 3),
    # For few elements eager construction may reject none, which bumps the version once less.
    lambda t: nn.init.trunc_normal_(t, 0, 1.5) if t.numel() > 100 else t.normal_(),
    lambda t: t.bernoulli_(0.4),
    lambda t: t.exponential_(),
    lambda t: t.zero_(),
    lambda t: t.fill_(3.25),
    lambda t: t.mul_(0.37),
    lambda t: t.add_(1.5),
    lambda t: t.div_(3),
    lambda t: t.neg_(),
    lambda t: t.clamp_(-0.5, 0.7),
    lambda t: t.masked_fill_(t > 0, 0.25),
    lambda t: t.add_(t),
    lambda t: t.sub_(torch.rand(t.shape)),
    lambda t: t.mul_(torch.full(t.shape[-1:], 1.25)),
    lambda t: t.copy_(torch.randn(t.shape)),
    lambda t: t.copy_(torch.arange(t.numel()).view(t.shape)),
    # Its bits depend on the position of elements.
    lambda t: t.erfinv_(),
    lambda t: t.exp_(),
    lambda t: t.log_(),
    lambda t: t.cumsum_(0),
    # NaNs.
    lambda t: t.mul_(float("inf")).mul_(0),
    # Integers and Booleans.
    lambda t: t.random_(0, 100),
    lambda t: t.random_(),
    lambda t: t.bitwise_not_(),
    lambda t: t.bitwise_and_(3),
    lambda t: t.logical_not_(),
    lambda t: t.copy_(torch.randn(t.shape) > 0),
]

RESULTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t * 0.02,
    lambda t: t.clone(),
    lambda t: t.contiguous(),
    lambda t: t.to(torch.bfloat16),
    lambda t: t.to(torch.float64),
    lambda t: t + torch.randn(t.shape, dtype=t.dtype),
    lambda t: torch.cat([t, t * 2, t]),
    lambda t: torch.stack([t, t + 1], -1),
    lambda t: nn.functional.pad(t, (1, 2)),
    lambda t: nn.functional.pad(t, (-1, 0)),
    lambda t: t.flip(0),
    lambda t: t.tril(),
    lambda t: t.repeat(2, *[1] * (t.dim() - 1)),
    lambda t: torch.where(t > 0, t, -t),
    lambda t: torch.zeros_like(t).copy_(t),
    lambda t: t.softmax(0),
    lambda t: t > 0,
    lambda t: (t * 50).to(torch.uint8),
    lambda t: torch.view_as_real(t),
]

CUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.clone(),
    lambda t: t.contiguous(),
    lambda t: t.new_zeros(t.shape).copy_(t),
    lambda t: t.to(torch.bfloat16),
    lambda t: t.reshape(-1) * 2,
    lambda t: t.sum(),
]


class _Program:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def run(self) -> list[Tensor]:
        shape, dtype = self.random.choice(SHAPES), self.random.choice(DTYPES)
        tensors = [torch.empty(shape, dtype=dtype).normal_()]
        for _ in range(self.random.randint(0, 6)):
            self.change(tensors)
        results = [
            self.random.choice(CUTS)(self.view(self.random.choice(tensors))) for _ in range(self.random.randint(1, 3))
        ]
        return results + tensors[:1] if self.random.random() < 0.1 else results

    def change(self, tensors: list[Tensor]) -> None:
        tensor, kind = self.random.choice(tensors), self.random.random()
        # Eager and deferred construction raise the same errors, so failing steps are skipped.
        with suppress(*Refused):
            if kind < 0.5:
                self.random.choice(WRITES)(self.view(tensor))
            elif kind < 0.6:
                self.view(tensor).copy_(self.view(self.random.choice(tensors)))
            elif len(tensors) < 5:
                result = self.random.choice(RESULTS)(self.view(tensor) if kind < 0.75 else tensor)
                if result.numel() < 40000:
                    tensors.append(result)

    def view(self, tensor: Tensor) -> Tensor:
        for _ in range(self.random.randint(0, 3)):
            with suppress(*Refused):
                tensor = self.step(tensor)
        return tensor

    def step(self, tensor: Tensor) -> Tensor:
        dim = self.random.randrange(max(tensor.dim(), 1))
        size = tensor.size(dim)
        kind = self.random.randrange(11)
        if kind < 3:
            begin = self.random.randint(0, size)
            return tensor.narrow(dim, begin, self.random.randint(begin, size) - begin)
        if kind == 3:
            return tensor.transpose(dim, -1)
        if kind == 4:
            sizes = self.random.choice([(2, -1), (-1, 2), (4, -1)])
            return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
        if kind == 5:
            return tensor.flatten() if tensor.is_contiguous() else tensor
        if kind == 6:
            return tensor.select(dim, self.random.randrange(size))
        if kind == 7:
            return tensor.view(self.random.choice(VIEWED_DTYPES))
        if kind == 8:
            return self.random.choice([torch.view_as_real, torch.real, torch.imag, torch.conj])(tensor)
        if kind == 9:
            begin = self.random.randrange(size)
            return tensor.narrow(dim, begin, min(self.random.randint(1, 9), size - begin))
        steps = slice(self.random.randint(0, 2), None, self.random.choice([1, 2, 3, 17, 55, 60]))
        index: tuple[slice, ...] = (slice(None),) * dim + (steps,)
        return tensor[index]


def random_program(seed: int) -> Callable[[], list[Tensor]]:
    """Return a function that returns tensors. All calls draw the same from the default generator."""
    return lambda: _Program(seed).run()
