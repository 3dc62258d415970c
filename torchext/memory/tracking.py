"""Tracking memory, and counting floating-point operations, while a program runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, bmm_flop, mm_flop
from torch.utils.weak import TensorWeakRef

from .. import _C
from ..fake.addresses import showing_addresses
from ..fake.cuda import devices
from ..internals.events import Listener, subscribe
from ..internals.held_tensors import parts_of
from . import timeline
from .timeline import PINNED, Action, Allocation, Category, MemoryState, Phase, Timeline, save_snapshot, summed

__all__ = ["Observer", "TrackedMemory", "counting_flops", "track_memory"]


# ---- Which module or optimizer runs, and the parameters, gradients and optimizer state
#
# The observer reports these to the core while a tracker is open.


OPTIMIZER_SCOPE = "optimizer step"


class _Thread(threading.local):
    """The scopes of a thread outside of each module, and each optimizer step, that it is in."""

    def __init__(self) -> None:
        self.scopes: list[tuple[int, int, bool]] = []


class Observer(Listener):
    """Observe the modules and optimizers of all threads.

    Attributes:
        scopes: The names of the modules that have run, by their numbers in the core.
        owners: The names of parameters, gradients and optimizer state, by the number of the allocation.
    """

    def __init__(self, trace_lines: bool) -> None:
        self.scopes: list[str] = []
        self.owners: dict[int, str] = {}
        self._trace_lines = trace_lines
        self._numbers: dict[str, int] = {}
        self._thread = _Thread()
        # By `id()`. The references are weak, so that the program can free the objects.
        self._names: dict[int, tuple[str, ReferenceType[torch.nn.Module]]] = {}
        self._parameters: dict[int, tuple[str, TensorWeakRef]] = {}

    def begin(self) -> None:
        """Begin to observe."""
        self._subscription = subscribe(self)
        self._outer = _C.set_memory_scope(-1, Phase.OTHER, self._trace_lines)

    def end(self) -> None:
        """End to observe, and restore the scope of the thread, which a step that raised may not have restored."""
        self._subscription.close()
        self.mark_gradients()
        _C.set_memory_scope(*self._outer)

    def mark_gradients(self) -> None:
        """Mark the gradients that the known parameters have now."""
        for name, reference in list(self._parameters.values()):
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                self._mark(gradient, Category.GRADIENT, f"{name}.grad")

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        """Set the scope to a module, whose parameters become known."""
        name = self._name_of(module)
        if name is None:
            name = self._learn(module)
        elif not self._thread.scopes:
            self._mark_parameters(module, name)
        scope = _C.set_memory_scope(self._number(name), Phase.FORWARD, self._trace_lines, id(module))
        self._thread.scopes.append(scope)

    def leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Restore the scope."""
        # A sharded module has gathered its parameters now.
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._mark(parameter, Category.PARAMETER, f"{self._name_of(module) or ''}.{name}")
        if self._thread.scopes:
            _C.set_memory_scope(*self._thread.scopes.pop())

    def _learn(self, root: torch.nn.Module) -> str:
        """Name `root` and its modules, and mark their tensors."""
        root_name = type(root).__name__
        for name, module in root.named_modules():
            if self._name_of(module) is None:
                self._names[id(module)] = (f"{root_name}.{name}" if name else root_name, ref(module))
        self._mark_parameters(root, root_name)
        return root_name

    def _name_of(self, module: torch.nn.Module) -> str | None:
        name, reference = self._names.get(id(module), (None, None))
        return name if reference is not None and reference() is module else None

    def _owner_of(self, parameter: torch.Tensor) -> str | None:
        name, reference = self._parameters.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None

    def _mark_parameters(self, root: torch.nn.Module, prefix: str) -> None:
        for name, parameter in root.named_parameters():
            self._parameters[id(parameter)] = (f"{prefix}.{name}", TensorWeakRef(parameter))
            self._mark(parameter, Category.PARAMETER, f"{prefix}.{name}")
        for name, buffer in root.named_buffers():
            self._mark(buffer, Category.PARAMETER, f"{prefix}.{name}")
        self.mark_gradients()

    def begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Set the scope to the optimizer, and mark its parameters and their gradients."""
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                owner = self._owner_of(parameter)
                if owner is None:
                    owner = f"parameter {i}"
                    self._parameters[id(parameter)] = (owner, TensorWeakRef(parameter))
                self._mark(parameter, Category.PARAMETER, owner)
        self.mark_gradients()
        self._thread.scopes.append(
            _C.set_memory_scope(self._number(OPTIMIZER_SCOPE), Phase.OPTIMIZER, self._trace_lines)
        )

    def end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the scope, and mark the state of the optimizer."""
        if self._thread.scopes:
            _C.set_memory_scope(*self._thread.scopes.pop())
        for parameter, state in optimizer.state.items():
            owner = self._owner_of(parameter) or "parameter"
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._mark(value, Category.OPTIMIZER_STATE, f"{owner}.{key}")

    def _mark(self, tensor: torch.Tensor, category: Category, owner: str) -> None:
        members = list(parts_of(tensor))
        _C.mark_memory(members, category)
        for member in members:
            number = _C.memory_number(member)
            if number >= 0:
                self.owners[number] = owner

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.scopes)
            self.scopes.append(name)
        return number


