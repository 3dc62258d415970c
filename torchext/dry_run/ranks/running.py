"""Run a program as one rank, for some steps, and collect the report of the command line."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...advice.applying import applying
from ...advice.remedies import Remedy
from ...descriptions import FakeGPU
from ...fake import threads_inherit_blocks
from ...fake.cuda.streams import is_put_off, replay_observers
from ...fake.values import AssumedValue
from ...internals.text import code_at, in_units
from ...memory import TrackedMemory, track_memory
from ...memory.timeline import summed
from ...reports.model import FORWARD, HOST, STEP, Goal, RankReport, TimeBound
from ..collectives import peers_of, summarize_phases
from ..current import Job, announce
from ..files.tree import about_refusal
from ..messages import Messages
from ..simulated_world import World, job_of, world
from ..steps import PATIENCE, Passes, Steps
from ..time import Recording, why_unbounded

__all__ = ["Finished", "Progress", "run_rank"]


# ---- Count the steps or forward passes of a program, and end it when it reaches the goal


# More backward passes than programs accumulate gradients over.
MOST_IDLE = 10_000

# A bare `except:` in a loop catches `Finished` in each iteration.
MOST_RAISED = 100


class Finished(BaseException):
    """Ends the program. Not an `Exception`, so that handlers of the program do not catch it."""


class Progress:
    """Counts steps or forward passes, and ends the program where the first pass after the goal begins.

    So code after the last step is part of that step. With `counts_flops` the program makes one additional step, and
    only its floating-point operations and the bound of its time are reported: the mode that counts them may change the
    memory that is needed.

    Attributes:
        forwards: The number of forward passes that began.
        backwards: The number of backward passes that began.
        flops: The floating-point operations of the additional step; None if they were not counted.
        bound: The lower bound of the time of the additional step; None if `flops` is, or without GPUs of known rates.
        flops_error: The reason why they cannot be counted; empty if they can.
        counts_flops: Whether to count them.
        has_enough: Whether the goal is reached.
        on_enough: Called when the goal is reached, before the additional step.
        on_unstoppable: Called when the program catches `Finished` and continues.
    """

    def __init__(self, goal: Goal, counts_flops: bool, job: Job, *, is_quiet: bool = False) -> None:
        self.forwards: int = 0
        self.backwards: int = 0
        self.flops: int | None = None
        self.bound: TimeBound | None = None
        self.flops_error: str = ""
        self.has_enough: bool = False
        self.on_enough: Callable[[], None] = lambda: None
        self.on_unstoppable: Callable[[], None] = lambda: None
        self._goal = goal
        self.counts_flops = counts_flops
        self._job = job
        self._is_quiet = is_quiet
        self._start = time.perf_counter()
        self._first: int | None = None
        self._forward_ends: list[int] = []
        self._shown = 0
        self._idle = 0
        self._calls = 0
        self._is_finished = False
        self._raised = 0
        self._is_open = True
        self._is_waiting = False
        self._recording: Recording | None = None
        self.steps: Steps = Steps(self._position, self._end_round)
        self._passes = Passes(self._begin_forward, self._begin_backward)
        replay_observers.append(self._note_replay)

    def close(self) -> None:
        """Stop counting."""
        if self._is_open:
            self._is_open = False
            self._passes.close()
            replay_observers.remove(self._note_replay)
            self.steps.close()
            self._stop_recording()

    def finish(self) -> None:
        """Count the current step as complete, because the program has ended."""
        if self._is_finished:
            return
        self._is_finished = True
        self.steps.finish()
        if self.forwards:
            self._forward_ends.append(self._position())
        self._check()

    def end(self) -> NoReturn:
        """End the program where it would wait for a rank that has reached its goal."""
        self.finish()
        self._raise()

    @property
    def made(self) -> int:
        """The number of complete steps or forward passes, without the additional one."""
        return self._shown if self.has_enough else self._complete

    @property
    def _complete(self) -> int:
        return len(self._ends)

    def phases(self) -> list[tuple[str, int, int]]:
        """Return the phases: the name, the number of the first collective, and the number after the last one."""
        unit, position = self._goal.unit, self._position()
        begin = position if self._first is None else self._first
        phases = [("construction", 0, begin)]
        for number, end in enumerate(self._ends[: self.made], 1):
            phases.append((f"{unit} {number}", begin, end))
            begin = end
        rest = f"after {unit} {self.made}" if self.made else "after construction"
        return [*phases, (rest, begin, position)]

    @property
    def _ends(self) -> list[int]:
        return self._forward_ends if self._goal.unit == FORWARD else self.steps.rounds.ends

    def _position(self) -> int:
        return len(self._job.recorder.collectives)

    def _begin_forward(self) -> None:
        if is_put_off(partial(self._replay, self._begin_forward)):
            return
        if self.forwards and not self._is_finished:
            self._forward_ends.append(self._position())
        self._begin_pass()
        self.forwards += 1

    def _begin_backward(self) -> None:
        if is_put_off(partial(self._replay, self._begin_backward)):
            return
        self._begin_pass()
        self.backwards += 1
        self._look_for_calls()

    def _replay(self, begin: Callable[[], None]) -> None:
        """Begin the pass of a replayed graph, unless the graph is replayed within a pass."""
        if not self._passes.is_in_pass():
            begin()

    def _note_replay(self) -> None:
        if self._recording is not None:
            self.flops_error = f"the {self._goal.unit} replays a CUDA graph, and a fake graph runs no kernels"

    def _begin_pass(self) -> None:
        if not self._is_finished:
            if self._first is None:
                self._first = self._position()
            self.steps.begin_pass()
        self._end_round()

    def _end_round(self) -> None:
        if not self._is_finished:
            if self.steps.rounds.since == PATIENCE // 10 and self._goal.unit == STEP and not self._is_waiting:
                self._is_waiting = True
                self._print(f"{PATIENCE // 10} rounds without {self.steps.missing}, ignored after {PATIENCE}")
            self._check()
        if self._is_finished:
            self._raise()

    def _check(self) -> None:
        """Report new steps; at the goal, begin the additional step or end the program."""
        wanted = self._goal.count
        if self._recording is not None:
            if self._complete > self._shown:
                if not self.flops_error:
                    self.flops, self.bound = self._recording.flops, self._recording.bound()
                self._is_finished = True
            return
        for number in range(self._shown + 1, min(self._complete, wanted or self._complete) + 1):
            self._show(number)
        self._shown = self._complete
        if wanted is None or self._complete < wanted or self.has_enough:
            return
        self.has_enough = True
        self.on_enough()
        if self._is_finished or not self.counts_flops:
            self._is_finished = True
            return
        self._recording = Recording(self._job)
        self._recording.__enter__()

    def _look_for_calls(self) -> None:
        """End a loop that calls no optimizer, for example because a gradient scaler skips each step."""
        if self._goal.unit == FORWARD or self._goal.count is None:
            return
        self._idle = self._idle + 1 if self.steps.calls == self._calls else 0
        self._calls = self.steps.calls
        if self._idle in (MOST_IDLE // 10, MOST_IDLE):
            self._print(f"{self._idle} backward passes without an optimizer call; the run ends after {MOST_IDLE}")
        if self._idle >= MOST_IDLE:
            self._is_finished = True
            self._raise()

    def _raise(self) -> NoReturn:
        self._raised += 1
        if self._raised >= MOST_RAISED:
            self.on_unstoppable()
        raise Finished

    def _show(self, number: int) -> None:
        used = max((torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())), default=0)
        of = "" if self._goal.count is None else f" of {self._goal.count}"
        self._print(
            f"{self._goal.unit} {number}{of} after {time.perf_counter() - self._start:.1f} s, "
            f"peak of allocated memory {in_units(used)}"
        )

    def _print(self, text: str) -> None:
        if not self._is_quiet:
            print(f"[dry run] rank {self._job.rank}: {text}", file=sys.stderr, flush=True)

    def _stop_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)


# ---- Run the program, and collect its report


def run_rank(
    program: Sequence[str],
    *,
    is_module: bool,
    size: int,
    rank: int,
    gpu: FakeGPU | None,
    per_node: int,
    is_launched: bool,
    compiles: bool = True,
    goal: Goal,
    values: str,
    traces_lines: bool,
    counts_flops: bool,
    is_quiet: bool = False,
    messages: Messages | None = None,
    remedies: Sequence[Remedy] | None = None,
    on_unstoppable: Callable[[RankReport], None] = lambda report: None,
    on_end: Callable[[RankReport, bool], None] = lambda report, is_stopped: None,
) -> RankReport:
    """Run a program as rank `rank` of `size` until it reaches the goal.

    Args:
        program: The path of a script, or the name of a module, and its arguments.
        is_module: Whether it is a module.
        size: The number of ranks of the job.
        rank: The rank.
        gpu: The model of the GPUs; None for a job without GPUs.
        per_node: The number of GPUs and ranks of a machine.
        is_launched: Whether the program runs in the environment of torchrun.
        compiles: Whether `torch.compile()` has an effect.
        goal: The number of steps or forward passes.
        values: The policy for values that do not exist.
        traces_lines: Whether to record the lines that allocate memory, which is slower.
        counts_flops: Whether to run one more step to count its floating-point operations.
        is_quiet: Whether to print no progress.
        messages: The connection to other ranks; None if the rank runs alone.
        remedies: The changes of the program for this run; None to collect no findings either.
        on_unstoppable: Called with the report if the program continues after it has reached the goal. May end the
            process.
        on_end: Called with the report while fakes still work, and with whether the program was stopped at its goal.
    """
    report = RankReport(rank, goal.unit, goal.count)
    start = time.perf_counter()
    with ExitStack() as block:
        keywords: dict[str, Any] = {"values": values, "is_launched": is_launched, "compiles": compiles}
        job = world(size, rank, gpu, per_node, backend=None, trace=traces_lines, set_device=False, **keywords)
        job_of(job).messages = messages
        block.enter_context(job)
        block.enter_context(threads_inherit_blocks())
        announce(size, rank, gpu, per_node, **keywords)
        memory = block.enter_context(track_memory(trace=traces_lines))
        progress = Progress(goal, counts_flops, job_of(job), is_quiet=is_quiet)
        block.callback(progress.close)
        application = block.enter_context(nullcontext() if remedies is None else applying(remedies))
        if messages is not None:
            messages.on_finished = progress.end

        def describe() -> None:
            report.findings = None if application is None else application.findings
            _describe(report, job, memory, progress)

        progress.on_enough = describe
        progress.on_unstoppable = lambda: on_unstoppable(_completed(report, job, memory, progress, start))
        is_stopped = False
        try:
            _run(program, is_module)
        except Finished:
            is_stopped = True
        except BaseException as error:
            # The additional step that counts operations is not part of the run.
            if not progress.has_enough:
                _describe_end(report, error, job.latest_value)
            elif counts_flops and progress.flops is None:
                report.flops_error = _shortly(error)
        if not report.flops_error:
            progress.finish()
        progress.close()
        completed = _completed(report, job, memory, progress, start)
        on_end(completed, is_stopped)
        return completed


def _completed(report: RankReport, job: World, memory: TrackedMemory, progress: Progress, start: float) -> RankReport:
    """Complete the report at the end of the run."""
    report.completed = progress.made
    report.flops = progress.flops
    report.bound = None if progress.bound is None else progress.bound.to_dict()
    report.bound_error = why_unbounded(job_of(job))
    if progress.counts_flops and report.flops is None and not report.flops_error:
        report.flops_error = progress.flops_error or _why_not_counted(report, progress)
    report.remarks = [
        *job.remarks,
        *job.value_remarks,
        *progress.steps.remarks,
        *(messages.remarks if (messages := job_of(job).messages) else ()),
    ]
    if not report.devices:
        _describe(report, job, memory, progress)
    report.seconds = round(time.perf_counter() - start, 3)
    return report


def _describe_end(report: RankReport, error: BaseException, latest: AssumedValue | None) -> None:
    """Add the error, or the exit code, with which the program ended."""
    out_of_memory = _out_of_memory_behind(error)
    if out_of_memory is not None:
        report.out_of_memory = str(out_of_memory)
    elif isinstance(error, SystemExit):
        report.program_exit_code = _exit_code(error)
    else:
        report.error = "".join(traceback.format_exception(error)) + about_refusal(error)
        report.error_summary = _shortly(error)
        if latest is not None:
            report.error += _about_values(latest)


def _why_not_counted(report: RankReport, progress: Progress) -> str:
    unit = report.unit
    if report.requested is None:
        return f"with --to-end the program makes no additional {unit} to count"
    if not progress.has_enough:
        return f"counting needs one more {unit} than requested, and the program made fewer"
    return f"the program ended within the additional {unit}"


def _shortly(error: BaseException) -> str:
    """Return the first line of the message, with the class."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next(line for line in lines if line[:1].strip()).rstrip(".")  # a SyntaxError begins with indented code


