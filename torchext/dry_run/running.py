"""Runs a program as one rank, for some steps, and collects what the command line reports."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..fake import carry_blocks_to_threads
from ..fake.assumed_values import AssumedValue
from ..fake.gpus import FakeGPU
from ..memory import PINNED, TrackedMemory, track_memory
from .collectives import GroupSummary, peers_of, summarize_phases
from .files import Change
from .files.refusals import about_refusal
from .messages import Messages
from .progress import Finished, Goal, Progress
from .world import World, world

__all__ = ["HOST", "DevicePeak", "RankReport", "run_rank"]

# The memory of the host, which reports show last: pageable and pinned.
HOST = {"cpu": 1, PINNED: 2}


@dataclass
class DevicePeak:
    """The memory of one device.

    Attributes:
        device: Such as `cuda:0`; `cpu` is pageable memory of the host, `pinned` pinned memory.
        allocated: The most bytes that were allocated.
        reserved: The most bytes that PyTorch has reserved.
        total: The bytes that there are; 0 if that is not known, as of the host.
        by_category: The bytes at the peak, by what they are for.
        fragmentation: The bytes that were reserved and not in use at the peak.
        by_module: By the module that holds them.
        largest: The largest tensors at the peak: bytes, category, name, line.
    """

    device: str
    allocated: int
    reserved: int
    total: int
    by_category: dict[str, int] = field(default_factory=dict)
    fragmentation: int = 0
    by_module: dict[str, int] = field(default_factory=dict)
    largest: list[tuple[int, str, str, str]] = field(default_factory=list)

    @property
    def headroom(self) -> int:
        """What is left; negative if it does not fit."""
        return self.total - self.reserved


@dataclass
class RankReport:
    """What one rank has done.

    Attributes:
        rank: Its rank.
        goal: When it would have made enough.
        made: How many steps, or forward passes, it has made.
        forwards: How many forward passes have begun.
        backwards: How many backward passes have begun.
        error: The traceback of the program's own error, and what may explain it; empty if there was none.
        reason: The first line of that error's message, with the class.
        out_of_memory: What a device said that has run out of memory; empty if none has.
        exit_code: The code with which the program has ended by itself, if it did.
        peaks: The memory of each device.
        collectives: What was sent, by phase, group and operator.
        peers: The ranks with which it has exchanged messages, in ascending order.
        flops: The floating-point operations of one step, or forward pass; None if they were not counted.
        flops_error: Why they could not be counted; empty if they were, or were not asked for.
        values: Where values were read that do not exist.
        files: What the program would have written and removed.
        remarks: What was done otherwise than the program says.
        mismatches: Which of its messages are not received as they are sent, as far as both ranks have run.
        seconds: How long it took, without starting Python.
        page: A page that shows the memory over time.
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
    values: list[AssumedValue] = field(default_factory=list)
    files: list[Change] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    seconds: float = 0.0
    page: str = ""

    @property
    def has_enough(self) -> bool:
        """Whether it has made as many steps, or forward passes, as were asked for."""
        return self.goal.count is None or self.made >= self.goal.count


def run_rank(
    program: Sequence[str],
    *,
    is_module: bool,
    size: int,
    rank: int,
    gpu: FakeGPU | None,
    per_node: int,
    is_launched: bool,
    goal: Goal,
    values: str,
    traces_lines: bool,
    counts_flops: bool,
    messages: Messages | None = None,
    on_unstoppable: Callable[[RankReport], None] = lambda report: None,
) -> RankReport:
    """Runs a program as rank `rank` of `size` until it has made enough.

    Args:
        program: The path of a script, or the name of a module, and its arguments.
        is_module: Whether it is a module.
        size: How many processes the job has.
        rank: The rank.
        gpu: What the GPUs are like.
        per_node: How many a machine has.
        is_launched: Whether the program finds the environment of torchrun.
        goal: When that is so.
        values: The policy for values that do not exist.
        traces_lines: Whether to look for the lines that made tensors, which takes longer.
        counts_flops: Whether to make one more step to count its floating-point operations.
        messages: What this rank and others send to each other; None if it runs by itself.
        on_unstoppable: Called with the report when the program goes on after it has made enough. May end the process.
    """
    report = RankReport(rank, goal)
    start = time.perf_counter()
    with ExitStack() as block:
        job = world(
            size,
            rank,
            gpu,
            per_node,
            backend=None,
            trace=traces_lines,
            set_device=False,
            values=values,
            is_launched=is_launched,
        )
        job.messages = messages
        block.enter_context(job)
        block.enter_context(carry_blocks_to_threads())
        memory = block.enter_context(track_memory(trace=traces_lines))
        progress = Progress(goal, counts_flops, job)
        block.callback(progress.close)
        if messages is not None:
            messages.on_finished = progress.end
        progress.on_enough = lambda: _describe(report, job, memory, progress)
        progress.on_unstoppable = lambda: on_unstoppable(_completed(report, job, memory, progress, start))
        try:
            _run(program, is_module)
        except Finished:
            pass
        except BaseException as error:
            # What happens while operations are counted is not part of the run.
            if not progress.has_enough:
                _describe_end(report, error, job.latest_value)
            elif counts_flops and progress.flops is None:
                report.flops_error = _shortly(error)
        if not report.flops_error:
            progress.finish()
        progress.close()
        return _completed(report, job, memory, progress, start)


