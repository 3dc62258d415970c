"""Tracking memory while a program runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from .. import _C
from ..fake.addresses import showing_addresses
from . import plots, reports, snapshots
from .categories import Category, Phase
from .observing import Observer
from .states import Allocation, MemoryState, summed

__all__ = ["PINNED", "TrackedMemory", "track_memory"]

PINNED = "pinned"  # names pinned memory of the host where a device may be given
POINTS = 1200  # of the curve in a page
POINTS_OF_PICTURES = 250


class TrackedMemory:
    """What `track_memory()` has collected. Stays readable after the block.

    Where a `device` may be given, the default is `cuda:0` or, if nothing was allocated there, the first on which
    something was; `cpu` is pageable memory of the host, and `pinned` pinned memory. Where a moment may be given, as
    `at`, it is the number of an event (`MemoryState.event`), and the default is the moment of the most allocated bytes.
    """

    def __init__(self, timeline: _C.MemoryTimeline, observer: Observer) -> None:
        self._timeline = timeline
        self._observer = observer
        self._begin = timeline.count_events()
        self._end: int | None = None
        self._first_time: int | None = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which something was allocated. The CPU counts if that was pageable memory."""
        return [torch.device(name) for name in self.places if name != PINNED]

    @property
    def places(self) -> list[str]:
        """The names of the devices, and `pinned` if pinned memory was allocated."""
        return self._timeline.devices()

    def peak(self, device: torch.device | str | None = None, *, of_reserved: bool = False) -> MemoryState:
        """Returns the state with the most allocated (or reserved) bytes.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        return self._state(name, self._timeline.peak(name, self._begin, self._last(), of_reserved))

    def at(self, event: int, device: torch.device | str | None = None) -> MemoryState:
        """Returns the state after an event.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        return self._state(name, self._timeline.after(name, self._begin + event))

    def now(self, device: torch.device | str | None = None) -> MemoryState:
        """Returns the state after the last event.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        if self._end is None:
            self._observer.mark_gradients()  # those that parameters have now
        return self.at(self._last() - self._begin - 1, device)

    def timeline(self, device: torch.device | str | None = None, count: int = 1000) -> list[MemoryState]:
        """Returns about `count` states in the order of time: of each stretch of events the one with the most bytes.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        return [self._state(name, point) for point in self._timeline.curve(name, self._begin, self._last(), count)]

    def allocations(self, device: torch.device | str | None = None, *, at: int | None = None) -> list[Allocation]:
        """Returns what was alive at a moment, the largest first.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        name = self._device(device)
        event = self.peak(name).event if at is None else at
        alive = [self._allocation(record) for record in self._timeline.alive(name, self._begin + event)]
        return sorted(alive, key=lambda allocation: -allocation.size)

    def by_module(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Returns the bytes that each module held at a moment, the most first."""
        return summed(self.allocations(device, at=at), lambda allocation: allocation.holder)

    def by_operator(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Returns the bytes that each operator had made of what was held at a moment, the most first."""
        return summed(self.allocations(device, at=at), lambda allocation: allocation.operator)

    def by_line(self, device: torch.device | str | None = None, *, at: int | None = None) -> dict[str, int]:
        """Returns the bytes that each line of the program held at a moment, the most first.

        Raises:
            ValueError: Lines are not tracked.
        """
        allocations = self.allocations(device, at=at)
        if not any(allocation.line for allocation in allocations):
            raise ValueError("Lines are tracked by track_memory(lines=True) only.")
        return summed(allocations, lambda allocation: allocation.line)

    def report(self, device: torch.device | str | None = None, *, largest: int = 10) -> str:
        """Returns a table: the peak by category, the modules and the largest tensors at that moment."""
        peak = self.peak(device)
        reserved = self.peak(device, of_reserved=True).reserved
        return reports.report(peak, reserved, self.allocations(peak.device), largest)

    def plot(self, path: str | Path, device: torch.device | str | None = None) -> None:
        """Draws the memory over time, by category.

        Args:
            path: A file that ends with `.html`, which is self-contained and interactive, or with `.svg` or `.png`,
                which need matplotlib.
            device: Of which device.

        Raises:
            ValueError: The file ends otherwise, or nothing was allocated on `device`.
            ImportError: There is no matplotlib.
        """
        peak = self.peak(device)
        path = Path(path)
        plots.plot(
            path,
            self.timeline(peak.device, POINTS if path.suffix == ".html" else POINTS_OF_PICTURES),
            peak,
            lambda event: self.allocations(peak.device, at=event),
        )

    def save_snapshot(self, path: str | Path) -> None:
        """Saves a pickle that PyTorch's viewer of memory opens (pytorch.org/memory_viz), with all devices of CUDA."""
        segments = _C.cuda_memory_segments() if _C.fake_cuda_devices() else []
        snapshots.save(Path(path), self._actions(), segments)

    def __str__(self) -> str:
        return self.report()

    def _actions(self) -> Iterator[snapshots.Action]:
        for number, is_birth, _, time in self._timeline.events(self._begin, self._last()):
            name = self._timeline.device(number)
            if name.startswith("cuda"):
                device = torch.device(name)
                record = self._timeline.record(number)
                address, stream = record[9:11]
                yield snapshots.Action(device.index, is_birth, address, stream, time, self._allocation(record))

    def _device(self, device: torch.device | str | None) -> str:
        known = self._timeline.devices()
        if device is None:
            if not known:
                raise ValueError("Nothing has been allocated while memory was tracked.")
            return max(known, key=self._importance)
        name = str(device)
        if name == "cuda":
            name = "cuda:0"
        if name not in known:
            raise ValueError(f"Nothing has been allocated on {name!r}, only on {', '.join(known) or 'no device'}.")
        return name

    def _importance(self, device: str) -> tuple[bool, int]:
        """Which device is meant if none is named: the one with the highest peak, and the CPU only where it is alone."""
        peak = self._timeline.peak(device, self._begin, self._last(), False)
        return not device.startswith(("cpu", PINNED)), peak[2]

    def _last(self) -> int:
        return self._timeline.count_events() if self._end is None else self._end

    def _state(self, device: str, point: _C.MemoryPoint) -> MemoryState:
        event, time, allocated, reserved, categories = point
        if self._first_time is None:
            first = self._timeline.events(self._begin, self._begin + 1)
            self._first_time = first[0][3] if first else time
        return MemoryState(
            device=device,
            event=max(event - self._begin, -1),
            seconds=max(time - self._first_time, 0) / 1e9,
            allocated=allocated,
            reserved=reserved,
            by_category={category: categories[category] for category in Category},
        )

    def _allocation(self, record: _C.MemoryRecord) -> Allocation:
        number, requested, size, operator, scope, line, _, phase, category, _, _, born, died = record
        return Allocation(
            size=size,
            requested=requested,
            category=Category(category),
            phase=Phase(phase),
            operator=operator,
            module=self._observer.scopes[scope] if 0 <= scope < len(self._observer.scopes) else "",
            line=line,
            owner=self._observer.owners.get(number, ""),
            born=max(born - self._begin, -1),
            died=died - self._begin if died >= 0 else -1,
        )


@contextmanager
def track_memory(*, lines: bool = False) -> Iterator[TrackedMemory]:
    """Tracks the memory of tensors in the block: how much, when, what for, and who holds it.

    Fake tensors are tracked on the CPU and on CUDA devices, on fake ones as PyTorch's caching allocator would serve
    them. A block that is entered outside of `fake_mode()` tracks real tensors on the CPU, too, for which PyTorch's
    profiler must not run on the thread. What fakes on CUDA have allocated before the block is counted from its
    beginning; of other tensors from before it, the parameters of modules that run in the block.

    Args:
        lines: Also keep the line of the program that made each tensor. Takes longer.

    Yields:
        What has been collected so far; it stays readable after the block.

    Example:
        >>> with fake_mode(gpu=FakeGPU("H100-80GB")), track_memory() as memory:
        ...     layer = torch.nn.Linear(1024, 1024, device="cuda")
        >>> memory.peak().allocated
        4198400
    """
    timeline = _C.open_memory_tracker()
    observer = Observer(lines)
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