def _about_values(latest: AssumedValue) -> str:
    """Explain that assumed values may cause the error."""
    return (
        "\nBefore this error the program read assumed values, the last one with "
        f"{latest.operator} at {latest.line or latest.reader}: {latest.answer}. If sizes depend on it, such as the "
        "number of tokens of an expert or the sizes of tensors of other ranks, the dry run cannot continue beyond that "
        "line: take these sizes from the settings of the program, or skip that part.\n"
    )


def _out_of_memory_behind(error: BaseException | None) -> torch.cuda.OutOfMemoryError | None:
    """Return the error of a device that ran out of memory, which programs may wrap in other errors."""
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error


def _run(program: Sequence[str], is_module: bool) -> None:
    """Run a program as `python script` and `python -m module` do."""
    sys.argv = list(program)
    # Replaces the folder in which this process found torchext.dry_run.ranks.child.
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
    """Fill in memory, collectives and values so far."""
    collectives = job.collectives
    report.collectives = [row.to_dict() for row in summarize_phases(collectives, progress.phases())]
    report.peers = peers_of(collectives)
    report.values = [asdict(value) for value in job.values]
    report.forward_passes, report.backward_passes = progress.forwards, progress.backwards
    report.devices = [_describe_device(memory, place, job.gpu) for place in memory.places]
    report.devices.sort(key=lambda device: HOST.get(device["device"], 0))
    report.code = {line: code_at(line) for device in report.devices for line in device["line_peaks"]}
    busiest = max(report.devices, key=lambda one: (one["device"] not in HOST, one["peak_allocated"]), default=None)
    if busiest is not None:
        report.timeline = memory.curve(busiest["device"])


def _describe_device(memory: TrackedMemory, device: str, gpu: FakeGPU | None) -> dict[str, Any]:
    peak = memory.peak_allocated(device)
    reserved = memory.peak_reserved(device).reserved
    allocations = memory.allocations(device)
    total = 0 if gpu is None or device in HOST else gpu.memory - gpu.context
    return {
        "device": device,
        "peak_allocated": peak.allocated,
        "peak_reserved": reserved,
        "total": total,
        "headroom": total - reserved if total else None,
        "fragmentation": peak.fragmentation,
        "categories": {category.label: n for category, n in peak.by_category.items() if n},
        "modules": memory.by_module(device),
        "lines": summed([a for a in allocations if a.line], lambda allocation: allocation.line),
        "line_peaks": memory.peak_by_line(device),
        "largest": [
            {"bytes": a.size, "category": a.category.label, "name": a.title, "line": a.line} for a in allocations[:20]
        ],
    }
