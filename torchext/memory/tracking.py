"""Tracking memory while a program runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .. import _C
from ..fake.addresses import showing_addresses
from ..fake.cuda import memory
from ..internals.arguments import renamed_keywords, warn_deprecated
from . import plots, reports, snapshots
from .observing import Observer
from .timeline import PINNED, Allocation, Category, MemoryState, Phase, Timeline, summed

__all__ = ["TrackedMemory", "track_memory"]

POINTS = 1200  # of the curve in an HTML report
POINTS_OF_FIGURES = 250


class TrackedMemory:
    """The memory that `track_memory()` has recorded. Stays readable after the block.

    The default `device` is the GPU with the highest peak of allocated bytes or, if nothing was allocated on GPUs, the
    place of the host with the highest one: `cpu` is its pageable memory, and `pinned` is its pinned memory. A moment,
    `at`, is the number of an event (`MemoryState.event`); the default is the peak of the allocated bytes.

    Inside the block, the first query after an event takes time that is linear in the number of all events.
    """

    def __init__(self, timeline: _C.MemoryTimeline, observer: Observer) -> None:
        self._recorder = timeline
        self._observer = observer
        self._begin = timeline.count_events()
        self._end: int | None = None
        self._copy: Timeline | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices with allocations. The CPU is one of them if pageable memory was allocated."""
        return [torch.device(name) for name in self.places if name != PINNED]

    @property
    def places(self) -> list[str]:
        """The names of the devices, and `pinned` if pinned memory was allocated."""
        return list(self._timeline.places)

    def peak_allocated(self, device: torch.device | str | None = None) -> MemoryState:
        """Return the state with the most allocated bytes.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        return self._peak(device, of_reserved=False)

    def peak_reserved(self, device: torch.device | str | None = None) -> MemoryState:
        """Return the state with the most reserved bytes.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        return self._peak(device, of_reserved=True)

    def peak(self, device: torch.device | str | None = None, *, of_reserved: bool = False) -> MemoryState:
        """Deprecated: use `peak_allocated()` or `peak_reserved()`."""
        warn_deprecated("TrackedMemory.peak()", "peak_reserved()" if of_reserved else "peak_allocated()")
        return self._peak(device, of_reserved)

    def _peak(self, device: torch.device | str | None, of_reserved: bool) -> MemoryState:
        name = self._device(device)
        history = self._timeline.history(name)
        bytes_in = history.reserved if of_reserved else history.allocated
        (state,) = self._states(name, [history.peak(self._begin, self._last(), bytes_in)])
        return state

    def at(self, event: int, device: torch.device | str | None = None) -> MemoryState:
        """Return the state after an event.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        (state,) = self._states(name, [self._timeline.history(name).after(self._begin + event)])
        return state

    def now(self, device: torch.device | str | None = None) -> MemoryState:
        """Return the state after the last event.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        if self._end is None:
            self._observer.mark_gradients()  # those that parameters have now
        return self.at(self._last() - self._begin - 1, device)

    def timeline(self, device: torch.device | str | None = None, count: int = 1000) -> list[MemoryState]:
        """Return about `count` states in order of time. Each has the most bytes of a section of the events.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        return self._states(name, self._timeline.history(name).curve(self._begin, self._last(), count))

    def allocations(self, device: torch.device | str | None = None, *, at: int | None = None) -> list[Allocation]:
        """Return the allocations alive at a moment, the largest first.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        event = self.peak_allocated(name).event if at is None else at
        (allocations,) = self._allocations(name, [event])
        return allocations

    def by_module(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Return the bytes that each module held at a moment, the largest number first."""
        return summed(self.allocations(device, at=at), lambda allocation: allocation.holder)

    def by_operator(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Return the bytes alive at a moment by the operator that allocated them, the largest number first."""
        return summed(self.allocations(device, at=at), lambda allocation: allocation.operator)

    def by_line(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Return the bytes alive at a moment by the source line that allocated them, the largest number first.

        Raises:
            ValueError: Source lines are not recorded.
        """
        allocations = self.allocations(device, at=at)
        if not any(allocation.line for allocation in allocations):
            raise ValueError("Source lines are recorded only with track_memory(trace=True).")
        return summed(allocations, lambda allocation: allocation.line)

    def peak_by_line(self, device: torch.device | str | None = None) -> dict[str, int]:
        """Return the most bytes that each source line held at any moment, the largest number first.

        Lines have their peaks at different moments. Unlike those of `by_line()`, these numbers do not change because
        the peak of the program moves to another moment. Empty without `track_memory(trace=True)`.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        history = self._timeline.history(self._device(device))
        lines = self._timeline.lines
        peaks = {lines[line]: nbytes for line, nbytes in history.peak_of_lines(self._begin, self._last()).items()}
        peaks.pop("", None)  # allocations outside of traced lines
        return dict(sorted(peaks.items(), key=lambda item: (-item[1], item[0])))

    def report(self, device: torch.device | str | None = None, *, largest: int = 10) -> str:
        """Return a table: the peak by category, the modules and the largest tensors at that moment."""
        peak = self.peak_allocated(device)
        reserved = self.peak_reserved(device).reserved
        return reports.report(peak, reserved, self.allocations(peak.device), largest)

    def plot(self, path: str | Path, device: torch.device | str | None = None) -> None:
        """Plot the memory over time, by category.

        Args:
            path: The file. `.html` is a self-contained, interactive report; `.svg` and `.png` need matplotlib.
            device: The device.

        Raises:
            ValueError: The file has another suffix, or nothing was allocated on `device`.
            ImportError: matplotlib is not installed.
        """
        peak = self.peak_allocated(device)
        path = Path(path)
        plots.plot(
            path,
            self.timeline(peak.device, POINTS if path.suffix == ".html" else POINTS_OF_FIGURES),
            peak,
            lambda events: self._allocations(peak.device, events, plots.LARGEST),
        )

    def curve(self, device: torch.device | str | None = None) -> dict[str, Any]:
        """Return the data of the HTML report of `plot()` as builtin types, for JSON.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        peak = self.peak_allocated(device)
        states = self.timeline(peak.device, POINTS)
        return plots.curve_of(states, peak, lambda events: self._allocations(peak.device, events, plots.LARGEST))

    def save_snapshot(self, path: str | Path) -> None:
        """Save a pickle of all CUDA devices for PyTorch's memory viewer (pytorch.org/memory_viz)."""
        segments = memory.segments()
        snapshots.save(Path(path), self._actions(), segments)

    def __str__(self) -> str:
        return self.report() if self.places else repr(self)

    def __repr__(self) -> str:
        peaks = (
            f"{name}: {reports.in_units(self.peak_allocated(name).allocated)} allocated and "
            f"{reports.in_units(self.peak_reserved(name).reserved)} reserved at the peak"
            for name in self.places
        )
        return f"TrackedMemory({', '.join(peaks) or 'no allocations'})"

    def _repr_html_(self) -> str:
        if not self.places:
            return ""
        peak = self.peak_allocated()
        return reports.html_report(peak, self.peak_reserved().reserved, self.allocations(peak.device))

    def to_dict(self) -> dict[str, Any]:
        """Return the peaks of each device, and the bytes of each category and module at them, as plain values."""
        return {name: self._peaks(name) for name in self.places}

    def _peaks(self, device: str) -> dict[str, Any]:
        peak = self.peak_allocated(device)
        return {
            "peak_allocated": peak.allocated,
            "peak_reserved": self.peak_reserved(device).reserved,
            "by_category": {category.label: nbytes for category, nbytes in peak.by_category.items()},
            "by_module": self.by_module(device),
        }

    def _actions(self) -> Iterator[snapshots.Action]:
        timeline = self._timeline
        rows, (changes, _, times) = timeline.allocations, timeline.events
        for event in range(self._begin, self._last()):
            number = max(changes[event], ~changes[event])
            if rows.place[number] >= 0:
                yield snapshots.Action(
                    rows.place[number],
                    changes[event] >= 0,
                    rows.address[number],
                    rows.stream[number],
                    times[event],
                    self._allocation(timeline, number),
                )

    @property
    def _timeline(self) -> Timeline:
        """The records up to now."""
        if self._copy is None or self._copy.version != self._recorder.version():
            self._copy = Timeline(self._recorder)
        return self._copy

    def _device(self, device: torch.device | str | None) -> str:
        known = self.places
        if device is None:
            if not known:
                raise ValueError("Nothing was allocated while memory was tracked.")
            return max(known, key=self._importance)
        name = str(device)
        if name == "cuda":
            name = "cuda:0"
        if name not in known:
            raise ValueError(f"Nothing was allocated on {name!r}, only on {', '.join(known) or 'no device'}.")
        return name

    def _importance(self, device: str) -> tuple[bool, int]:
        """Return a key to sort devices by. The default is the highest peak; the CPU only if it is the only device."""
        history = self._timeline.history(device)
        peak = history.peak(self._begin, self._last(), history.allocated)
        return not device.startswith(("cpu", PINNED)), history.allocated[peak]

    def _last(self) -> int:
        return len(self._timeline.events.change) if self._end is None else self._end

    def _states(self, device: str, states: Iterable[int]) -> list[MemoryState]:
        timeline = self._timeline
        history = timeline.history(device)
        states = list(states)
        times = timeline.events.time
        first_time = times[self._begin] if self._begin < len(times) else history.times[-1]
        return [
            MemoryState(
                device=device,
                event=max(history.events[state] - self._begin, -1),
                seconds=max(history.times[state] - first_time, 0) / 1e9,
                allocated=history.allocated[state],
                reserved=history.reserved[state],
                by_category=dict(zip(Category, by_category, strict=True)),
            )
            for state, (by_category, _) in zip(states, history.replay(states), strict=True)
        ]

    def _allocations(self, device: str, events: list[int], count: int | None = None) -> Iterator[list[Allocation]]:
        """Return the `count` largest allocations that are alive after each event."""
        timeline = self._timeline
        for numbers in timeline.history(device).alive(self._begin + event for event in events):
            yield [self._allocation(timeline, number) for number in numbers[:count]]

    def _allocation(self, timeline: Timeline, number: int) -> Allocation:
        rows, scope = timeline.allocations, timeline.allocations.scope[number]
        return Allocation(
            size=rows.size[number],
            requested=rows.requested[number],
            category=Category(rows.category[number]),
            phase=Phase(rows.phase[number]),
            operator=timeline.operators[rows.operator[number]],
            module=self._observer.scopes[scope] if 0 <= scope < len(self._observer.scopes) else "",
            line=timeline.lines[rows.line[number]],
            owner=self._observer.owners.get(number, ""),
            born=max(rows.born[number] - self._begin, -1),
            died=rows.died[number] - self._begin if rows.died[number] >= 0 else -1,
        )


@renamed_keywords(lines="trace")
@contextmanager
def track_memory(*, trace: bool = False) -> Iterator[TrackedMemory]:
    """Record the memory of tensors in the block: how much, when, for which purpose, and which module holds it.

    Fake tensors are recorded on the CPU and on CUDA devices; on fake CUDA devices, as PyTorch's caching allocator
    allocates. A block outside of `fake_mode()` also records real tensors on the CPU. PyTorch's profiler must not run on
    the thread then. Earlier allocations of fake tensors on CUDA count from the beginning of the block. Of other earlier
    tensors, the parameters of modules that run in the block count.

    Args:
        trace: Also record the source line that made each tensor. Slower.

    Yields:
        The memory recorded so far. It stays readable after the block.

    Example:
        >>> with fake_mode(gpu="H100"), track_memory() as memory:
        ...     weight = torch.empty(1024, 1024, device="cuda")
        >>> memory.peak_allocated().allocated
        4194304
    """
    from ..fake.cuda import kernels  # noqa: F401  # its rules describe the allocations of kernels

    timeline = _C.open_memory_tracker()
    observer = Observer(trace)
    memory = TrackedMemory(timeline, observer)
    try:
        with showing_addresses(), nullcontext() if _C.are_factories_fake() else _real_allocations():
            observer.begin()
            try:
                yield memory
            finally:
                observer.end()
                memory._end = timeline.count_events()
    finally:
        _C.close_memory_tracker()


@contextmanager
def _real_allocations() -> Iterator[None]:
    _C.enter_real_allocations()
    try:
        yield
    finally:
        _C.leave_real_allocations()
