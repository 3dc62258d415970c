"""Policies for the positions that sorting, selecting and sampling return: which experts get how many tokens.

A policy describes one assignment for the whole job: every rank routes its tokens as this one does. So what one rank
sends is what the other receives, and each rank can be run alone.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

__all__ = ["ROUTING", "Balanced", "Routing", "make_routing", "routing_module"]

ROUTING = ("balanced", "same", "worst", "histogram:FILE")

# Descriptions of process groups of experts: `DeviceMesh` makes `mesh_ep`, Megatron `EXPERT_MODEL_PARALLEL_GROUP`.
EXPERT_GROUP = re.compile(r"^(mesh_)?(ep|expert)$|expert_(model_)?parallel", re.IGNORECASE)

# Shares that are written with seven digits may exceed 1/k by as much.
SLACK = 1e-6

PIPELINES = (
    "Layers are counted from the first one on this rank. For a pipeline stage, give only the rows of its layers."
)


class Routing(ABC):
    """A policy for routing.

    Attributes:
        remarks: Assumptions about the program.
        exchanges_in: The name of the group in which ranks have exchanged integers, such as counts of tokens.
    """

    def __init__(self) -> None:
        self.remarks: dict[str, None] = {}
        self.exchanges_in = ""
        self._was_used = False
        self._others: dict[int, None] = {}  # numbers of positions to which the policy did not apply

    @abstractmethod
    def choose(self, count: int, length: int, rows: int) -> Tensor | None:
        """Return `rows` rows of `length` of `count` positions, flattened, or None if the policy does not apply."""

    def report(self) -> list[str]:
        """Return the remarks at the end of a run."""
        return list(self.remarks)

    def _report_unused(self, name: str, wanted: str) -> str:
        found = ", ".join(map(str, list(self._others)[:4]))
        among = f"it chose among {found} positions" if found else "it chose no positions"
        return f"{name} was not used: the program never chose among {wanted}, {among}."


class Balanced(Routing):
    """Cycle through all positions, so that experts get equal shares. Tokens that often mean the end come last."""

    def choose(self, count: int, length: int, rows: int) -> Tensor:
        """Return consecutive positions."""
        return torch.arange(rows * length).add_(count // 2).remainder_(count)


class Same(Routing):
    """Choose the same positions in each row."""

    def choose(self, count: int, length: int, rows: int) -> Tensor | None:
        """Return equal rows."""
        return torch.arange(length).add_(self._first(count)).remainder_(count).repeat(rows)

    def _first(self, count: int) -> int:
        return count // 2


class Worst(Same):
    """Choose the experts of this rank in each row, so that it gets as many tokens as can reach it."""

    def __init__(self, first: int | None = None) -> None:
        super().__init__()
        self._given = first

    def choose(self, count: int, length: int, rows: int) -> Tensor | None:
        """Return equal rows, or None if there is no position with the given number."""
        if self._given is not None and self._given >= count:
            self._others[count] = None
            return None
        self._was_used = True
        return super().choose(count, length, rows)

    def report(self) -> list[str]:
        """Return how the experts were found, or that the given number was not used."""
        if self._given is None or self._was_used:
            return super().report()
        return [self._report_unused(f"worst:{self._given}", f"more than {self._given} experts")]

    def _first(self, count: int) -> int:
        if self._given is not None:
            return self._given
        group = _group_of_experts(count, self.exchanges_in)
        if group is None:
            return 0
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        each = count // size
        name = group.group_desc if EXPERT_GROUP.search(group.group_desc) else group.group_name
        name = "of all ranks" if group is dist.group.WORLD else f"`{name}`"
        self.remarks[
            f"routing=worst: this rank holds experts {rank * each}-{(rank + 1) * each - 1} of {count}, as rank {rank} "
            f"of {size} in the group {name}. If that is wrong, use routing=worst:FIRST."
        ] = None
        return rank * each


class Histogram(Routing):
    """Distribute tokens in proportion to the shares of experts, which a real run has measured, for each layer."""

    def __init__(self, file: str, must_fit: bool) -> None:
        super().__init__()
        self._file = file
        self._must_fit = must_fit
        self._layers = _read_shares(file)
        self._modules: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._num_modules = 0  # also those that are gone

    def choose(self, count: int, length: int, rows: int) -> Tensor | None:
        """Return positions in proportion to the shares, or None for another number of positions."""
        if count != len(self._layers[0]):
            self._others[count] = None
            if self._must_fit:
                raise ValueError(
                    f"The histogram {self._file} has {len(self._layers[0])} shares, but the program chooses "
                    f"among {count} experts."
                )
            return None
        self._was_used = True
        shares = torch.tensor(self._layers[self._layer()], dtype=torch.float64)
        shares /= shares.max()  # the sum of large counts is infinite
        shares /= shares.sum()
        if length == count:
            return _sorted_by(shares, rows)
        if length > count:  # sampling with replacement
            return _rows_of_shares(shares, length, rows, most=rows * length).flatten()
        most = float(shares.max())
        if most * length > 1 + SLACK:
            raise ValueError(
                f"The histogram {self._file} gives expert {int(shares.argmax())} the share {most:.4g}, but each token "
                f"chooses {length} different experts, so expected at most {1 / length:.4g}."
            )
        return _rows_of_shares(shares, length, rows, most=rows).flatten()

    def _layer(self) -> int:
        if len(self._layers) == 1:
            return 0
        module = routing_module(sys._getframe(1))
        if module is None:
            raise ValueError(
                f"The histogram {self._file} has {len(self._layers)} layers, but the program routes tokens "
                "outside of modules. Use one row of shares."
            )
        number = self._modules.get(module)
        if number is None:
            number = self._modules[module] = self._num_modules
            self._num_modules += 1
        if number >= len(self._layers):
            raise ValueError(
                f"The histogram {self._file} has {len(self._layers)} layers, but the program routes tokens "
                f"in more modules, also in {type(module).__name__}."
            )
        return number

    def report(self) -> list[str]:
        """Return whether the shares were used."""
        if not self._was_used:
            return [self._report_unused(self._file, f"{len(self._layers[0])} experts")]
        if self._num_modules not in (0, len(self._layers)):
            remark = f"{self._file} has {len(self._layers)} layers, but {self._num_modules} modules chose experts."
            return [f"{remark} {PIPELINES}"]
        return []


def make_routing(text: str, must_fit: bool = False) -> Routing:
    """Return the policy for routing `text`, such as `worst` or `histogram:FILE`.

    Args:
        text: The policy.
        must_fit: Refuse choices among other numbers of positions than a histogram has.

    Raises:
        ValueError: `text` is not a policy for routing, or the file is missing or invalid.
    """
    name, colon, argument = text.partition(":")
    if name == "histogram" and argument:
        return Histogram(argument, must_fit)
    if name == "worst" and colon and argument.isdecimal():
        return Worst(int(argument))
    plain: dict[str, type[Routing]] = {"balanced": Balanced, "same": Same, "worst": Worst}
    if colon or name not in plain:
        raise ValueError(f"expected routing={'|'.join(ROUTING)}, got routing={text}")
    return plain[name]()


def routing_module(frame: FrameType | None) -> nn.Module | None:
    """Return the innermost module whose method is running in `frame` or its callers."""
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


def _group_of_experts(count: int, exchanges_in: str) -> Any:
    """Return the process group over which `count` experts are probably distributed, or None.

    Named groups of experts come first, then the group in which the program has exchanged counts.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    groups = [group for group in distributed_c10d._world.pg_map if _divides(group, count)]
    named = [group for group in groups if EXPERT_GROUP.search(str(group.group_desc))]
    exchanging = [group for group in groups if group.group_name == exchanges_in]
    everyone = [group for group in groups if group is dist.group.WORLD]
    return next(iter(named or exchanging or everyone), None)


