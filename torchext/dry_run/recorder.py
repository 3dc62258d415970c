"""Record the collectives of this rank when they are called: NOTE [Collectives], collectives.h."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.weak import TensorWeakRef

from .. import _C
from ..fake.cuda.streams import Clock, StreamKey, clock_of, is_put_off, listeners
from ..fake.values import assumes_values, note_exchange
from ..internals.dispatch_keys import without_our_keys
from ..internals.events import is_in_backward, place_of, users_frame
from ..internals.held_tensors import tensors_in
from ..internals.patching import Function
from .collectives import Collective, Place
from .current import current, while_rank_is_alone
from .messages import agreed_values
from .process_groups import check

__all__ = ["RECEIVED", "CollectiveListener", "ModuleNames", "Overlaps", "Recorder", "place_here"]


# ---- The operators that may run on a GPU while a collective runs
#
# A collective begins when the work that its stream waits for is done. It must be complete when the default stream, on
# which programs compute, waits for its stream, or when the caller waits for its handle (`Work.wait()`). Operators that
# are issued in between on the waiting stream may run at the same time. So FSDP overlaps the all-gather of a layer with
# the layer before, although the program calls and waits in one place.


DEFAULT = 0  # the number of the stream

OnOverlap = Callable[[int, int, tuple[Place, ...]], None]


@dataclass(frozen=True)
class _Running:
    """A collective that no other stream has waited for yet.

    Attributes:
        number: The number of the collective.
        begins_after: The work that is done when it begins.
        stream: The stream on which it was called.
        position: The number of operators issued on that stream, including it; None if it has a handle to wait for.
    """

    number: int
    begins_after: Clock
    stream: StreamKey
    position: int | None


class Overlaps:
    """Tracks collectives from the call to the wait.

    Args:
        on_overlap: Called when a stream waits for a collective, with its number, the number of operators that may run
            at the same time, and the places that issued them.
    """

    def __init__(self, on_overlap: OnOverlap) -> None:
        self._on_overlap = on_overlap
        self._running: dict[int, _Running] = {}
        # The places of the program, each with the number of operators that had been issued on the stream.
        self._places: dict[StreamKey, list[tuple[int, Place]]] = {}
        listeners.append(self._wait_by_event)

    def close(self) -> None:
        """Stop tracking."""
        listeners.remove(self._wait_by_event)

    def issue(self, number: int, collective: Collective) -> None:
        """Begin to track a collective that is called."""
        device = torch.device(collective.device)
        if device.type != "cuda" or device.index is None:
            return
        stream = (device.index, collective.stream)
        begins_after = clock_of(stream)
        for key in {stream, (device.index, DEFAULT)}:
            self._places.setdefault(key, []).append((_C.work_on_fake_stream(*key), collective.issued_in))
        if not collective.is_async and collective.stream == DEFAULT:
            return  # later operators of that stream run after it
        position = None
        if not collective.is_async:
            _C.count_work_on_fake_stream(device.index)
            position = _C.work_on_fake_stream(*stream)
        self._running[number] = _Running(number, begins_after, stream, position)

    def wait(self, number: int) -> None:
        """End a collective whose handle the program waits for."""
        running = self._running.get(number)
        if running is not None and running.position is None:
            index = running.stream[0]
            self._end(running, (index, _C.current_fake_stream(index)))

    def _wait_by_event(self, stream: StreamKey, clock: Clock) -> None:
        if stream[1] != DEFAULT:
            return
        for running in list(self._running.values()):
            if running.position is not None and clock.get(running.stream, 0) >= running.position:
                self._end(running, stream)

    def _end(self, running: _Running, stream: StreamKey) -> None:
        del self._running[running.number]
        begin = running.begins_after.get(stream, 0)
        operators = _C.work_on_fake_stream(*stream) - begin
        if operators > 0:
            self._on_overlap(running.number, operators, self._places_since(stream, begin))

    def _places_since(self, stream: StreamKey, begin: int) -> tuple[Place, ...]:
        """Return the places that issued operators on `stream` after the first `begin` operators."""
        marks = self._places.get(stream, [])
        found: dict[Place, None] = {}
        end = _C.work_on_fake_stream(*stream)
        for count, place in reversed(marks):
            if count < end:
                found[place] = None
            if count <= begin:
                break
            end = min(end, count)
        return tuple(reversed(found))


# ---- Records of collectives


Work: Any = torch._C._distributed_c10d.Work
FakeWork: Any = torch._C._distributed_c10d.FakeWork
ProcessGroup: Any = dist.ProcessGroup

# The arguments that a collective reads and writes, by their names in the schemas of c10d. Others are read and written.
GIVEN = ("input_tensor", "input_tensors", "input_list", "inputs", "input")
RECEIVED = ("output_tensor", "output_tensors", "output_lists", "outputs", "output")


class CollectiveListener(Protocol):
    """Follows the collectives from the call to the wait."""

    def issue(self, number: int, collective: Collective) -> None:
        """Note that a collective is called."""

    def finish(self, number: int) -> None:
        """Note that the program waits for a collective on the current stream."""


class Recorder:
    """Records collectives.

    Args:
        traces_lines: Whether to record the source line of each call.

    Attributes:
        collectives: The records so far.
        listener: Follows collectives; None by default.
    """

    def __init__(self, traces_lines: bool) -> None:
        self.collectives: list[Collective] = []
        self.listener: CollectiveListener | None = None
        self._traces_lines = traces_lines
        self._names = ModuleNames()
        self._by_work: dict[Any, int] = {}
        self._results: dict[Any, list[TensorWeakRef]] = {}
        self._by_storage: dict[int, int] = {}
        self._deliveries: dict[Any, Callable[[], None]] = {}
        self._overlaps = Overlaps(self._mark_overlap)

    def close(self) -> None:
        """Stop recording overlaps."""
        self._overlaps.close()

    def observe(self, name: str, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], object] | None:
        """Record a collective before it runs. Return a function to call with its results, or None."""
        with without_our_keys():
            if name == "_c10d_functional::wait_tensor":
                self._wait_for_tensor(values[0])
                return None
            return self._record(name, values)

    def deliver(self, work: Any) -> None:
        """Write the values that `work` receives from another rank, unless they have been written."""
        deliver = self._deliveries.pop(work, None)
        if deliver is not None:
            deliver()

    def waited(self, work: Any) -> None:
        """Record that the program waits for `work`, after delivering the values that it receives."""
        self.deliver(work)
        self._results.pop(work, None)
        number = self._by_work.pop(work, None)
        if number is not None:
            self._finish(number)

    def results_of(self, work: Any) -> list[Tensor] | None:
        """Return the tensors that the collective writes, as the future of a real backend does; None if unknown."""
        found = [reference() for reference in self._results.get(work, [])]
        alive = [tensor for tensor in found if tensor is not None]
        return alive if alive and len(alive) == len(found) else None

    def _record(self, name: str, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], object] | None:
        operator = name.partition("::")[2]
        arguments = dict(zip(_parameters(name), values, strict=True))
        group = ProcessGroup.unbox(arguments.pop("process_group"))
        tensors = [t for value in arguments.values() for t in tensors_in(value)]
        if operator not in ("barrier", "monitored_barrier_"):
            check(operator, arguments, group)
        number = len(self.collectives)
        made = self._describe(operator, arguments, group, tensors)
        self.collectives.append(made)
        is_put_off(partial(self.collectives.append, made))
        self._overlaps.issue(number, made)
        if self.listener is not None:
            self.listener.issue(number, made)
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._by_storage[tensor.untyped_storage()._cdata] = number
        world = current()
        messages = None if world is None else world.messages
        deliver = None if messages is None else messages.observe(operator, arguments, group)
        agreed = agreed_values(operator, arguments, group.size(), group.rank()) if assumes_values() else []
        kind = _C.kind_of_values(tensors) if agreed else 0
        if operator.startswith("alltoall") and tensors and not tensors[0].dtype.is_floating_point:
            note_exchange(str(group.group_name))

        def on_return(results: tuple[Any, ...]) -> None:
            for written, value in agreed:
                _C.assume_value(written, value, kind)
            if results and isinstance(results[-1], torch.ScriptObject):
                work = Work.unbox(results[-1])
                self._by_work[work] = number
                if deliver is not None:
                    self._deliveries[work] = deliver
                if world is not None and world.is_real:
                    self.deliver(work)  # PyTorch's C++ also waits for collectives, and reads the values
                received = [t for name in RECEIVED for t in tensors_in(arguments.get(name))] or tensors
                self._results[work] = [TensorWeakRef(tensor) for tensor in received]

        return on_return

    def _describe(self, operator: str, arguments: dict[str, Any], group: Any, tensors: list[Tensor]) -> Collective:
        is_barrier = "barrier" in operator
        given = [t for name in GIVEN for t in tensors_in(arguments.get(name))]
        received = [t for name in RECEIVED for t in tensors_in(arguments.get(name))]
        if not given and not received and not is_barrier:
            given = [] if operator.startswith("recv") else tensors
            received = [] if operator == "send" else tensors
        dtypes = {str(t.dtype) for t in tensors}
        peer = next((arguments[n] for n in ("root_rank", "src", "dst") if n in arguments), None)
        device = tensors[0].device if tensors else torch.device("cpu")
        return Collective(
            operator=operator.strip("_"),
            group=_name_of(group),
            ranks=tuple(dist.get_process_group_ranks(group)),
            backend=str(distributed_c10d._world.pg_map[group][0]) if group in distributed_c10d._world.pg_map else "",
            bytes_sent=_bytes(given),
            bytes_received=_bytes(received),
            dtype="" if is_barrier else dtypes.pop() if len(dtypes) == 1 else "mixed",
            reduction=arguments.get("reduce_op", ""),
            peer=peer,
            device=str(device),
            stream=_stream(device),
            is_async=bool(arguments.get("async_op", arguments.get("asyncOp", True))),
            issued_in=place_here(self._names),
            waited_in=None,
            line=place_of(users_frame()) if self._traces_lines else "",
            bytes_kept=_kept(operator, arguments, group, given) if "alltoall" in operator else 0,
        )

    def _wait_for_tensor(self, tensor: Tensor) -> None:
        number = self._by_storage.get(tensor.untyped_storage()._cdata)
        if number is not None and self.collectives[number].waited_in is None:
            self._finish(number)

    def _finish(self, number: int) -> None:
        self._mark_waited(number)
        self._overlaps.wait(number)
        if self.listener is not None:
            self.listener.finish(number)

    def _mark_waited(self, number: int) -> None:
        self.collectives[number] = replace(self.collectives[number], waited_in=place_here(self._names))

    def _mark_overlap(self, number: int, operators: int, places: tuple[Place, ...]) -> None:
        self.collectives[number] = replace(
            self.collectives[number],
            waited_in=place_here(self._names),
            overlap=operators,
            overlaps_with=places,
        )


@cache
def _parameters(name: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in torch._C._get_schema(name, "").arguments)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kept(operator: str, arguments: dict[str, Any], group: Any, given: list[Tensor]) -> int:
    """Return the bytes that an all-to-all sends to this rank."""
    rank, splits = group.rank(), arguments.get("input_split_sizes")
    if operator == "alltoall_":
        return _bytes(given[rank : rank + 1])
    share = splits[rank] / max(sum(splits), 1) if splits else 1 / int(group.size())
    return round(_bytes(given) * share)


def _name_of(group: Any) -> str:
    """Return the name of a group: `tp` for the description `mesh_tp` (`DeviceMesh._init_one_process_group`)."""
    description = str(group.group_desc)
    if description in ("default_pg", "mesh_default"):
        return "world"
    return description.removeprefix("mesh_") if description not in ("", "undefined") else str(group.group_name)


def _stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" or device.index is None else _C.current_fake_stream(device.index)


# ---- Waits


class _Results(torch.futures.Future[list[Tensor]]):
    """The future of a collective, whose results are delivered when the program waits for it or adds a callback."""

    def __init__(self, work: Any, results: list[Tensor]) -> None:
        super().__init__()
        self._work = work
        self.set_result(results)

    def deliver(self) -> None:
        world = current()
        if world is not None:
            world.recorder.deliver(self._work)

    def _note_wait(self) -> None:
        world = current()
        if world is not None:
            world.recorder.waited(self._work)

    def wait(self) -> list[Tensor]:
        self._note_wait()
        return super().wait()

    def value(self) -> list[Tensor]:
        self._note_wait()
        return super().value()

    def done(self) -> bool:
        self._note_wait()
        return super().done()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        self.deliver()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.deliver()
        super().add_done_callback(callback)


@while_rank_is_alone.replaces(Work, "get_future", reason="returns a future without the results")
def _get_future(original: Function, work: Any) -> Any:
    world = current()
    results = None if world is None else world.recorder.results_of(work)
    return original(work) if results is None else _Results(work, results)


@while_rank_is_alone.replaces(torch._C, "_collect_all", reason="waits for futures in C++")
def _collect_all(original: Function, futures: Any) -> Any:
    for future in futures:
        if isinstance(future, _Results):
            future.deliver()
    return original(futures)


@while_rank_is_alone.replaces(Work, "is_completed", reason="is never true of collectives that do nothing")
def _is_completed(original: Function, work: Any) -> bool:
    world = current()
    if world is None:
        return bool(original(work))
    world.recorder.waited(work)
    return True


@while_rank_is_alone.replaces(FakeWork, "wait", reason="waits for a collective")
@while_rank_is_alone.replaces(
    Work, "wait", "synchronize", "block_current_stream", "result", reason="waits for a collective"
)
def _wait(original: Function, /, work: Any, *args: Any, **kwargs: Any) -> Any:
    world = current()
    if world is not None:
        world.recorder.waited(work)
    return original(work, *args, **kwargs)


# ---- The current place of a program: the running module, and forward, backward or the optimizer's step
#
# It is read from the frames of the thread, so modules need no hooks.


# Enough frames for nested modules; walking further is slow and rarely finds more.
DEEPEST = 200


class ModuleNames:
    """The names of modules in the models that contain them."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def of(self, module: nn.Module, outermost: nn.Module | None) -> str:
        """Return the name of `module` in `outermost`, or its class if it is the model itself."""
        if module not in self._names and outermost is not None:
            for name, child in outermost.named_modules():
                self._names.setdefault(child, name)
        return self._names.get(module, "") or type(module).__name__


def place_here(names: ModuleNames) -> Place:
    """Return the current place of this thread."""
    innermost: nn.Module | None = None
    outermost: nn.Module | None = None
    label, is_stepping = "", False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEEPEST):
        if frame is None:
            break
        owner = frame.f_locals.get("self") if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module):
            innermost, outermost = owner if innermost is None else innermost, owner
        elif isinstance(owner, torch.optim.Optimizer):
            is_stepping = True
        elif not label and owner is not None:
            label = _name_in_fsdp(owner)
        frame = frame.f_back
    module = label or ("" if innermost is None else names.of(innermost, outermost))
    phase = (
        "backward" if is_in_backward() else "optimizer" if is_stepping else "forward" if innermost is not None else ""
    )
    return Place(module, phase)


def _name_in_fsdp(owner: object) -> str:
    """Return the name of the module whose parameters FSDP groups (`FSDPParamGroup`), or ""."""
    name = vars(owner).get("_module_fqn") if hasattr(owner, "__dict__") else None
    return name if isinstance(name, str) else ""
