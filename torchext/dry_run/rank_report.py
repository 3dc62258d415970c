"""The goal and the report of a rank, which the process that runs ranks reads without importing PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..descriptions.assumed_value import AssumedValue
from ..memory.categories import PINNED
from .collectives import GroupSummary
from .files import Change
from .time_tables import TimeBound

if TYPE_CHECKING:  # imports PyTorch, and only advice has findings
    from ..memory.remedies import Findings

__all__ = ["DEFAULT_VALUES", "FORWARD", "HOST", "STEP", "DevicePeak", "Goal", "RankReport"]

STEP = "step"
FORWARD = "forward pass"

DEFAULT_VALUES = "assume,masks=all,routing=balanced"
"""The default policy for reads of values that do not exist, of `world()` and of the command line."""

# Host memory, pageable and pinned, which reports show last.
HOST = {"cpu": 1, PINNED: 2}


@dataclass(frozen=True)
class Goal:
    """The number of steps or forward passes after which a program is ended.

    Attributes:
        unit: `STEP` (`steps.py`) or `FORWARD` (`passes.py`).
        count: Their number; None for a program that runs to its end.
    """

    unit: str = STEP
    count: int | None = 2


@dataclass
class DevicePeak:
    """The memory of one device.

    Attributes:
        device: `cuda:0` and so on; `cpu` is pageable memory of the host, `pinned` is pinned memory.
        allocated: The largest number of bytes that were allocated.
        reserved: The largest number of bytes that PyTorch reserved.
        total: The memory of the device in bytes; 0 for the host, where it is unknown.
        by_category: The bytes at the peak of allocated memory, by category.
        fragmentation: The bytes that were reserved but unused at that peak.
        by_module: The bytes at that peak, by module, the most first.
        by_line: The bytes at that peak, by source line, the most first; empty if lines are not recorded.
        line_peaks: The most bytes that each source line held at any moment.
        largest: The 20 largest tensors at that peak: bytes, category, name, line.
    """

    device: str
    allocated: int
    reserved: int
    total: int
    by_category: dict[str, int] = field(default_factory=dict)
    fragmentation: int = 0
    by_module: dict[str, int] = field(default_factory=dict)
    by_line: dict[str, int] = field(default_factory=dict)
    line_peaks: dict[str, int] = field(default_factory=dict)
    largest: list[tuple[int, str, str, str]] = field(default_factory=list)

    @property
    def headroom(self) -> int:
        """The free memory in bytes; negative if the rank does not fit."""
        return self.total - self.reserved


@dataclass
class RankReport:
    """The report of one rank.

    Attributes:
        rank: The number of the rank.
        goal: The number of steps or forward passes to run.
        made: The number of complete steps or forward passes.
        forwards: The number of forward passes that began.
        backwards: The number of backward passes that began.
        error: The traceback of the program's error, and a possible explanation; empty without an error.
        reason: The first line of that error's message, with the class.
        out_of_memory: The message of the device that ran out of memory; empty if no device did.
        exit_code: The exit code of a program that called `sys.exit()`.
        peaks: The memory of each device.
        collectives: The collectives, by phase, group and operator.
        peers: The ranks with which messages are exchanged, in ascending order.
        flops: The floating-point operations of one step or forward pass; None if they were not counted.
        bound: The lower bound of the time of one step or forward pass, or None.
        bound_error: The reason why the time has no bound; empty if `flops_error` is the reason.
        flops_error: The reason why they were not counted; empty if they were, or if counting is turned off.
        values: The places that read values that do not exist.
        files: The changes of files that the program would make.
        remarks: The differences between the dry run and the program.
        mismatches: Errors about messages whose sizes differ between sender and receiver, as far as both ranks have run.
        seconds: The duration, without starting Python.
        code: The source code of the lines of `peaks`.
        timeline: The busiest device over time, as `TrackedMemory.curve()` returns it; empty without memory.
        findings: The properties that decide which remedies may help; None without `--advise`.
    """

    rank: int
    goal: Goal = field(default_factory=Goal)
    made: int = 0
    forwards: int = 0
    backwards: int = 0
    error: str = ""
    reason: str = ""
    out_of_memory: str = ""
    exit_code: int = 0
    peaks: list[DevicePeak] = field(default_factory=list)
    collectives: list[GroupSummary] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    flops: int | None = None
    flops_error: str = ""
    bound: TimeBound | None = None
    bound_error: str = ""
    values: list[AssumedValue] = field(default_factory=list)
    files: list[Change] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    seconds: float = 0.0
    code: dict[str, str] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    findings: Findings | None = None

    @property
    def has_enough(self) -> bool:
        """Whether the rank has made as many steps or forward passes as requested."""
        return self.goal.count is None or self.made >= self.goal.count

    @property
    def outcome(self) -> str:
        """`failed`, `does not fit`, `too few` (steps or forward passes), or `fits`."""
        if self.error or self.mismatches or self.exit_code:
            return "failed"
        return "does not fit" if self.out_of_memory else "fits" if self.has_enough else "too few"
