"""The messages between the ranks of a job. Each rank runs in its own process.

A program may read the values that its rank receives: a pipeline stage, for example, receives the shapes of later
messages. So this process reports the messages that it sends. Where it receives such values it waits for them, as a
real rank does, and the parent process also runs the sender (`ranks/processes.py`). Activations and gradients have no
values, so nothing waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .. import _C
from ..internals.dispatch_keys import with_our_keys, without_our_keys
from ..internals.events import place_of, users_frame
from ..internals.held_tensors import tensors_in
from ..internals.patching import Function
from .current import current, while_world_is_open
from .protocol import CYCLE, FINISHED, OBJECTS, TO_ALL, Awaited, Channel, Message, Missing, Received, Sent, mismatch

__all__ = ["Channels", "Messages", "agreed_values", "without_answers"]

# The values that are sent: integers and booleans, such as shapes, and a few floating-point numbers.
MOST_BYTES = 1 << 20
MOST_NUMBERS = 64

_is_asking: ContextVar[bool] = ContextVar("_is_asking", default=True)


@contextmanager
def without_answers() -> Iterator[None]:
    """Receive no values from broadcasts in the block, because the program does not read them."""
    before = _is_asking.set(False)
    try:
        yield
    finally:
        _is_asking.reset(before)


class Channels:
    """The channels of this rank. A message has the same channel and number in the rank that receives it."""

    def __init__(self) -> None:
        self._made: Counter[tuple[int, ...]] = Counter()
        self._groups: dict[str, tuple[tuple[int, ...], int]] = {}
        self._counts: Counter[Channel] = Counter()

    def note_group(self, name: str, ranks: Sequence[int]) -> None:
        """Register a new process group of this rank."""
        key = tuple(ranks)
        self._groups[name] = key, self._made[key]
        self._made[key] += 1

    def _channel(self, group: Any, kind: str, source: int, destination: int, tag: int = 0) -> Channel:
        """Return the channel between two ranks of `group`."""
        ranks, number = self._groups.get(str(group.group_name)) or (tuple(dist.get_process_group_ranks(group)), 0)
        to = TO_ALL if destination == TO_ALL else ranks[destination]
        return Channel(ranks, number, kind, ranks[source], to, tag if kind == "cpu" else 0)

    def _next(self, channel: Channel) -> int:
        self._counts[channel] += 1
        return self._counts[channel] - 1


class Messages(Channels):
    """The messages of this rank.

    Args:
        connection: The connection to the process that runs the ranks.
        rank: The global rank.

    Attributes:
        on_finished: Called where this rank would wait for a rank that has reached its goal.
    """

    on_finished: Callable[[], object]

    def __init__(self, connection: Connection, rank: int) -> None:
        super().__init__()
        self.on_finished = lambda: None
        self._connection = connection
        self._rank = rank
        # At most one thread writes, and one waits: the threads that hold the turns. Queues instead of locks, because
        # a signal handler of the program may send while it interrupts a send.
        self._notices: SimpleQueue[Any] = SimpleQueue()
        self._writing_turns: SimpleQueue[None] = SimpleQueue()
        self._writing_turns.put(None)
        self._turns: SimpleQueue[None] = SimpleQueue()
        self._turns.put(None)
        self._busy: list[int] = []  # the threads that write or wait
        self._without_order: set[str] = set()
        self._senders: Counter[int] = Counter()

    @property
    def remarks(self) -> list[str]:
        """Remarks for the report about messages from other ranks."""
        if not self._senders:
            return []
        counts = ", ".join(f"{count} from rank {rank}" for rank, count in sorted(self._senders.items()))
        return [f"Messages with values were received from dry runs of other ranks: {counts}."]

    def observe(self, operator: str, arguments: dict[str, Any], group: Any) -> Callable[[], None] | None:
        """Report a collective before it runs. Return a function to call when the program waits for it, or None."""
        if operator == "send":
            self._send(arguments, group)
        elif operator == "recv_":
            return self._receive(arguments, group)
        elif operator == "broadcast_":
            return self._broadcast(arguments, group)
        elif operator == "recv_any_source_":
            self._without_order.add(str(group.group_name))
        return None

    def send_objects(self, group: Any, data: bytes, destination: int = TO_ALL) -> None:
        """Send pickled objects to a rank of `group`, or to all ranks."""
        channel = self._channel(group, OBJECTS, dist.get_rank(group), destination)
        self._report(Sent(channel, self._next(channel), Message(values=data, nbytes=len(data))))

    def receive_objects(self, group: Any, source: int, *, is_to_all: bool = False) -> bytes | str:
        """Return the pickled objects that a rank of `group` sends, or the reason why it does not send them."""
        channel = self._channel(group, OBJECTS, source, TO_ALL if is_to_all else dist.get_rank(group))
        found = self._await(Awaited(channel, self._next(channel), self._rank, place_of(users_frame())))
        return found.values or b"" if isinstance(found, Message) else found.text

    def skip_objects(self, group: Any, source: int) -> None:
        """Skip the objects that a rank of `group` sends to all ranks."""
        self._next(self._channel(group, OBJECTS, source, TO_ALL))

    def _send(self, arguments: dict[str, Any], group: Any) -> None:
        tensor = next(tensors_in(arguments["tensors"]))
        own = dist.get_rank(group)
        channel = self._channel(group, tensor.device.type, own, arguments["dst"], arguments.get("tag", 0))
        self._report(Sent(channel, self._next(channel), _message_of(tensor)))

    def _receive(self, arguments: dict[str, Any], group: Any) -> Callable[[], None] | None:
        tensor = next(tensors_in(arguments["tensors"]))
        own = dist.get_rank(group)
        channel = self._channel(group, tensor.device.type, arguments["src"], own, arguments.get("tag", 0))
        number, place = self._next(channel), place_of(users_frame())
        if str(group.group_name) in self._without_order:
            return None
        if not _carries_values(tensor):
            self._report(Received(channel, number, _described(tensor), place))
            return None
        return self._delivery(Awaited(channel, number, self._rank, place), tensor)

    def _broadcast(self, arguments: dict[str, Any], group: Any) -> Callable[[], None] | None:
        tensor = next(tensors_in(arguments["tensors"]))
        root = arguments["root_rank"]
        channel = self._channel(group, f"broadcast on {tensor.device.type}", root, TO_ALL)
        number = self._next(channel)
        if root == dist.get_rank(group):
            self._report(Sent(channel, number, _message_of(tensor) if _is_asking.get() else _described(tensor)))
            return None
        if not _is_asking.get() or not _is_discrete(tensor) or not _carries_values(tensor) or _has_own(tensor):
            return None
        return self._delivery(Awaited(channel, number, self._rank, place_of(users_frame())), tensor)

    def _report(self, notice: Sent | Received | Awaited) -> None:
        """Send a notice, or queue it for the code that is already sending, in another thread or interrupted here."""
        self._notices.put(ForkingPickler.dumps(notice))
        with self._communicating():
            while not self._notices.empty():
                try:
                    turn = self._writing_turns.get_nowait()
                except Empty:
                    return
                try:
                    with suppress(Empty):
                        while True:
                            self._connection.send_bytes(self._notices.get_nowait())
                finally:
                    self._writing_turns.put(turn)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        self._busy.append(get_ident())
        try:
            with with_our_keys():  # for signal handlers
                yield
        finally:
            self._busy.remove(get_ident())

    def _delivery(self, awaited: Awaited, tensor: Tensor) -> Callable[[], None]:
        reference = TensorWeakRef(tensor)

        def deliver() -> None:
            found = self._await(awaited)
            world = current()
            if isinstance(found, Missing) and world is not None:
                world.remark(f"{found.text} Its values are assumed", awaited.place)
            received = reference()
            if received is not None and isinstance(found, Message):
                _check_size(found, received, awaited)
                _give(received, found)

        return deliver

    def _await(self, awaited: Awaited) -> Message | Missing:
        """Wait for a message."""
        if get_ident() in self._busy:
            raise RuntimeError(
                "A signal handler of the program receives from another rank while it interrupts a send or a receive, "
                "which a dry run does not support. Receive outside of the handler, or use --alone."
            )
        with self._communicating():
            turn = self._turns.get()
            try:
                self._report(awaited)
                answer: Message | Missing = self._connection.recv()
            finally:
                self._turns.put(turn)
        if isinstance(answer, Message):
            self._senders[awaited.channel.source] += 1
            return answer
        if answer.reason == FINISHED:
            self.on_finished()
        if answer.reason == CYCLE:
            raise RuntimeError(answer.text)
        return answer


def _is_discrete(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _carries_values(tensor: Tensor) -> bool:
    """Return true if the program may read the values. Activations and gradients are floating-point numbers."""
    return tensor.numel() <= MOST_NUMBERS or (_is_discrete(tensor) and tensor.nbytes <= MOST_BYTES)


def _has_own(tensor: Tensor) -> bool:
    """Return true if a tensor that receives a broadcast already has values, which stand for those of the root."""
    value = _C.known_value(tensor)
    return value is not None and bool(value.any())


def _described(tensor: Tensor) -> Message:
    return Message(tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())


def _message_of(tensor: Tensor) -> Message:
    described = _described(tensor)
    if not _carries_values(tensor):
        return described
    if not _C.is_fake(tensor):
        return described._replace(values=_bytes_of(tensor.detach().cpu()))
    known = _C.known_value(tensor)
    if known is not None:
        return described._replace(values=_bytes_of(known))
    parts = _C.known_parts(tensor)
    if parts is not None:
        return described._replace(values=_bytes_of(parts[0]), written=_bytes_of(parts[1]))
    assumed = _C.assumed_value(tensor)
    if assumed is None:
        return described
    return described._replace(values=_bytes_of(assumed), kind=_C.kind_of_values([tensor]))


def _bytes_of(value: Tensor) -> bytes:
    with without_our_keys():
        return bytes(value.contiguous().view(-1).view(torch.uint8).numpy())


def _check_size(message: Message, tensor: Tensor, awaited: Awaited) -> None:
    own = _described(tensor)
    if message.dtype is not None and message.nbytes != own.nbytes:
        raise RuntimeError(mismatch(awaited.channel, message, own, awaited.place))


def _give(tensor: Tensor, message: Message) -> None:
    """Write the values of `message` to `tensor`."""
    if not message.values:
        return
    with without_our_keys():
        value = torch.frombuffer(bytearray(message.values), dtype=tensor.dtype)
        if not _C.is_fake(tensor):
            tensor.detach().view(-1).copy_(value)
            return
    flat = tensor.detach().view(-1)
    if message.kind:
        _C.assume_value(flat, value, message.kind)
        return
    for begin, end in _runs(message.written, len(value)):
        part, given = flat[begin:end], value[begin:end]
        _C.write_value(part, given)
        if _C.known_value(part) is None:  # a part of a tensor without values
            _C.assume_value(part, given, _C.kind_of_values([part]))


def _runs(written: bytes | None, count: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each run of known elements."""
    if written is None:
        yield 0, count
        return
    begin = written.find(1)
    while begin >= 0:
        end = written.find(0, begin)
        end = count if end < 0 else end
        yield begin, end
        begin = written.find(1, end)


