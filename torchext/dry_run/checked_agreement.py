"""DeepSpeed's ZeRO-3 checks that all ranks run the same modules: rank 0 sends its list, and the others compare theirs.

The others receive into a list of -1. Without these patches, a dry run would use -1 as the value that rank 0 sends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..internals.imports import patching
from .current import while_world_is_open
from .messages import without_answers

__all__ = ["agreeing_with_rank_0"]

MODULE = "deepspeed.runtime.zero.utils"
LENGTH, LIST = "assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"


def agreeing_with_rank_0() -> AbstractContextManager[None]:
    """Make each rank send and compare its own list, also if DeepSpeed is imported in the block."""
    return patching(MODULE, (LENGTH, LIST), _patch)


def _patch(module: ModuleType) -> None:
    reason = "compares the list of rank 0 with -1"
    while_world_is_open.patch(module, LENGTH, _with_own_length, reason)
    while_world_is_open.patch(module, LIST, _with_own_list, reason)


def _with_own_length(original: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
    def assert_lst_len_same_as_other_ranks(lst: list[int]) -> None:
        _broadcast(len(lst))

    return assert_lst_len_same_as_other_ranks


def _with_own_list(original: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    def get_lst_from_rank0(lst: list[int]) -> list[int]:
        _broadcast(lst)
        return list(lst)

    return get_lst_from_rank0


def _broadcast(numbers: int | list[int]) -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    with without_answers():
        dist.broadcast(torch.tensor(numbers, dtype=torch.int64, device=device), src=0)