def _divides(group: Any, count: int) -> bool:
    size = dist.get_world_size(group)
    return size > 1 and count % size == 0 and dist.get_rank(group) >= 0


class _Numbered(NamedTuple):
    line: int
    cells: list[Any]


def _read_shares(file: str) -> list[list[float]]:
    """Return the shares of experts for each layer.

    Raises:
        ValueError: The file is missing, or does not have shares.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
        rows = list(_rows_of(text, file.endswith(".csv")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error, RecursionError) as error:
        raise ValueError(f"cannot read the histogram {file}: {error}") from error
    if not rows or not rows[0].cells:
        raise ValueError(f"expected shares of experts in the histogram {file}, as a list or one list for each layer")
    layers = []
    for number, cells in rows:
        if len(cells) != len(rows[0].cells):
            raise ValueError(
                f"the histogram {file} has {len(cells)} shares in layer {number}, but {len(rows[0].cells)} in layer "
                f"{rows[0].line}"
            )
        layers.append([_share(cell, f"expert {i} of layer {number}", file) for i, cell in enumerate(cells)])
        if not sum(layers[-1]) > 0:
            raise ValueError(f"all shares of layer {number} in the histogram {file} are zero")
    return layers


def _rows_of(text: str, is_csv: bool) -> Iterator[_Numbered]:
    given = [row for row in csv.reader(text.splitlines()) if row] if is_csv else json.loads(text)
    if not isinstance(given, list):
        return
    layers = given if given and all(isinstance(row, list) for row in given) else [given]
    yield from (_Numbered(number, row) for number, row in enumerate(layers))


def _share(cell: Any, place: str, file: str) -> float:
    try:
        share = float(cell) if isinstance(cell, str | int | float) and not isinstance(cell, bool) else math.nan
    except (ValueError, OverflowError):
        share = math.nan
    if not (math.isfinite(share) and share >= 0):
        raise ValueError(f"expected a share of at least 0 for {place} in the histogram {file}, got {cell!r}")
    return share


def _rows_of_shares(shares: Tensor, length: int, rows: int, most: int) -> Tensor:
    """Return rows of positions in proportion to `shares`. Those of a row differ if `most`, of each, is `rows`."""
    counts = _apportion(shares, rows * length, most)
    # Each column of rows continues the previous one.
    return torch.arange(len(shares)).repeat_interleave(counts).view(length, rows).t()


def _sorted_by(shares: Tensor, rows: int) -> Tensor:
    """Return rows of all positions, flattened. The first columns follow `shares` as long as a row can."""
    length = int(1 / float(shares.max()) + SLACK)
    first = _rows_of_shares(shares, length, rows, most=rows)
    # Rows begin with different columns, so that fewer columns than `length` also follow the shares.
    first = first.gather(1, torch.arange(rows).unsqueeze(1).add(torch.arange(length)) % length)
    order = shares.argsort(descending=True, stable=True)
    is_left = torch.ones(rows, len(shares), dtype=torch.bool).scatter_(1, first, False)[:, order]
    left = order[is_left.nonzero()[:, 1]].view(rows, len(shares) - length)
    return torch.cat([first, left], 1).flatten()


def _apportion(shares: Tensor, total: int, most: int) -> Tensor:
    """Return integers in proportion to `shares` with the sum `total`, none above `most`, by largest remainder."""
    exact = (shares * total).clamp_(max=most)
    counts = exact.floor().to(torch.int64)
    while (missing := total - int(counts.sum())) > 0:
        remainders = (exact - counts).masked_fill_(counts >= most, -math.inf)
        counts[remainders.topk(min(missing, int((counts < most).sum()))).indices] += 1
    return counts
