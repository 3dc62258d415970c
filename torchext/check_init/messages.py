"""The messages between ranks that run one after the other, with real tensors.

A rank that broadcasts or scatters writes the values to a file, so ranks that run later receive them, as in the job.
Other collectives depend on values that do not exist: NOTE [Assumed values], dry_run/messages.py. A second run of the
rank changes their results: tensors that differ between the two runs depend on other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dry_run.messages import Channels, agreed_values
from ..dry_run.protocol import TO_ALL
from ..dry_run.recorder import RECEIVED
from ..internals.dispatch_keys import without_our_keys
from ..internals.held_tensors import tensors_in
from ..internals.source_lines import place_of, users_frame

__all__ = ["FileMessages", "Job"]

SENT = {"broadcast_": "tensors", "scatter_": "input_tensors"}
"""The arguments that the root of a collective sends to the other ranks."""


@dataclass
class Job:
    """A rank to run, and the results of its collectives.

    Attributes:
        sizes: The names and sizes of the dimensions of the mesh.
        rank: The rank.
        folder: The directory for the values that ranks send.
        sends: Whether deferred tensors are sent instead of recomputed, because ranks have recorded different values.
        is_perturbed: Whether to change the results of collectives that need values of other ranks.
        is_reference: Whether it is the one process that ranks are compared with.
        unknown: The collectives that need values of other ranks, with their lines.
    """

    sizes: Mapping[str, int]
    rank: int
    folder: Path
    sends: bool = False
    is_perturbed: bool = False
    is_reference: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """The name of this rank in errors."""
        return "the one process that ranks are compared with" if self.is_reference else f"rank {self.rank}"

    @property
    def disagreement(self) -> Path:
        """A file that exists once ranks have recorded different values, so that the job would send those of one."""
        return self.folder / "disagreement"


class FileMessages(Channels):
    """The messages of a rank, in place of `dry_run.messages.Messages`."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def agrees_on(self, group: Any, digest: str) -> bool:
        """Return True unless the job sends deferred tensors. Compare the digest with that of the first rank."""
        if self._job.sends:
            return False
        file = self._next_file(group, "digest", 0)
        if not file.exists():
            file.write_text(digest)
        elif file.read_text() != digest:
            self._job.disagreement.touch()
        return True

    def observe(self, operator: str, arguments: dict[str, Any], group: Any) -> Callable[[], None] | None:
        """Send the values of a collective before it runs. Return a function that writes its results, or None."""
        outputs = [one for name in (*RECEIVED, "tensors") for one in tensors_in(arguments.get(name))]
        if not outputs or operator == "send":
            return None
        sent = self._send(operator, arguments, group) if operator in SENT else None
        if sent is not None:
            return partial(_write, zip(outputs, sent[group.rank() :] if operator == "scatter_" else sent, strict=False))
        if group.size() > 1:
            self._job.unknown.append(f"{operator.strip('_')} at {place_of(users_frame()) or 'unknown'}")
        agreed = agreed_values(operator, arguments, group.size(), group.rank())
        changes = outputs if self._job.is_perturbed and group.size() > 1 else ()
        return partial(_write, chain(agreed, ((one, _perturbed(one)) for one in changes)))

    def _send(self, operator: str, arguments: dict[str, Any], group: Any) -> list[Tensor] | None:
        """Return the values of the root of a collective, or None if it did not run before this rank."""
        root, sent = arguments["root_rank"], list(tensors_in(arguments[SENT[operator]]))
        file = self._next_file(group, operator, root)
        perturbed = file.with_suffix(".perturbed")
        if group.rank() == root:
            if group.size() > 1:
                torch.save(sent, perturbed if self._job.is_perturbed else file)
            return sent
        if not file.exists():
            return None
        found: list[Tensor] = torch.load(perturbed if self._job.is_perturbed and perturbed.exists() else file)
        return found

    def _next_file(self, group: Any, kind: str, root: int) -> Path:
        channel = self._channel(group, kind, root, TO_ALL)
        return self._job.folder / hashlib.sha256(repr((channel, self._next(channel))).encode()).hexdigest()


def _write(results: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad(), without_our_keys():
        for output, value in results:
            output.copy_(value.view_as(output))


def _perturbed(values: Tensor) -> Tensor:
    """Return values that all differ from `values`, also where adding 1 gives the same number."""
    if values.dtype is torch.bool:
        return ~values
    changed = values + 1
    return changed.where(changed.isfinite() & (changed != values), values.eq(0).to(values.dtype))
