"""Runs random programs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from common import too_large_to_copy
from fuzz import gradients, memory, states, vocabulary
from fuzz.states import restored_settings
from torch import Tensor

__all__ = ["ACTIONS", "AWAITED", "DEVICE", "FACTORIES", "Machine", "Step", "change", "on_device"]

# The device of the programs' tensors: `--fuzz-device`, also in the process that runs them.
DEVICE = torch.device(os.environ.get("TORCHEXT_FUZZ_DEVICE", "cpu"))

# Indices out of bounds and probabilities above 1 are fatal errors for a process that uses CUDA.
ENDS_PROCESSES = ("embedding", "cross_entropy", "index_select", "gather", "scatter_source")
# Actions that do not pass yet, with reasons. Random programs omit them.
AWAITED: dict[str, str] = {}
if DEVICE.type == "cuda":
    AWAITED |= dict.fromkeys(ENDS_PROCESSES, "device-side assertions")
    AWAITED["matmul_precision"] = "compared at replay: docs/reference/deferred_init.md"

FACTORIES = {**vocabulary.FACTORIES, **states.FACTORIES}
ACTIONS = {**vocabulary.ACTIONS, **memory.ACTIONS, **gradients.ACTIONS, **states.ACTIONS}

# Results with more elements are dropped: programs that keep doubling a tensor would not end.
LARGEST = 2**18
LARGEST_PRODUCT = 2**24


class Step(NamedTuple):
    """One statement of a program: the name of an action, and numbers that select its operands."""

    action: str
    a: int
    b: int
    n: int


class Machine:
    """Runs a program. The tensors made so far are its memory, and steps refer to them by position."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.generator = torch.Generator(DEVICE).manual_seed(5)
        self.sources = make_sources()
        self.has_read_large = False
        self.has_dropped_large = False

    def run(self, program: list[Step], skipped: set[int]) -> list[Tensor]:
        """Run `program`, without the steps in `skipped`, and return its memory."""
        with restored_settings(), torch.no_grad(), on_device():
            for place, step in enumerate(program):
                if place not in skipped:
                    self.step(step)
        return self.memory

    def step(self, step: Step) -> None:
        if step.action in FACTORIES:
            shape = vocabulary.SHAPES[step.a % len(vocabulary.SHAPES)]
            self.keep([FACTORIES[step.action](shape, step.b, step.n)])
        elif self.memory:
            a, b = (self.memory[place % len(self.memory)] for place in (step.a, step.b))
            if a.shape != b.shape and a.numel() * b.numel() > LARGEST_PRODUCT:
                b = a  # two large shapes may expand to a shape of many GiB
            result = ACTIONS[step.action](self, a, b, step.n)
            self.keep([result] if isinstance(result, Tensor) else result or [])

    def keep(self, tensors: list[Tensor]) -> None:
        kept = [tensor for tensor in tensors if tensor.numel() <= LARGEST]
        self.memory.extend(kept)
        self.has_dropped_large |= len(kept) < len(tensors)

    def forget(self, tensor: Tensor) -> None:
        self.memory = [t for t in self.memory if t is not tensor]


def on_device() -> AbstractContextManager[object]:
    """Let factories make tensors on the device of programs."""
    return nullcontext() if DEVICE.type == "cpu" else DEVICE


def make_sources() -> list[Tensor]:
    """Return real tensors for programs to read: small ones, some on foreign memory, and one too large to copy."""
    with on_device():
        with torch.inference_mode():
            inference = torch.linspace(-1, 1, 3)
        return [
            torch.linspace(-2, 2, 3),
            torch.arange(20).view(4, 5),
            torch.from_numpy(np.linspace(0, 1, 4, dtype=np.float32)).view(4, 1),
            inference,
            too_large_to_copy(),
        ]


def change(source: Tensor, n: int) -> None:
    """Change all elements, without bumping the version."""
    if n % 3 == 0 and not source.is_cuda:
        source.numpy()[...] += 1
    elif n % 3 == 1:
        storage: Any = source.detach().untyped_storage()
        storage.fill_(3)
    elif source.is_inference():
        with torch.inference_mode():
            source.add_(1)
    else:
        source.data.add_(1)
