"""The goal and the report of a rank, which the process that runs ranks reads without importing PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory.timeline import PINNED

if TYPE_CHECKING:  # imports PyTorch, and only advice has findings
    from ..advice.remedies import Findings

__all__ = ["DEFAULT_VALUES", "FORWARD", "HOST", "NOTES", "STEP", "USES_NO_GPU", "Goal", "RankReport"]

STEP = "step"
FORWARD = "forward pass"

DEFAULT_VALUES = "assume,masks=all,routing=balanced"
"""The default policy for reads of values that do not exist, of `world()` and of the command line."""

NOTES = "note-of-process-"
"""The first part of the names of files in which processes that a program starts note their memory."""

USES_NO_GPU = "uses no GPU"
"""The outcome of a rank that has allocated no memory on a GPU: whether it fits on one is unknown."""

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
class RankReport:
    """The report of one rank: the entry of `ranks` in the JSON report, with the keys that `reports/json.py` describes.

    Attributes:
        findings: The properties that decide which remedies may help; None without `--advise`.
        has_started_gpu_work: Whether a process that the program has started has allocated memory on a GPU.

    The last two are not in the JSON.
    """

    rank: int
    unit: str = STEP
    requested: int | None = 2
    completed: int = 0
    forward_passes: int = 0
    backward_passes: int = 0
    seconds: float = 0.0
    program_exit_code: int = 0
    error: str = ""
    error_summary: str = ""
    out_of_memory: str = ""
    devices: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    flops: int | None = None
    flops_error: str = ""
    bound: dict[str, Any] | None = None
    bound_error: str = ""
    values: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    findings: Findings | None = None
    has_started_gpu_work: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the JSON report."""
        content = {"rank": self.rank, "outcome": self.outcome, **vars(self)}
        del content["findings"], content["has_started_gpu_work"]
        return content

    @property
    def has_enough(self) -> bool:
        """Whether the rank has made as many steps or forward passes as requested."""
        return self.requested is None or self.completed >= self.requested

    @property
    def outcome(self) -> str:
        """`failed`, `does not fit`, `too few` (steps or forward passes), `uses no GPU`, or `fits`."""
        if self.error or self.mismatches or self.program_exit_code:
            return "failed"
        if self.out_of_memory:
            return "does not fit"
        if not self.has_enough:
            return "too few"
        uses_gpu = self.has_started_gpu_work or any(device["device"] not in HOST for device in self.devices)
        return "fits" if uses_gpu else USES_NO_GPU