def _completed(report: RankReport, job: World, memory: TrackedMemory, progress: Progress, start: float) -> RankReport:
    """Adds what is known at the end."""
    report.made = progress.made
    report.flops = progress.flops
    if progress.counts_flops and report.flops is None and not report.flops_error:
        report.flops_error = progress.flops_error or _why_not_counted(report, progress)
    report.remarks = [*job.remarks, *progress.steps.remarks, *(job.messages.remarks if job.messages else ())]
    if not report.peaks:
        _describe(report, job, memory, progress)
    report.seconds = time.perf_counter() - start
    return report


def _describe_end(report: RankReport, error: BaseException, latest: AssumedValue | None) -> None:
    """How a program has ended by itself."""
    out_of_memory = _out_of_memory_behind(error)
    if out_of_memory is not None:
        report.out_of_memory = str(out_of_memory)
    elif isinstance(error, SystemExit):
        report.exit_code = _exit_code(error)
    else:
        report.error = "".join(traceback.format_exception(error)) + about_refusal(error)
        report.reason = _shortly(error)
        if latest is not None:
            report.error += _about_values(latest)


def _why_not_counted(report: RankReport, progress: Progress) -> str:
    unit = report.goal.unit
    if report.goal.count is None:
        return f"a program that runs to its own end makes no further {unit} that could be counted"
    if not progress.has_enough:
        return f"they are those of one more {unit} than are asked for, and the program has made fewer"
    return f"the program has ended within the {unit} that was to be counted"


def _shortly(error: BaseException) -> str:
    """The first line of the message, with the class."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next(line for line in lines if line[:1].strip()).rstrip(".")  # a SyntaxError begins with indented code


def _about_values(latest: AssumedValue) -> str:
    """What the reader of an error has to know: it may come of what the program was told."""
    return (
        "\nBefore this error the program was told values that do not exist, the last of them by "
        f"{latest.operator} at {latest.line or latest.reader}: {latest.answer}. If sizes follow from it, such as how "
        "many tokens an expert gets or how large the tensors of other ranks are, the program cannot be run dry beyond "
        "that line: let it take them from its settings, or leave that part out.\n"
    )


def _out_of_memory_behind(error: BaseException | None) -> torch.cuda.OutOfMemoryError | None:
    """The error of a device that has run out of memory, which programs wrap in errors of their own."""
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error


def _run(program: Sequence[str], is_module: bool) -> None:
    """As `python script` and `python -m module` do."""
    sys.argv = list(program)
    # The first is where this process has found its own module.
    sys.path[0] = str(Path.cwd()) if is_module else str(Path(program[0]).resolve().parent)
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _describe(report: RankReport, job: World, memory: TrackedMemory, progress: Progress) -> None:
    """What is known now; later calls know more."""
    collectives = job.collectives
    report.collectives = summarize_phases(collectives, progress.phases())
    report.peers = peers_of(collectives)
    report.values = job.values
    report.forwards, report.backwards = progress.forwards, progress.backwards
    report.peaks = [_describe_device(memory, place, job.gpus) for place in memory.places]
    report.peaks.sort(key=lambda peak: HOST.get(peak.device, 0))
    busiest = max(report.peaks, key=lambda peak: (peak.device not in HOST, peak.allocated), default=None)
    if busiest is not None:
        report.page = _page(memory, busiest.device)


def _describe_device(memory: TrackedMemory, device: str, gpu: FakeGPU | None) -> DevicePeak:
    peak = memory.peak_allocated(device)
    allocations = memory.allocations(device)
    return DevicePeak(
        device=device,
        allocated=peak.allocated,
        reserved=memory.peak_reserved(device).reserved,
        total=0 if gpu is None or device in HOST else gpu.memory - gpu.context,
        by_category={category.label: n for category, n in peak.by_category.items() if n},
        fragmentation=peak.fragmentation,
        by_module=dict(list(memory.by_module(device).items())[:20]),
        largest=[(a.size, a.category.label, a.title, a.line) for a in allocations[:20]],
    )


def _page(memory: TrackedMemory, device: str) -> str:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory.html"
        memory.plot(path, device)
        return path.read_text()
