"""DeepSpeed's ZeRO-3 checks that all ranks run the same modules: rank 0 sends its list, and the others compare theirs.

The others receive into a list of -1. Without these patches, a dry run would use -1 as the value that rank 0 sends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ...internals.patching import Function
from ..current import while_world_is_open
from ..messages import without_answers

__all__: list[str] = []

replaces: Callable[..., Callable[[Function], Function]] = partial(
    while_world_is_open.replaces, "deepspeed.runtime.zero.utils", reason="compares the list of rank 0 with -1"
)
LENGTH, LIST = "assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"


@replaces(LENGTH, needs=LIST)
def _assert_own_length(original: Function, lst: list[int]) -> None:
    _broadcast(len(lst))


@replaces(LIST, needs=LENGTH)
def _get_own_list(original: Function, lst: list[int]) -> list[int]:
    _broadcast(lst)
    return list(lst)


def _broadcast(numbers: int | list[int]) -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    with without_answers():
        dist.broadcast(torch.tensor(numbers, dtype=torch.int64, device=device), src=0)
