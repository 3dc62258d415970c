"""The model of a report: the goal and the report of a rank, the bound of its time, and the JSON of a dry run.

The process that runs ranks reads it without importing PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..descriptions import FakeGPU, PeakRates
from ..internals.document import Column, Document, Part, Table
from ..memory.timeline import PINNED

if TYPE_CHECKING:
    from ..advice.remedies import Findings

__all__ = [
    "FORWARD",
    "HOST",
    "NOTES",
    "STEP",
    "USES_NO_GPU",
    "BoundingOperator",
    "Goal",
    "RankReport",
    "TimeBound",
    "json_report",
    "sentence",
    "table_of_operators",
    "with_times_apart",
    "with_times_in_place",
]

STEP = "step"
FORWARD = "forward pass"

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
        unit: `STEP` or `FORWARD` (`dry_run/steps.py`).
        count: Their number; None for a program that runs to its end.
    """

    unit: str = STEP
    count: int | None = 2


@dataclass
class RankReport:
    """The report of one rank: the entry of `ranks` in the JSON report, whose keys are listed below the class.

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


# ---- The JSON report of `torchext dry-run --json`
#
# Numbers of bytes and of operations are integers, times are in seconds. Keys may be added without a new `schema`. Two
# runs of one program differ in the key `measured` only, unless the program itself is random.
#
#     schema: the version of this description, 1
#     command: "dry-run"
#     versions: torchext, torch_of_build, torch, python
#     program: the command line after `--`
#     folder: the current directory
#     world_size, per_node: the size of the job, and of a machine
#     values: the policy for reads of values that do not exist
#     exit_code: of the command (`torchext dry-run --help`)
#     interrupted: whether ranks are missing because of Ctrl-C
#     other_mismatches: errors about messages between ranks that are not reported
#     gpu: name, count, memory, capability, multiprocessors, context
#     ranks: a list, in the order of the runs:
#         rank
#         outcome: "fits", "does not fit", "failed", "too few", or "uses no GPU" if nothing was allocated on one
#         unit: "step" or "forward pass"
#         requested, completed: numbers of these; requested is null with --to-end
#         forward_passes, backward_passes: numbers of passes that began
#         program_exit_code: of the program; 0 if it did not end itself
#         error, error_summary: the traceback of the program, and its last line; empty without an error
#         out_of_memory: the message of the device that ran out of memory, or empty. The devices below then show the
#             memory that the rank needs, if the program could be run to that point
#         devices: a list, GPUs first:
#             device: "cuda:0", ..., "cpu" (pageable memory of the host), "pinned"
#             peak_allocated, peak_reserved: the largest numbers of bytes
#             total: the memory of the device; 0 for the host
#             headroom: total - peak_reserved; null for the host
#             fragmentation: bytes that were reserved but unused at the peak of allocated memory
#             categories, modules, lines: bytes at that peak by category, by module and by source line
#             line_peaks: the most bytes that each source line held at any moment
#             largest: the 20 largest tensors at that peak: bytes, category, name, line
#         collectives: a list of phase, group, group_size, operator, calls, bytes_sent, bytes_received
#         peers: the ranks with which messages are exchanged
#         flops: the operations of one step or forward pass, or null; flops_error: the reason for null
#         bound: the lower bound of the time of one step or forward pass, or null; bound_error: the reason for null, if
#             `flops_error` is not the reason
#             seconds: the least time
#             compute, memory, network: the least times of operations, of memory traffic and of communication
#             not_overlapped: the part of `seconds` that communication adds
#             utilization: the upper limit of the MFU, or null
#             flops, is_compiled, rates: see `torchext.dry_run.TimeBound`
#             operators: a list of operator, module, line, calls, seconds, bounded_by
#         values: answered reads of values that do not exist: line, reader, operator, answer, kind, policy, count
#         files: changes that the program would make: path, change, bytes
#         remarks: differences between the dry run and the program
#         mismatches: errors about messages of this rank whose sizes differ between sender and receiver
#         code: the source code of the lines of `line_peaks`, by line
#         timeline: the memory of the device with the largest peak over time; empty without memory:
#             device, peak_allocated
#             categories: names and colors
#             points: a list of event, reserved, bytes of each category
#             details: the largest tensors at some events: bytes, category, name, line
#     measured: times on this machine, for each rank:
#         seconds: the duration, without starting Python
#         timeline: the time of each point of the timeline
#     comparison: with --compare, the differences from another report; see `comparison.py`
#     advice: with --advise, the runs of the first rank with remedies; null if the program fails without them:
#         gpu; limit: the bytes that the program may reserve
#         is_complete: whether the search ended before its limits
#         baseline, solution, and lists front, outcomes, failed of runs:
#             name, numerics: "exact", "rounding", "arguments" or "changed"
#             remedies: a list of kind, name, numerics, snippet
#             fits: whether the run fits on the GPU; peak_reserved, peak_allocated, pinned, bytes_sent: bytes
#             flops: the operations of a step, or null
#             error: that of a run in `failed`
#         solution is null if no run fits within the limit, and has all changes in `snippet`


def json_report(job: dict[str, Any], gpu: FakeGPU, reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the content of the JSON report, without `schema`, `command` and `versions`.

    Args:
        job: The keys before `gpu`.
        gpu: The GPUs of a machine.
        reports: The reports of the ranks.
    """
    names = ("name", "count", "memory", "capability", "multiprocessors", "context")
    return {
        **job,
        "gpu": {name: getattr(gpu, name) for name in names},
        "ranks": [report.to_dict() for report in reports],
    }


