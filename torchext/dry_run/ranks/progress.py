"""Count the steps or forward passes of a program, and end it when it reaches the goal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch

from ...fake.cuda.graphs import is_put_off, replay_observers
from ...reports.model import FORWARD, STEP, Goal
from ...reports.time import TimeBound
from ..current import Job
from ..passes import Passes
from ..steps import PATIENCE, Steps
from ..time.bounds import Recording

__all__ = ["Finished", "Progress"]

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
        self.forwards = 0
        self.backwards = 0
        self.flops: int | None = None
        self.bound: TimeBound | None = None
        self.flops_error = ""
        self.has_enough = False
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
        self.steps = Steps(self._position, self._end_round)
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
            f"peak of allocated memory {used / 2**30:.2f} GiB"
        )

    def _print(self, text: str) -> None:
        if not self._is_quiet:
            print(f"[dry run] rank {self._job.rank}: {text}", file=sys.stderr, flush=True)

    def _stop_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.__exit__(None, None, None)
