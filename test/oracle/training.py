"""The training loop of all programs of compare.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Optimize", "Step", "adamw", "compiling", "sgd", "tokens", "trainer"]

_compile_options: dict[str, Any] | None = None


@contextmanager
def compiling(**options: Any) -> Iterator[None]:
    """Compile the models of trainers that are made in the block, with these options of `torch.compile()`."""
    global _compile_options
    _compile_options = options
    try:
        yield
    finally:
        _compile_options = None


Step = Callable[[], object]
Optimize = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def trainer(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], optimize: Optimize, **options: Any) -> Step:
    """Return a function that trains `model` for a step.

    Args:
        model: On the device.
        loss_of: Computes the loss.
        optimize: Makes the optimizer.
        options: `autocast`, a dtype; `clip`, a norm; `microbatches`, whose gradients are accumulated; `scaler`, to
            scale the loss.
    """
    optimizer = optimize(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if options.get("scaler") else None
    dtype, count = options.get("autocast"), options.get("microbatches", 1)
    parameters = list(model.parameters())
    if _compile_options is not None:
        model = torch.compile(model, **_compile_options)

    def step() -> None:
        for _ in range(count):
            with nullcontext() if dtype is None else torch.autocast("cuda", dtype):
                loss = loss_of(model) / count if count > 1 else loss_of(model)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(parameters, options["clip"])
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def adamw(**options: Any) -> Optimize:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def sgd(**options: Any) -> Optimize:
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-2, **options)


def tokens(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int64, device="cuda")
