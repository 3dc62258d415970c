"""The states of random generators, which are real in a dry run until a program moves them to a GPU.

DTensor advances the generators of devices so that ranks draw the numbers of a single process. It computes with the
values of a state, and moves them to the device and back, which makes them fake. So its functions that compute run
without fake mode, and the state stays on the CPU.

Other programs send the state of rank 0 to all ranks over the GPUs, and set it. The received state is fake, so the
generator keeps its state, and the call is counted as a read of a value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.dispatch_keys import call_on_real_tensors
from ..internals.patching import Concerns, Function
from .current import while_world_is_open
from .messages import without_answers

__all__: list[str] = []


# ---- Distributed tensors


replaces = partial(while_world_is_open.replaces, "torch.distributed.tensor._random:OffsetBasedRNGTracker")


@replaces("__init__", reason="compares the states of generators of other ranks")
def _init(original: Function, self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    original(self, device_mesh, False)
    if run_state_sync:
        with without_answers():
            dist.broadcast(torch.empty(16, dtype=torch.uint8, device=self._device), 0)


@replaces("_get_device_state", reason="moves the state of a generator to its device")
def _get_device_state(original: Function, self: Any) -> Any:
    return self._device_handle.get_rng_state()


COMPUTES = "computes with the state of a generator"

replaces("_set_pre_op_offset", "_set_post_op_offset", reason=COMPUTES)(call_on_real_tensors)
replaces("_compute_rng_offsets", needs="_compute_rng_offsets", reason=COMPUTES)(call_on_real_tensors)  # since 2.12


# ---- Generators


STATE_KEPT = "not set"
READS = "reads the state of a generator, which a program may have moved to a GPU"


@while_values_are_assumed.replaces(torch.cuda.random, "set_rng_state", "set_rng_state_all", reason=READS)
@while_values_are_assumed.replaces(torch.Generator, "set_state", reason=READS, concerns=Concerns.FAKES)
def _set_state(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Ignore fake states. `torch.cuda.set_rng_state_all()` receives several states, in any iterable."""
    args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
    given = [*args, *kwargs.values()]
    states = [state for value in given for state in (value if isinstance(value, list | tuple) else [value])]
    if not any(isinstance(state, torch.Tensor) and _C.is_fake(state) for state in states):
        return original(*args, **kwargs)
    note_reading("Generator.set_state", STATE_KEPT, sys._getframe(1))
    return given[0] if isinstance(given[0], torch.Generator) else None  # as `torch.Generator.set_state()` does