# ---- Tracked memory


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
        return timeline.report(peak, reserved, self.allocations(peak.device), largest)

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
        timeline.plot(
            path,
            self.timeline(peak.device, POINTS if path.suffix == ".html" else POINTS_OF_FIGURES),
            peak,
            lambda events: self._allocations(peak.device, events, timeline.LARGEST),
        )

    def curve(self, device: torch.device | str | None = None) -> dict[str, Any]:
        """Return the data of the HTML report of `plot()` as builtin types, for JSON.

        Raises:
            ValueError: Nothing was allocated on `device`.
        """
        peak = self.peak_allocated(device)
        states = self.timeline(peak.device, POINTS)
        return timeline.curve_of(states, peak, lambda events: self._allocations(peak.device, events, timeline.LARGEST))

    def save_snapshot(self, path: str | Path) -> None:
        """Save a pickle of all CUDA devices for PyTorch's memory viewer (pytorch.org/memory_viz)."""
        segments = devices.segments()
        save_snapshot(Path(path), self._actions(), segments)

    def __str__(self) -> str:
        return self.report() if self.places else repr(self)

    def __repr__(self) -> str:
        peaks = (
            f"{name}: {timeline.in_units(self.peak_allocated(name).allocated)} allocated and "
            f"{timeline.in_units(self.peak_reserved(name).reserved)} reserved at the peak"
            for name in self.places
        )
        return f"TrackedMemory({', '.join(peaks) or 'no allocations'})"

    def _repr_html_(self) -> str:
        if not self.places:
            return ""
        peak = self.peak_allocated()
        return timeline.html_report(peak, self.peak_reserved().reserved, self.allocations(peak.device))

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

    def _actions(self) -> Iterator[Action]:
        timeline = self._timeline
        rows, (changes, _, times) = timeline.allocations, timeline.events
        for event in range(self._begin, self._last()):
            number = max(changes[event], ~changes[event])
            if rows.place[number] >= 0:
                yield Action(
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
    devices = TrackedMemory(timeline, observer)
    try:
        with showing_addresses(), nullcontext() if _C.are_factories_fake() else _real_allocations():
            observer.begin()
            try:
                yield devices
            finally:
                observer.end()
                devices._end = timeline.count_events()
    finally:
        _C.close_memory_tracker()


@contextmanager
def _real_allocations() -> Iterator[None]:
    _C.enter_real_allocations()
    try:
        yield
    finally:
        _C.leave_real_allocations()


# ---- The floating-point operations of this rank, counted by PyTorch's `FlopCounterMode`


def _with_addend(formula: Callable[..., int]) -> Callable[..., int]:
    def flops(addend: Any, a: Any, b: Any, *dtype: Any, **kwargs: Any) -> int:
        return formula(a, b)

    return flops


def _bmm_flop(a: Any, b: Any, *dtype: Any, **kwargs: Any) -> int:
    return int(bmm_flop(a, b))


# PyTorch's formulas do not accept the overloads with the dtype of the result.
FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.addmm: _with_addend(mm_flop),
    torch.ops.aten.bmm: _bmm_flop,
    torch.ops.aten.baddbmm: _with_addend(_bmm_flop),
}


class _NoModules:
    """Replaces `FlopCounterMode.mod_tracker`, which fails for some calls of `torch.autograd.grad()`.

    Reports need only totals.
    """

    parents = ("Global",)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


OnOperator = Callable[[Any, int, Any, tuple[Any, ...], dict[str, Any]], None]


class _Counter(FlopCounterMode):
    """Counts operators of plain tensors, and calls `on_operator` for each."""

    def __init__(self, on_operator: OnOperator | None) -> None:
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._on_operator = on_operator

    def __enter__(self) -> _Counter:
        self.flop_counts.clear()
        self.mode = _OfPlainTensors(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        totals = self.flop_counts["Global"]
        before = totals[func_packet]
        super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        if self._on_operator is not None:
            self._on_operator(func_packet, totals[func_packet] - before, out, args, kwargs)
        return out


class _OfPlainTensors(_FlopCounterMode):
    """Leaves subclasses, such as DTensor, to their own dispatch, which calls operators on the shard of this rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = [one for one in types if one.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl]
        if any(issubclass(one, FakeTensor) for one in others):  # DTensor propagates shapes with them
            return func(*args, **(kwargs or {}))
        if others:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def counting_flops(on_operator: OnOperator | None = None) -> FlopCounterMode:
    """Return a mode that counts the operations of the operators in its block.

    Args:
        on_operator: Called after each operator, with the operator, its number of operations, its result, and its
            arguments.
    """
    return _Counter(on_operator)