def with_times_apart(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON report with the times of this machine under one key, and no others."""
    ranks = [dict(rank) for rank in content["ranks"]]
    measured = []
    for rank in ranks:
        timeline = dict(rank.get("timeline", {}))
        measured.append({"seconds": rank.pop("seconds"), "timeline": timeline.pop("seconds", [])})
        if "timeline" in rank:
            rank["timeline"] = timeline
    return {**content, "ranks": ranks, "measured": measured}


def with_times_in_place(content: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `with_times_apart()`. Reports of earlier versions have these times in place.

    Raises:
        ValueError: The times of a rank are missing.
    """
    content = dict(content)
    ranks = [dict(rank) for rank in content["ranks"]]
    times = content.pop("measured", None)
    if times is None:
        times = [{"seconds": rank.get("seconds")} for rank in ranks]
    if not isinstance(times, list) or len(times) != len(ranks) or not all(map(_has_seconds, times)):
        raise ValueError("The report has no `seconds` for each of its ranks.")
    for rank, measured in zip(ranks, times, strict=True):
        rank["seconds"] = measured["seconds"]
        if rank.get("timeline") and "timeline" in measured:
            rank["timeline"] = {**rank["timeline"], "seconds": measured["timeline"]}
    return {**content, "ranks": ranks}


def _has_seconds(measured: object) -> bool:
    return isinstance(measured, dict) and isinstance(measured.get("seconds"), int | float)


# ---- The lower bound of the time of a step, as a result that prints


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
class TimeBound(Document):
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

    def _parts(self) -> list[Part]:
        bound = self.to_dict()
        return [sentence(bound, "step"), table_of_operators(bound)]


def sentence(bound: Any, unit: str) -> str:
    """Return the sentence of the report about the content of a bound, for a step or a forward pass."""
    parts = ", ".join(f"{name} {bound[name]:.3g}" for name in ("compute", "memory", "network"))
    network = f", {bound['not_overlapped']:.3g} of it not overlapped" if bound["network"] else ""
    mfu = "" if bound["utilization"] is None else f"; MFU is at most {100 * bound['utilization']:.0f} %"
    return f"A {unit} takes at least {bound['seconds']:.3g} s ({parts}{network}){mfu}."


def table_of_operators(bound: Any, title: str = "") -> Table:
    """Return the bounding operators in the content of a bound."""
    columns = (Column("time", "{:.3g} s".format), "calls", "bound by", "operator", "module", "line")
    names = ("seconds", "calls", "bounded_by", "operator", "module", "line")
    return Table(columns, map(itemgetter(*names), bound["operators"]), title)
