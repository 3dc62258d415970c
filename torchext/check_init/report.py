"""The results of comparing initial weights. They print as a report.

The content of `torchext check-init --json`, besides the header that all commands write:

    is_same: whether all tensors are the same as in one process
    meshes: a list:
        mesh: the sizes of its dimensions, by name
        engine
        ranks: the ranks that ran
        tensors: the number of parameters and buffers
        checks: a list of the tensors that differ or are not comparable, with the attributes of `TensorCheck`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..internals.results import Items, plain

__all__ = ["InitCheck", "MeshCheck", "TensorCheck"]

MOST_LINES = 8


@dataclass(frozen=True)
class TensorCheck:
    """A tensor whose shards differ from one process, or cannot be compared.

    Attributes:
        name: The name in the module.
        is_different: True if it differs; false if it is not comparable.
        ranks: The ranks in which it does so, for the same reason.
        reason: The reason.
        source: For the first tensor that differs, the operator and the source line that gave the values in the first of
            these ranks, as far as they can be recorded.
        source_in_one_process: The same in one process.
        elements: The number of elements of the shard that differ.
        first_element: The index of the first one in the whole tensor. None if it is not known.
        value: Its value.
        value_in_one_process: Its value in one process.
    """

    name: str
    is_different: bool
    ranks: tuple[int, ...]
    reason: str
    source: str = ""
    source_in_one_process: str = ""
    elements: int = 0
    first_element: tuple[int, ...] | None = None
    value: complex | None = None
    value_in_one_process: complex | None = None

    def __str__(self) -> str:
        lines = [f"`{self.name}` {self.reason} (rank{'s' if len(self.ranks) > 1 else ''} {_ranges(self.ranks)})"]
        if self.first_element is not None:
            lines.append(
                f"  first element {list(self.first_element)}: {self.value} in rank {self.ranks[0]}, "
                f"{self.value_in_one_process} in one process; {self.elements} elements of the shard differ"
            )
        if self.source and self.source == self.source_in_one_process:
            lines.append(f"  from {self.source}, with other arguments or random numbers")
        elif self.source:
            lines.append(f"  rank {self.ranks[0]}: {self.source}")
            lines.append(f"  one process: {self.source_in_one_process}")
        return "\n".join(lines)


@dataclass(frozen=True)
class MeshCheck:
    """The initial weights on a mesh, compared with those of one process.

    Attributes:
        mesh: The sizes of the dimensions, by name.
        engine: The engine that sharded the module.
        ranks: The ranks that ran.
        tensors: The number of parameters and buffers, tied ones included.
        checks: The tensors that differ, then those that are not comparable, in the order of the module.
    """

    mesh: Mapping[str, int]
    engine: str
    ranks: tuple[int, ...]
    tensors: int
    checks: tuple[TensorCheck, ...]

    def __str__(self) -> str:
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        differ, unknown = (
            len({check.name for check in self.checks if check.is_different is is_different})
            for is_different in (True, False)
        )
        verb = "differs" if differ == 1 else "differ"
        counts = [f"{differ} {verb} from one process"] * bool(differ) + [f"{unknown} not comparable"] * bool(unknown)
        verdict = ", ".join(counts) or "the same as in one process"
        ranks = f"{len(self.ranks)} of {prod(self.mesh.values())} ranks"
        lines = [f"{mesh}, engine {self.engine}: {ranks}, {self.tensors} tensors: {verdict}"]
        lines += [str(check) for check in self.checks[:MOST_LINES]]
        if len(self.checks) > MOST_LINES:
            lines.append(f"... and {len(self.checks) - MOST_LINES} more")
        return "\n".join(lines)


class InitCheck(Items[MeshCheck]):
    """The results of `check_init()` for each mesh, which print as a report."""

    @property
    def is_same(self) -> bool:
        """Whether all tensors are the same as in one process."""
        return not any(mesh.checks for mesh in self)

    @property
    def is_different(self) -> bool:
        """Whether any tensor differs. Tensors that are not comparable do not count."""
        return any(check.is_different for mesh in self for check in mesh.checks)

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def to_dict(self) -> dict[str, Any]:
        """Return the results as builtin types, for JSON."""
        return {"is_same": self.is_same, "meshes": plain(self._items)}


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text such as `0-3, 7`."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
