"""The states of random generators, which are real in a dry run until a program moves them to a GPU.

DTensor advances the generators of devices so that ranks draw the numbers of a single process. It computes with the
values of a state, and moves them to the device and back, which makes them fake. So its functions that compute run
without fake mode, and the state stays on the CPU.

Other programs send the state of rank 0 to all ranks over the GPUs, and set it. The received state is fake, so the
generator keeps its state, and the call is counted as a read of a value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.calls import running_in
from ..internals.dispatch_keys import without_our_keys
from ..internals.patching import Concerns
from .current import while_world_is_open
from .messages import without_answers

__all__ = ["patch_distributed_tensors"]


def patch_distributed_tensors(random: Any) -> None:
    """Declare the patches of `torch.distributed.tensor._random`."""
    patch = while_world_is_open.patch
    tracker = random.OffsetBasedRNGTracker
    patch(tracker, "__init__", _agreeing_alone, "compares the states of generators of other ranks")
    patch(tracker, "_get_device_state", _staying_on_the_cpu, "moves the state of a generator to its device")
    for name in ("_set_pre_op_offset", "_set_post_op_offset", "_compute_rng_offsets"):
        if name in vars(tracker):
            patch(tracker, name, running_in(without_our_keys), "computes with the state of a generator")


def _agreeing_alone(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        original(self, device_mesh, False)
        if run_state_sync:
            with without_answers():
                dist.broadcast(torch.empty(16, dtype=torch.uint8, device=self._device), 0)

    return __init__


def _staying_on_the_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def _get_device_state(self: Any) -> torch.Tensor:
        state: torch.Tensor = self._device_handle.get_rng_state()
        return state

    return _get_device_state


STATE_KEPT = "not set"


def _keeping_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ignore fake states. `torch.cuda.set_rng_state_all()` receives several states, in any iterable."""

    def set_state(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
        given = [*args, *kwargs.values()]
        states = [state for value in given for state in (value if isinstance(value, list | tuple) else [value])]
        if not any(isinstance(state, torch.Tensor) and _C.is_fake(state) for state in states):
            return original(*args, **kwargs)
        note_reading("Generator.set_state", STATE_KEPT, sys._getframe(1))
        return given[0] if isinstance(given[0], torch.Generator) else None  # as `torch.Generator.set_state()` does

    return set_state


def _install() -> None:
    reason = "reads the state of a generator, which a program may have moved to a GPU"
    patch = while_values_are_assumed.patch
    patch(torch.Generator, "set_state", _keeping_state, reason, concerns=Concerns.FAKES)
    for name in ("set_rng_state", "set_rng_state_all"):
        patch(torch.cuda.random, name, _keeping_state, reason)


while_values_are_assumed.declare(_install)
