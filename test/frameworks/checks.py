"""Expected numbers of the reports, by arithmetic: parameters, states of Adam, and communication.

PyTorch's allocator rounds tensors up to 512 bytes; communicated sizes are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import NamedTuple

from torchext.memory.timeline import in_units

from .reports import RankText

__all__ = [
    "Check",
    "Checks",
    "adam_8bit",
    "adapters",
    "ddp",
    "encoder",
    "fsdp2",
    "llama",
    "megatron",
    "reduced",
    "zero",
    "zero_3",
]

Shape = tuple[int, ...]

VOCABULARY, WIDTH, HIDDEN, LAYERS = 4096, 512, 1024, 4  # of the models in `programs`


class Check(NamedTuple):
    """A number of the report, and its expected value."""

    what: str
    expected: str
    found: str

    @property
    def holds(self) -> bool:
        """Whether they are equal, to the precision of the report."""
        return self.expected == self.found


Checks = Callable[[RankText], Iterable[Check]]


def llama() -> list[Shape]:
    """The parameters of the Llama."""
    layer = [*repeat((WIDTH, WIDTH), 4), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,)]
    return [(VOCABULARY, WIDTH), *chain(*repeat(layer, LAYERS)), (WIDTH,), (VOCABULARY, WIDTH)]


def encoder() -> list[Shape]:
    """The parameters of lightning's model."""
    attention = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    rest = [(2 * WIDTH, WIDTH), (2 * WIDTH,), (WIDTH, 2 * WIDTH), *repeat((WIDTH,), 5)]
    return [(VOCABULARY, WIDTH), *chain(*repeat([*attention, *rest], LAYERS)), (VOCABULARY, WIDTH)]


def adapters(*, only_attention: bool = False) -> list[Shape]:
    """The parameters that LoRA adds to each linear layer except the last, or to those of queries and values."""
    linear = [*repeat((WIDTH, WIDTH), 4), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]
    linear = linear[:2] if only_attention else linear
    return list(chain(*repeat([shape for out, into in linear for shape in ((8, into), (out, 8))], LAYERS)))


def _block(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _adam(elements: Iterable[int], itemsize: int = 4, *, fused: bool = False) -> int:
    """Two moments for each parameter. The fused kernel also keeps the number of steps on the GPU."""
    return sum(2 * _block(itemsize * n) + (_block(4) if fused else 0) for n in elements if n or fused)


def _state(report: RankText, nbytes: int) -> Check:
    return Check("optimizer state", in_units(nbytes), report.category("optimizer state"))


def _given(report: RankText, operator: str, nbytes: int, ranks: int | None = None) -> Check:
    expected, found = in_units(nbytes), report.given(operator, ranks or report.size)
    return Check(operator, expected, expected if expected in found else " and ".join(found) or "nothing")


def reduced(parameters: int) -> Checks:
    """Each step reduces all gradients, in float32."""
    return lambda report: [_given(report, "allreduce", 4 * parameters)]


def ddp(shapes: list[Shape], itemsize: int = 4, *, fused: bool = False) -> Checks:
    """The same, and Adam has states for all parameters."""

    def checks(report: RankText) -> Iterator[Check]:
        sizes = [math.prod(shape) for shape in shapes]
        yield _state(report, _adam(sizes, itemsize, fused=fused))
        yield _given(report, "allreduce", itemsize * sum(sizes))

    return checks


def fsdp2(shapes: list[Shape], *, fused: bool = False) -> Checks:
    """Each parameter is sharded by rows, and the last ranks may have none. Gradients are sent as bfloat16."""

    def checks(report: RankText) -> Iterator[Check]:
        rows = [_rows(shape[0], report) for shape in shapes]
        own = [n * math.prod(shape[1:]) for n, shape in zip(rows, shapes, strict=True)]
        yield _state(report, _adam(own, fused=fused))
        padded = sum(-(-shape[0] // report.size) * report.size * math.prod(shape[1:]) for shape in shapes)
        yield _given(report, "reduce_scatter_base", 2 * padded)

    return checks


def _rows(count: int, report: RankText) -> int:
    each = -(-count // report.size)
    return max(0, min(each, count - report.rank * each))


def zero(shapes: list[Shape], *, fused: bool = False) -> Checks:
    """Stages 1 and 2 of ZeRO shard all parameters as one buffer; those without weight decay form another one."""
    decayed = [math.prod(shape) for shape in shapes if len(shape) > 1]
    others = [math.prod(shape) for shape in shapes if len(shape) == 1]

    def checks(report: RankText) -> Iterator[Check]:
        groups = [sum(decayed), sum(others)] if fused else [sum(decayed) + sum(others)]
        parts = [-(-n // (2 * report.size)) * 2 for n in groups]
        yield _state(report, _adam(parts, fused=fused))
        yield _given(report, "allgather_base", 2 * sum(parts))

    return checks


def zero_3(shapes: list[Shape]) -> Checks:
    """Stage 3 shards each parameter, and sends each gradient once for each of two batches."""

    def checks(report: RankText) -> Iterator[Check]:
        parts = [-(-math.prod(shape) // report.size) for shape in shapes]
        yield _state(report, _adam([sum(parts)]))
        yield _given(report, "reduce_scatter_base", 2 * 2 * sum(parts) * report.size)

    return checks


def adam_8bit(shapes: list[Shape], itemsize: int) -> Checks:
    """One byte per number, and a float32 for each 256; tensors of less than 4,096 have moments in float32."""

    def checks(report: RankText) -> Iterator[Check]:
        sizes = [math.prod(shape) for shape in shapes]
        tables = 2 * 1024
        states = sum(_block(n) + _block(4 * -(-n // 256)) if n >= 4096 else _block(4 * n) for n in sizes)
        yield _state(report, 2 * states + tables)
        yield _given(report, "allreduce", itemsize * sum(sizes))

    return checks


def megatron(tensor: int, *, distributed: bool = False) -> Checks:
    """Matrices are sharded over the ranks of a tensor-parallel group; gradients are reduced in float32."""

    def checks(report: RankText) -> Iterator[Check]:
        divided = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (3 * WIDTH,), (HIDDEN,)]
        whole = [*repeat((WIDTH,), 6)]
        layer = sum(map(math.prod, divided)) // tensor + sum(map(math.prod, whole))
        total = LAYERS * layer + 2 * VOCABULARY * WIDTH // tensor + 2 * WIDTH
        group = report.size // tensor
        yield _given(
            report, "reduce_scatter_tensor_coalesced" if distributed else "allreduce_coalesced", 4 * total, group
        )

    return checks
