"""The lower bound of the time of a step as a result that prints, without importing PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..descriptions.rates import PeakRates
from ..internals.results import Column, Table

__all__ = ["HEADINGS", "BoundingOperator", "TimeBound", "operator_rows", "sentence"]


@dataclass(frozen=True)
class BoundingOperator:
    """Calls of an operator in one line and in modules that differ only in their numbers.

    Attributes:
        operator: The operator or the collective.
        module: The module and the phase, with `*` for numbers.
        line: The source line, `file:line in function`; empty if unknown.
        calls: The number of calls.
        seconds: Their least time.
        bounded_by: `compute`, `memory` or `network`.
    """

    operator: str
    module: str
    line: str
    calls: int
    seconds: float
    bounded_by: str


@dataclass(frozen=True)
class TimeBound:
    """A lower bound of the time of a step. Prints as a sentence and a table.

    Attributes:
        seconds: The least time of a step.
        compute: The time of its operations at the highest clock, in seconds.
        memory: The time of its certain memory traffic, in seconds.
        network: The time of its certain communication, within and between machines, in seconds.
        not_overlapped: The part of `seconds` that communication adds.
        utilization: The operations that `torch.utils.flop_counter` counts, without those that `torch.utils.checkpoint`
            repeats, over those that the GPU can do in that time by its data sheet: an upper limit of the model FLOPs
            utilization (MFU). None if above 1.
        flops: The number of operations, with repeated ones.
        is_compiled: Whether the program calls `torch.compile()`, which leaves less certain work.
        rates: The rates that were used.
        operators: The operators with the largest times.

    Example:
        >>> from torchext.dry_run import bound_time, world
        >>> with world(1, gpu="A100-80GB"):
        ...     a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
        ...     bound = bound_time(lambda: a @ a)
        >>> f"{1e3 * bound.seconds:.1f} ms"
        '3.5 ms'
    """

    seconds: float
    compute: float
    memory: float
    network: float
    not_overlapped: float
    utilization: float | None
    flops: int
    is_compiled: bool
    rates: PeakRates
    operators: tuple[BoundingOperator, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as builtin types, for JSON."""
        rates = {name: value if value < float("inf") else None for name, value in asdict(self.rates).items()}
        return {**asdict(self), "rates": rates, "operators": [asdict(one) for one in self.operators]}

    def _table(self) -> Table:
        columns = [Column(name, is_number=name in ("time", "calls")) for name in HEADINGS]
        return Table(columns, operator_rows(self.to_dict()))

    def __str__(self) -> str:
        return f"{sentence(self.to_dict(), 'step')}\n\n{self._table()}"

    def _repr_html_(self) -> str:
        return f"<p>{sentence(self.to_dict(), 'step')}</p>{self._table()._repr_html_()}"


def sentence(bound: Any, unit: str) -> str:
    """Return the sentence of the report about the content of a bound, for a step or a forward pass."""
    parts = ", ".join(f"{name} {bound[name]:.3g}" for name in ("compute", "memory", "network"))
    network = f", {bound['not_overlapped']:.3g} of it not overlapped" if bound["network"] else ""
    mfu = "" if bound["utilization"] is None else f"; MFU is at most {100 * bound['utilization']:.0f} %"
    return f"A {unit} takes at least {bound['seconds']:.3g} s ({parts}{network}){mfu}."


HEADINGS = ("time", "calls", "bound by", "operator", "module", "line")


def operator_rows(bound: Any) -> list[tuple[str, ...]]:
    """Return the bounding operators in the content of a bound as rows of a table with `HEADINGS`."""
    names = ("calls", "bounded_by", "operator", "module", "line")
    return [(f"{one['seconds']:.3g} s", *(str(one[name]) for name in names)) for one in bound["operators"]]
