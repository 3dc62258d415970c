"""The world that is open: process groups belong to the process, so there is one at a time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from ..fake.gpus import FakeGPU
from ..tools.leases import Lease

__all__ = ["Job", "current", "enter", "leave", "while_world_is_open"]

MOST_PLACES = 4  # of a remark


class Job:
    """What the replaced functions of PyTorch have to know of the world that is open.

    Attributes:
        size: How many processes the job has.
        rank: The rank of the one that is there.
        per_node: How many share a machine.
        gpus: What the GPUs of its machine are like; None if it has none.
        store: Where the processes would meet.
        recorder: Is told of collectives.
        has_own_group: Whether the default process group is one that the program has not asked for.
        ignores_compilers: Whether the program has called `torch.compile()`, without effect.
        when_left: What to undo when the block is left.
    """

    def __init__(self, size: int, rank: int, per_node: int, gpus: FakeGPU | None, store: Any, recorder: Any) -> None:
        self.size = size
        self.rank = rank
        self.per_node = per_node
        self.gpus = gpus
        self.store = store
        self.recorder = recorder
        self.has_own_group = False
        self.ignores_compilers = False
        self._remarks: dict[str, dict[str, None]] = {}
        self._launches: Counter[str] = Counter()
        self.when_left = ExitStack()
        self._messages: Any = None
        self._process = os.getpid()

    @property
    def messages(self) -> Any:
        """What the ranks send to each other; None if this rank runs by itself, and in processes that it has forked."""
        return self._messages if self._process == os.getpid() else None

    @messages.setter
    def messages(self, messages: Any) -> None:
        self._messages = messages

    def remark(self, text: str, place: str) -> None:
        """Adds a remark to the report, once for all places of the program."""
        self._remarks.setdefault(text, {})[place] = None

    def count_launch(self, kernel: str) -> None:
        """Counts a launch of a kernel that Triton would have compiled."""
        self._launches[kernel] += 1

    @property
    def remarks(self) -> list[str]:
        """What was done otherwise than the program says, and where, for the reader of the report."""
        remarks = [f"{text} ({_listed(places)})." for text, places in self._remarks.items()]
        if self._launches:
            counts = ", ".join(f"{count} x {kernel}" for kernel, count in self._launches.most_common())
            remarks.append(f"Kernels of Triton were launched and not run, so what they write has no values: {counts}.")
        return remarks

    @property
    def local_rank(self) -> int:
        """The rank among the processes of its machine."""
        return self.rank % self.per_node

    @property
    def on_node(self) -> int:
        """How many processes its machine has: the last may have fewer."""
        return min(self.per_node, self.size - self.rank // self.per_node * self.per_node)


def _listed(places: Iterable[str]) -> str:
    """The first of the places, which may be as many as a library has functions."""
    known = [place for place in places if place]
    more = [f"and {len(known) - MOST_PLACES} more"] if len(known) > MOST_PLACES else []
    return ", ".join([*known[:MOST_PLACES], *more])


while_world_is_open = Lease("a block of torchext.dry_run.world() is open")

_open: list[Job] = []


def current() -> Job | None:
    """Returns the world that is open, if there is one."""
    return _open[0] if _open else None


def enter(world: Job) -> None:
    """Opens `world`.

    Raises:
        RuntimeError: Another one is open.
    """
    if _open:
        raise RuntimeError(
            f"A dry run of rank {_open[0].rank} of {_open[0].size} is going on, and process groups belong to the "
            "process. Leave its block first, or use another process."
        )
    _open.append(world)


def leave(world: Job) -> None:
    """Closes `world`."""
    _open.remove(world)