@while_world_is_open.replaces(
    dist, "_broadcast_coalesced", reason="broadcasts parameters and buffers, which nothing reads"
)
def _broadcast_coalesced(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with without_answers():
        return original(*args, **kwargs)


# ---- The results of collectives of values, if every rank has the values of this one: NOTE [Assumed values]
#
# Programs send small numbers so that ranks agree: whether a rank has found an infinity, how many tokens a batch has,
# how many of them go to each expert. So a sum is the value times the size of the group, a maximum is the value itself,
# and a gathered tensor repeats it, as collectives of objects do. The results are assumed values, not known ones.
# `check_init()` writes them into real tensors.


Values = list[tuple[Tensor, Tensor]]


def agreed_values(operator: str, arguments: dict[str, Any], size: int, rank: int) -> Values:
    """Return the tensors that a collective writes and that get a value, each with its value.

    Args:
        operator: The operator of c10d.
        arguments: Its arguments before the call, by their names in the schema.
        size: The size of the group.
        rank: The rank of this process in the group.
    """
    rule = RULES.get(operator)
    if rule is None:
        return []
    with without_our_keys():
        try:
            return [
                (written, value.reshape(written.shape))
                for written, value in rule(arguments, size, rank)
                if value is not None and value.numel() == written.numel()
            ]
        except (IndexError, KeyError, RuntimeError):  # wrong arguments, which PyTorch rejects
            return []


def _value(tensor: Tensor) -> Tensor | None:
    world = current()
    value = tensor if world is not None and world.is_real else _C.assumed_value(tensor)
    return None if value is None else value.detach().clone()


def _reduced(value: Tensor | None, reduction: str, size: int) -> Tensor | None:
    if value is None or reduction in ("MIN", "MAX", "AVG", "BAND", "BOR") or value.dtype is torch.bool:
        return value
    if reduction == "SUM":
        return value * size
    if reduction == "PRODUCT":
        return value**size
    if reduction == "BXOR":
        return value * (size % 2)
    return None


def _in_place(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    reduction = arguments.get("reduce_op", "MAX")
    return [(t, _reduced(_value(t), reduction, size)) for t in tensors_in(arguments["tensors"])]


def _gathered(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    given = list(tensors_in(arguments["input_tensors"]))
    lists = arguments["output_tensors"]
    return [(out, _value(t)) for outs, t in zip(lists, given, strict=False) for out in tensors_in(outs)]


def _gathered_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(arguments["input_tensor"])
    return [(arguments["output_tensor"], None if value is None else value.reshape(-1).repeat(size))]


def _each(
    rule: Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]],
) -> Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]]:
    """Return the rule for the coalesced form of an operator."""

    def of_all(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
        pairs = zip(tensors_in(arguments["outputs"]), tensors_in(arguments["inputs"]), strict=False)
        alone = [{**arguments, "output_tensor": out, "input_tensor": given} for out, given in pairs]
        return [pair for one in alone for pair in rule(one, size, rank)]

    return of_all


def _scattered(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    outs, lists = list(tensors_in(arguments["output_tensors"])), arguments["input_tensors"]
    reduction = arguments.get("reduce_op", "MAX")
    return [(out, _reduced(_value(given[rank]), reduction, size)) for out, given in zip(outs, lists, strict=False)]


def _scattered_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(arguments["input_tensor"])
    part = None if value is None else value.reshape(size, -1)[rank]
    return [(arguments["output_tensor"], _reduced(part, arguments["reduce_op"], size))]


def _exchanged(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(list(tensors_in(arguments["input_tensors"]))[rank])
    return [(out, value) for out in tensors_in(arguments["output_tensors"])]


def _exchanged_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    given, taken = arguments["input_split_sizes"], arguments["output_split_sizes"]
    value = _value(arguments["input"])
    if value is None:
        return []
    parts = value.split(given) if given else value.reshape(size, -1).split(1)
    mine = parts[rank].flatten()  # each rank sends this one what this one sends itself
    if taken and set(taken) != {parts[rank].shape[0]}:
        return []
    return [(arguments["output"], mine.repeat(size))]


RULES: dict[str, Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]]] = {
    "allgather_into_tensor_coalesced_": _each(_gathered_flat),
    "reduce_scatter_tensor_coalesced_": _each(_scattered_flat),
    "allreduce_": _in_place,
    "allreduce_coalesced_": _in_place,
    "reduce_": _in_place,
    "broadcast_": _in_place,
    "allgather_": _gathered,
    "gather_": _gathered,
    "_allgather_base_": _gathered_flat,
    "reduce_scatter_": _scattered,
    "scatter_": _scattered,
    "_reduce_scatter_base_": _scattered_flat,
    "alltoall_": _exchanged,
    "alltoall_base_": _exchanged_flat,
}
