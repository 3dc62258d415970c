"""A lower bound of the time of a step."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils.checkpoint
from typing_extensions import Self

from ... import _C
from ...descriptions import PeakRates
from ...fake.cuda.streams import Clock, StreamKey, listeners
from ...fake.higher_order import may_not_run
from ...internals.events import is_in_backward, place_of, users_frame
from ...memory.tracking import counting_flops
from ...reports.model import BoundingOperator, TimeBound
from ..collectives import Collective, Place
from ..current import Job, current
from ..engines import ignoring_compilers, is_in_compiled_code
from ..recorder import ModuleNames, place_here
from .work import Crossing, certain_flops, crossing_of, gpu_of, rate_of, traffic_of

__all__ = ["Event", "Finish", "Issue", "Recording", "Run", "Wait", "bound_time", "least_time", "why_unbounded"]


# ---- A lower bound of the time of a step on the described GPUs
#
# The bound holds for each run of the program on this model of GPU and network, if libraries do at least the work that
# is certain (`work.py`). It is the largest of:
#
# - the path of operators and collectives on streams (`least_time()`), where an operator takes the time of its
#   operations or of its memory traffic, and a collective the time of the bytes that must cross the links (`work.py`);
# - the work of one stream;
# - the bytes that enter or leave the GPU.
#
# In a program that calls `torch.compile()`, a compiler may fuse operators and may keep values instead of computing them
# again. There only the operations, without those of recomputed operators, and the traffic of the optimizer count. The
# same holds for programs with `torch.cond()`, because fakes run both branches, and with fused calls (`engines.py`).


# ---- The least time of a sequence of operators and collectives on streams
#
# An operator starts after the operators that were issued before it on its stream, and after the work that its stream
# waits for. A collective starts after the work of the stream on which it is called, and after the collectives that its
# group has started before. All durations are lower bounds, and so is the end of the last operator.
#
# Steps may overlap: a side stream can still run while the next step begins on the main stream. So only paths that begin
# and end on one stream bound the time between two steps. Work on another stream counts from where that stream waits for
# the first one. The longest path of a stream is the bound.


class Run(NamedTuple):
    """An operator, or a collective on the stream on which it is called.

    `position` is the number of operators issued on the stream, including it.
    """

    stream: StreamKey
    position: int
    seconds: float


class Wait(NamedTuple):
    """A stream waits for the work that `clock` counts."""

    stream: StreamKey
    clock: Clock


class Issue(NamedTuple):
    """A collective begins on its own stream. Those with the same `chain` run one after the other."""

    stream: StreamKey
    number: int
    seconds: float
    chain: str


class Finish(NamedTuple):
    """A stream waits for a collective."""

    stream: StreamKey
    number: int


Event: TypeAlias = Run | Wait | Issue | Finish

NEVER = float("-inf")


def least_time(events: Iterable[Event]) -> float:
    """Return the least time between two repetitions of the events, in seconds."""
    events = list(events)
    work: dict[StreamKey, float] = defaultdict(float)
    for event in events:
        if isinstance(event, Run):
            work[event.stream] += event.seconds
    return max((max(_path(events, stream), work[stream]) for stream in work), default=0.0)


def _path(events: Iterable[Event], first: StreamKey) -> float:
    """Return the length of the longest path that begins and ends on the stream `first`."""
    now: dict[StreamKey, float] = defaultdict(lambda: NEVER, {first: 0.0})
    ends: dict[StreamKey, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    chains: dict[str, float] = defaultdict(lambda: NEVER)
    finished: dict[int, float] = {}
    for event in events:
        stream = event.stream
        if isinstance(event, Run):
            now[stream] += event.seconds
            positions, times = ends[stream]
            positions.append(event.position)
            times.append(now[stream])
        elif isinstance(event, Wait):
            now[stream] = max([now[stream], *(_end(ends[other], count) for other, count in event.clock.items())])
        elif isinstance(event, Issue):
            finished[event.number] = max(now[stream], chains[event.chain]) + event.seconds
            chains[event.chain] = finished[event.number] if event.chain else NEVER
        else:
            now[stream] = max(now[stream], finished.get(event.number, NEVER))
    return now[first]


def _end(ends: tuple[list[int], list[float]], count: int) -> float:
    """Return the time at which the first `count` operators of a stream are done."""
    index = bisect_right(ends[0], count) - 1
    return ends[1][index] if index >= 0 else NEVER


# ---- The operators and collectives of a step


MOST_OPERATORS = 10


def bound_time(step: Callable[[], object]) -> TimeBound:
    """Run a step in a block of `world()`, and return a lower bound of its time on the GPUs of the world.

    Args:
        step: Makes one step. It has to be like the steps before it, so call it once before, to allocate gradients and
            optimizer states.

    Raises:
        RuntimeError: No block of `world()` is open.
        ValueError: The world has no GPUs, or their rates are unknown: describe them with `FakeGPU(rates=...)`.
    """
    job = current()
    if job is None:
        raise RuntimeError("A bound of time needs the GPUs of a world: call bound_time() in a block of world().")
    reason = why_unbounded(job)
    if reason:
        raise ValueError(f"The time has no bound: {reason}.")
    with Recording(job) as recording:
        step()
    bound = recording.bound()
    assert bound is not None
    return bound


def why_unbounded(job: Job) -> str:
    """Return why a job has no bound of time, or an empty string."""
    if job.gpu is None:
        return "the job has no GPUs"
    if job.gpu.rates is None:
        return f"the rates of {job.gpu.name!r} are unknown, so give them with FakeGPU(rates=...) or --rates"
    return ""


class _Label(NamedTuple):
    operator: str
    place: Place
    line: str


@dataclass(slots=True)
class _Operator:
    """The least time of one operator or collective, in seconds.

    Attributes:
        event: The number of its event.
        label: Its place.
        compute: The time of its certain operations.
        by_data_sheet: The time of the operations that PyTorch counts, by the data sheet; 0 if `torch.utils.checkpoint`
            repeats them.
        memory: The time of its memory traffic.
        network: The time of its communication.
        is_eager: Whether no compiler can remove its memory traffic.
        is_again: Whether a backward pass may compute values again with it.
    """

    event: int
    label: _Label
    compute: float = 0.0
    by_data_sheet: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    is_eager: bool = True
    is_again: bool = False

    def compiled(self) -> _Operator:
        """Return the work that remains if a compiler may fuse operators and keep values."""
        return replace(
            self, compute=0.0 if self.is_again else self.compute, memory=self.memory if self.is_eager else 0.0
        )

    def limit(self) -> tuple[float, str]:
        """Return the least time and its reason."""
        return max((self.compute, "compute"), (self.memory, "memory"), (self.network, "network"))


class Recording:
    """Records the operators and collectives of a step in its block, as a listener of `Recorder`.

    Args:
        job: The open world.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rates = PeakRates() if job.gpu is None or job.gpu.rates is None else job.gpu.rates
        self._cache = 0 if job.gpu is None else job.gpu.l2_cache
        self._is_bounded = not why_unbounded(job)
        self._counter = counting_flops(self._note_operator if self._is_bounded else None)
        self._names = ModuleNames()
        self._events: list[Event] = []
        self._operators: list[_Operator] = []
        self._crossings: list[Crossing] = []
        self._labels: dict[int, _Label] = {}  # by the sequence number of the node that computes the gradient
        self._skipped: set[int] = set()  # the sequence numbers of operators that a real program may skip
        self._block = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as block:
            if self._is_bounded:
                block.callback(setattr, self._job.recorder, "listener", self._job.recorder.listener)
                self._job.recorder.listener = self
                listeners.append(self._note_wait)
                block.callback(listeners.remove, self._note_wait)
            if self._job.has_compiled:
                block.enter_context(ignoring_compilers())
            block.enter_context(self._counter)
            self._block = block.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.close()

    @property
    def flops(self) -> int:
        """The number of operations that PyTorch counts."""
        return int(self._counter.get_total_flops())

    # ---- Recording

    def issue(self, number: int, collective: Collective) -> None:
        """Record the call of a collective."""
        device = torch.device(collective.device)
        if device.type != "cuda" or device.index is None:
            return
        crossing = crossing_of(collective, self._job.rank, self._job.per_node)
        stream, seconds = (device.index, collective.stream), crossing.seconds(self._rates)
        self._crossings.append(crossing)
        label = _Label(collective.operator, collective.issued_in, collective.line)
        self._operators.append(_Operator(len(self._events), label, network=seconds))
        if collective.is_async:
            chain = "" if collective.operator.startswith(("send", "recv")) else f"{collective.group}{collective.ranks}"
            self._events.append(Issue(stream, number, seconds, chain))
        else:
            self._events.append(Run(stream, _C.work_on_fake_stream(*stream), seconds))

    def finish(self, number: int) -> None:
        """Record that the current stream waits for a collective."""
        index = torch.cuda.current_device()
        self._events.append(Finish((index, _C.current_fake_stream(index)), number))

    def _note_wait(self, stream: StreamKey, clock: Clock) -> None:
        self._events.append(Wait(stream, dict(clock)))

    def _note_operator(
        self, packet: Any, counted: int, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        device = gpu_of((out, args, kwargs))
        if device is None or self._may_not_run():
            return
        rate = rate_of(packet, args, self._rates) if counted else 0.0
        flops = certain_flops(packet, counted, out, args, kwargs) if rate else 0
        beyond_cache = [max(count - self._cache, 0) for count in traffic_of(packet, out, args, kwargs)]
        if not (counted or any(beyond_cache)):
            return
        label = self._label(packet)
        one = _Operator(len(self._events), label)
        one.is_again = torch.is_grad_enabled() and is_in_backward()
        if rate:
            one.compute, one.by_data_sheet = flops / rate / self._rates.boost, counted / rate
        if one.is_again and _is_in_checkpoint():
            one.by_data_sheet = 0.0
        one.memory = sum(beyond_cache) / self._rates.memory
        one.is_eager = label.place.phase == "optimizer" and not is_in_compiled_code.get()
        self._operators.append(one)
        stream = (device, _C.current_fake_stream(device))
        self._events.append(Run(stream, _C.work_on_fake_stream(*stream), 0.0))

    def _may_not_run(self) -> bool:
        """Return true for an operator, or the gradient of one, in a branch or a loop that a real program may skip."""
        node = torch._C._current_autograd_node()
        if not may_not_run.get():
            return node is not None and node._sequence_nr() in self._skipped
        self._skipped.add(torch._C._autograd._get_sequence_nr() - 1)
        return True

    def _label(self, packet: Any) -> _Label:
        """Return the place of the running operator. Gradients have the place of the operator that they belong to."""
        node = torch._C._current_autograd_node()
        forward = None if node is None else self._labels.get(node._sequence_nr())
        if forward is not None and not torch.is_grad_enabled():
            return _Label(packet.__name__, replace(forward.place, phase="backward"), forward.line)
        label = _Label(packet.__name__, place_here(self._names), place_of(users_frame()))
        if torch.is_grad_enabled():
            self._labels[torch._C._autograd._get_sequence_nr() - 1] = label
        return label

    # ---- The result

    def bound(self) -> TimeBound | None:
        """Return the bound of the recorded operators and collectives; None if the rates of the GPUs are unknown."""
        if not self._is_bounded:
            return None
        is_compiled = self._job.has_compiled
        has_less = is_compiled or self._skipped
        operators = [one.compiled() for one in self._operators] if has_less else self._operators
        network = self._network()
        seconds = max(self._least_time(operators), network)
        alone = self._least_time([replace(one, network=0.0) for one in operators])
        utilization = sum(one.by_data_sheet for one in operators) / seconds if seconds else 0.0
        return TimeBound(
            seconds=seconds,
            compute=sum(one.compute for one in operators),
            memory=sum(one.memory for one in operators),
            network=network,
            not_overlapped=seconds - alone,
            utilization=utilization if 0 < utilization <= 1 else None,
            flops=self.flops,
            is_compiled=is_compiled,
            rates=self._rates,
            operators=_largest(operators),
        )

    def _least_time(self, operators: list[_Operator]) -> float:
        events = list(self._events)
        for one in operators:
            event = events[one.event]
            assert isinstance(event, Run | Issue)
            events[one.event] = event._replace(seconds=one.limit()[0])
        return least_time(events)

    def _network(self) -> float:
        """Return the least time in which all bytes enter and leave the GPU."""
        if not self._crossings:
            return 0.0
        received, sent, far_received, far_sent, spans = map(sum, zip(*self._crossings, strict=True))
        return Crossing(received, sent, far_received, far_sent, bool(spans)).seconds(self._rates)


def _is_in_checkpoint() -> bool:
    """Return true if `torch.utils.checkpoint` repeats a forward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def _largest(operators: list[_Operator]) -> tuple[BoundingOperator, ...]:
    """Return the operators with the largest times, summed over modules with the same structure."""
    seconds: defaultdict[tuple[str, str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for one in operators:
        time, reason = one.limit()
        if time:
            place = one.label.place
            module = str(replace(place, module=re.sub(r"(?<![^.])\d+(?![^.])", "*", place.module)))
            key = (one.label.operator, module, one.label.line, reason)
            seconds[key] += time
            calls[key] += 1
    return tuple(
        BoundingOperator(operator, module, line, calls[key], time, reason)
        for key, time in sorted(seconds.items(), key=lambda item: -item[1])[:MOST_OPERATORS]
        for operator, module, line, reason in [key]
    )
