"""Data loaders in a dry run: they read real data, in this process.

Samplers shuffle real numbers and datasets open real files, so a loader computes with real tensors; a batch becomes
fake when it is moved to a fake device. A dataset that holds fakes, for example from `torch.randn()` in the program, is
read unchanged, and only the sampler computes with real tensors. Nothing is pinned, because the devices are fake.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import dataloader, dataset
from torch.utils.data._utils import worker

from .. import _C
from ..internals.dispatch_keys import call_on_real_tensors, without_our_keys
from ..internals.patching import Function
from .current import while_world_is_open

__all__: list[str] = []

# The depth to which wrapped datasets and containers are searched for tensors.
DEEPEST = 6

ITERATOR: Any = dataloader._BaseDataLoaderIter


@while_world_is_open.replaces(ITERATOR, "__init__", reason="reads a seed, and starts to pin memory")
def _init(original: Function, /, self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    with without_our_keys():
        original(self, loader, *args, **kwargs)
    self._pin_memory = False


@while_world_is_open.replaces(ITERATOR, "__next__", reason="computes with the values of indices and data")
def _next(original: Function, self: Any) -> Any:
    with _state_for(self._dataset):
        return original(self)


@while_world_is_open.replaces(
    dataloader.DataLoader, "_get_iterator", reason="starts workers, which inherit the fake mode"
)
def _get_iterator(original: Function, self: Any) -> Any:
    """Start workers without fake mode. A dataset of fakes cannot be sent to them, so it is read in this process."""
    if self.num_workers and holds_fakes(self.dataset):
        workers, self.num_workers = self.num_workers, 0
        prefetch, self.prefetch_factor = self.prefetch_factor, None
        try:
            return original(self)
        finally:
            self.num_workers, self.prefetch_factor = workers, prefetch
    with without_our_keys():
        return original(self)


for _owner, _name, _reason in (
    (ITERATOR, "_next_index", "computes with the values of indices"),
    (worker, "_worker_loop", "computes with data in another process"),
    (dataset, "random_split", "reads a permutation"),
):
    while_world_is_open.replaces(_owner, _name, reason=_reason)(call_on_real_tensors)


def _state_for(data: object) -> AbstractContextManager[None]:
    return nullcontext() if holds_fakes(data) else without_our_keys()


def holds_fakes(value: object, depth: int = DEEPEST) -> bool:
    """Return true if a dataset, or one that it wraps, has a fake tensor in its attributes."""
    if isinstance(value, torch.Tensor):
        return _C.is_fake(value)
    if depth == 0:
        return False
    if isinstance(value, list | tuple):
        return any(holds_fakes(item, depth - 1) for item in value[:16])
    if isinstance(value, dict):
        return any(holds_fakes(item, depth - 1) for item in list(value.values())[:16])
    if isinstance(value, torch.utils.data.Dataset):
        return any(holds_fakes(item, depth - 1) for item in vars(value).values())
    return False
