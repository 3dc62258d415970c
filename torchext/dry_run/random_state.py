"""How DTensor moves the random generators of devices, so that ranks draw what one process would.

It computes with the numbers of a generator's state, which are real here, too, and moves them to the device and back,
which makes them fake. So its functions that compute are called as if there were no fakes, and the state stays on the
CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..tools.dispatch_keys import without_our_keys
from .current import current, while_world_is_open

__all__ = ["teach_distributed_tensors"]

_taught: set[int] = set()


def teach_distributed_tensors() -> None:
    """Declares the patches, if distributed tensors are imported."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is None or id(random) in _taught:
        return
    _taught.add(id(random))
    patch = while_world_is_open.patch
    tracker = random.OffsetBasedRNGTracker
    patch(tracker, "__init__", _agreeing_with_nobody, "compares the states of generators of other processes")
    patch(tracker, "_get_device_state", _staying_on_the_cpu, "moves the state of a generator to its device")
    for name in ("_set_pre_op_offset", "_set_post_op_offset", "_compute_rng_offsets"):
        if name in vars(tracker):
            patch(tracker, name, _really, "computes with the state of a generator")


def _agreeing_with_nobody(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        original(self, device_mesh, current() is None and run_state_sync)
        if current() is not None and run_state_sync:
            dist.broadcast(torch.empty(16, dtype=torch.uint8, device=self._device), 0)

    return __init__


def _staying_on_the_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def _get_device_state(self: Any) -> torch.Tensor:
        if current() is None:
            return original(self)
        state: torch.Tensor = self._device_handle.get_rng_state()
        return state

    return _get_device_state


def _really(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_our_keys():
            return original(*args, **kwargs)

    return run
