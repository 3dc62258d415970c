"""A table of the modules in a module, with the memory they hold and the time that materializing them takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from itertools import repeat
from math import prod
from operator import is_
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from .. import _C
from ..internals.document import Column, Items, Table
from ..internals.held_tensors import Held, held_tensors, storage_of
from ..internals.text import in_units
from .explanations import PlannedCall, Program, RecordedOperation

__all__ = [
    "ModuleSummary",
    "OperatorSummary",
    "PlannedOperation",
    "ReplayPlan",
    "Summary",
    "TimedOperator",
    "plan",
    "summary",
    "timed_operators",
]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


BYTES = Column("bytes", in_units)
DURATIONS = Column("predicted", _milliseconds), Column("measured", _milliseconds)
PARAMETERS = Column("parameters", "{:,}".format)
COLUMNS = ("module", "class", PARAMETERS, BYTES, Column("of", in_units, is_optional=True), "state")
OPERATORS = ("operator", Column("calls", "{:,}".format), BYTES, *DURATIONS)


@dataclass(frozen=True)
class ModuleSummary:
    """A row of `summary()`. The last one is the total, with an empty class.

    Attributes:
        module: The name of the module.
        class_name: The name of its class.
        parameters: The number of elements of its parameters.
        nbytes: The bytes of its tensors.
        whole_nbytes: The bytes of the whole tensors if it holds shards, or None.
        state: The states of its tensors, such as `deferred, real`.
        predicted: The predicted seconds to materialize it. None without times, and if no operator runs.
        measured: The measured seconds, or None.
    """

    module: str
    class_name: str
    parameters: int
    nbytes: int
    whole_nbytes: int | None
    state: str
    predicted: float | None = None
    measured: float | None = None


@dataclass(frozen=True)
class OperatorSummary:
    """The calls of an operator that materializing runs.

    Attributes:
        operator: The name and the overload.
        calls: The number of calls.
        nbytes: The bytes that they write.
        predicted: The predicted seconds.
        measured: The measured seconds, or None.
    """

    operator: str
    calls: int
    nbytes: int
    predicted: float | None
    measured: float | None


@dataclass(frozen=True, repr=False)
class Summary(Items[ModuleSummary]):
    """The rows of `summary()`, which prints as tables."""

    modules: tuple[ModuleSummary, ...]
    """The modules, then the total."""
    operators: tuple[OperatorSummary, ...] | None = None
    """The operators, the slowest first. None without times."""

    def _parts(self) -> Iterator[Table]:
        columns = COLUMNS if self.operators is None else (*COLUMNS, *DURATIONS)
        yield Table(columns, [astuple(row)[: len(columns)] for row in self.modules])
        if self.operators:
            yield Table(OPERATORS, map(astuple, self.operators))


def summary(module: Module, *, time: bool | Literal["predicted"] = False) -> Summary:
    """Return a table of the modules in `module`, to print.

    Each module that holds tensors itself has a row: the number of elements of its parameters, the bytes of all its
    tensors (parameters, buffers and plain attributes), and whether they are deferred, real, or fake without a
    recording. Tensors that several modules share count in each of their rows, and once in the total. For a module that
    holds shards (`DTensor`), the shards are counted, and another column has the bytes of the whole tensors.

    With `time` there are two more columns, and a second table with a row for each operator that materializing runs,
    the slowest first: the predicted and the measured time. The prediction is the time that filling as much memory takes
    on this machine now, by a random fill of the same kind, or with zeros for other operators. An operator that takes
    much longer computes more than it fills. Operators that several storages need count for the first of them. Operators
    that run on the values of a fill while it is drawn count as a part of the fill. `torch.get_num_threads()` threads
    fill large tensors.

    Args:
        module: A module, deferred or not. It does not change.
        time: True: compute the deferred tensors once, to measure it, and drop them. Memory holds the tensors that the
            current operators work on. "predicted": compute nothing.

    Returns:
        The rows, which print as tables.

    Raises:
        TypeError: `module` is not a module.
        ValueError: `time` has another value.
        MaterializationError: `time` is true, and materializing would raise this.
        RuntimeError: `time` is true, and materializing would draw from a generator of another device.

    Example:
        >>> print(summary(deferred_init(torch.nn.Linear, 4, 4)))
        module  class   parameters  bytes  state
        ------  ------  ----------  -----  --------
        (self)  Linear          20   80 B  deferred
        total                   20   80 B  deferred
    """
    if not isinstance(module, Module):
        raise TypeError(f"summary() takes a module, but `module` is a {type(module).__name__}.")
    if not (isinstance(time, bool) or (isinstance(time, str) and time == "predicted")):
        raise ValueError(f'summary() takes False, True or "predicted" as `time`, but was given {time!r}.')
    held = _held_by_part(module)
    if not time:
        return Summary(tuple(_row(*part) for part in held))
    tensors = [item.tensor for *_, items in held for item in items]
    operators = timed_operators(tensors, measured=time is True)
    rows = (_row(*part, *_durations(_needed_by(part[-1], operators))) for part in held)
    return Summary(tuple(rows), tuple(_by_name(operators)))


def _held_by_part(module: Module) -> list[tuple[str, str, list[Held]]]:
    """Return the name and the class of each module that holds tensors itself, with these. The total comes last."""
    parts = []
    everything: list[Held] = []
    for name, part in module.named_modules():
        if held := list(held_tensors(part, check_fn=partial(is_, part))):
            parts.append((name or "(self)", type(part).__name__, held))
            everything += held
    return [*parts, ("total", "", everything)]


def _row(
    name: str, class_name: str, held: Sequence[Held], predicted: float | None = None, measured: float | None = None
) -> ModuleSummary:
    tensors = list({id(item.tensor): item.tensor for item in held}.values())
    parameters = {id(item.tensor): item.tensor for item in held if item.is_parameter}
    elements = sum(t.numel() for t in parameters.values() if not is_lazy(t))
    # By storage: views show bytes that their base also has.
    storages = dict(map(storage_of, tensors))
    nbytes = sum(storages.values())
    whole, state = _size_of_whole(held, nbytes), ", ".join(sorted({_state(t) for t in tensors}))
    return ModuleSummary(name, class_name, elements, nbytes, whole, state, predicted, measured)


def _size_of_whole(held: Sequence[Held], nbytes: int) -> int | None:
    parts = {id(item.tensor): item for item in held if item.is_part}.values()
    if not parts:
        return None
    wholes = {id(item.whole): item.whole for item in parts}.values()
    own = dict(storage_of(item.tensor) for item in parts)
    return nbytes - sum(own.values()) + sum(whole.numel() * whole.element_size() for whole in wholes)


def _needed_by(held: Iterable[Held], operators: Iterable[TimedOperator]) -> list[TimedOperator]:
    storages = {storage_of(item.tensor)[0] for item in held}
    return [operator for operator in operators if operator.storage in storages]


def _by_name(operators: Iterable[TimedOperator]) -> Iterator[OperatorSummary]:
    """Yield the rows of the operators, the slowest first."""
    calls: dict[str, list[TimedOperator]] = {}
    for one in operators:
        calls.setdefault(one.name, []).append(one)

    def duration(of: Sequence[TimedOperator]) -> float:
        return sum(one.predicted if one.measured is None else one.measured for one in of)

    for name, same in sorted(calls.items(), key=lambda item: -duration(item[1])):
        yield OperatorSummary(name, len(same), sum(one.nbytes for one in same), *_durations(same))


def _durations(operators: Sequence[TimedOperator]) -> tuple[float | None, float | None]:
    """Return the predicted and the measured seconds. Either all operators have been measured, or none."""
    if not operators:
        return None, None
    measured = [one.measured for one in operators if one.measured is not None]
    return sum(one.predicted for one in operators), sum(measured) if measured else None


def _state(tensor: torch.Tensor) -> str:
    if _C.is_deferred(tensor):
        return "deferred"
    return "fake" if _C.is_fake(tensor) else "real"


# ---- The time that materializing takes, by operator


# The numbers of elements of the calls from which times are predicted.
FEW = 16
MANY = 1 << 23


class TimedOperator(NamedTuple):
    """An operator that materializing runs.

    Attributes:
        name: Its name and overload, such as `aten::normal_`.
        storage: The first of the storages that need its results.
        nbytes: The bytes that it writes.
        predicted: The seconds that a random fill of its kind takes for as many bytes, or writing zeros.
        measured: The seconds that it took, or None if it did not run.
    """

    name: str
    storage: int
    nbytes: int
    predicted: float
    measured: float | None


def timed_operators(tensors: Iterable[torch.Tensor], *, measured: bool) -> list[TimedOperator]:
    """Return the operators that materializing the deferred ones of `tensors` runs, in order.

    Args:
        tensors: Any tensors. They do not change.
        measured: Run the operators, and drop the results.

    Raises:
        MaterializationError: An operator cannot be repeated.
        RuntimeError: An operator would move a generator of another device.
    """
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters raise for their storage
        deferred = {t.untyped_storage()._cdata: t for t in tensors if _C.is_deferred(t)}
    operators, shown, _, seconds = _C.read_recordings(list(deferred.values()), measures=measured)
    planned = sorted(((one.plan, one) for one in operators if one.plan is not None), key=lambda pair: pair[0].place)
    users = _first_users([plan for plan, _ in planned], [place for _, place in shown])
    predictor = Predictor()
    storages = list(deferred)
    return [
        TimedOperator(
            name=f"{one.name}.{one.overload}" if one.overload else one.name,
            storage=storages[user],
            nbytes=int(plan.share * _bytes_written(one)),
            predicted=plan.share * predictor.seconds_of(one),
            measured=took,
        )
        for (plan, one), user, took in zip(planned, users, seconds if measured else repeat(None), strict=False)
    ]


def _first_users(plan: list[_C.PlannedOperator], results: list[int | None]) -> list[int]:
    """Return, for each operator, the index of the first tensor that needs it.

    Args:
        plan: The operators, in the order of their places.
        results: For each tensor, the place of the operator that writes it, or None.
    """
    first = [len(results)] * len(plan)
    for user, place in enumerate(results):
        if place is not None:
            first[place] = min(first[place], user)
    for operator in reversed(plan):
        for place in operator.reads:
            if place is not None:
                first[place] = min(first[place], first[operator.place])
    return first


def _bytes_written(operator: _C.RecordedOperator) -> int:
    return sum(prod(tensor.sizes) * tensor.dtype.itemsize for tensor in operator.writes)


class Predictor:
    """Predicts the time of operators from the time to write new memory on the CPU."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, torch.dtype], tuple[float, float]] = {}

    def seconds_of(self, operator: _C.RecordedOperator) -> float:
        if operator.allocates:
            return 0
        if _is_fill(operator):
            [target] = operator.writes
            arguments = [None if isinstance(one, _C.RecordedTensor) else one for _, _, one, _ in operator.arguments]
            return self._seconds(operator.name, operator.overload, arguments, target.dtype, prod(target.sizes))
        return self._seconds("aten::zero_", "", [None], torch.uint8, _bytes_written(operator))

    def _seconds(self, name: str, overload: str, arguments: list[object], dtype: torch.dtype, count: int) -> float:
        """Return a time that is linear in `count`: a constant for the call, and one for each element."""
        if (name, dtype) not in self._costs:
            of_few, of_many = (
                median(_C.seconds_of_call(name, overload, arguments, dtype, size) for _ in range(3))
                for size in (FEW, MANY)
            )
            self._costs[name, dtype] = of_few, max(of_many - of_few, 0) / (MANY - FEW)
        of_call, of_element = self._costs[name, dtype]
        return of_call + of_element * count


def _is_fill(operator: _C.RecordedOperator) -> bool:
    """Return true for a random fill on the CPU, whose only tensor is its target."""
    return (
        operator.tape is not None
        and operator.tape[0].type == "cpu"
        and len(operator.tensors) == 1
        and operator.writes == operator.tensors
        and any(name == "generator" for name, *_ in operator.arguments)
    )


# ---- The plan of materializing, without running it


Way: TypeAlias = Literal["call", "parts", "takes over", "step"]
Memory: TypeAlias = Literal["result", "new", "copy", "in place", "resized", "taken over"]

# In the order of `Way` and `Origin` of csrc/core/deferred_init/plan/replay_plan.h, without operators that do not run.
WAYS: tuple[Way, ...] = ("call", "parts", "takes over", "step")
MEMORIES: tuple[Memory, ...] = ("result", "new", "copy", "in place", "resized", "taken over")


@dataclass(frozen=True)
class PlannedOperation:
    """An operator that a replay runs."""

    operation: RecordedOperation
    """The recorded call."""
    way: Way
    """`"call"`: once, as recorded. `"parts"`: for `operation.parts` only. `"takes over"`: it copies a value that has no
    other reader, so the memory of that value becomes the copy. `"step"`: on each section of a random fill, while the
    section is in the cache."""
    fill: int | None
    """For a step, the number of the filled value."""
    memory: tuple[Memory, ...]
    """The memory of each value that it writes: `"result"` of its kernel, `"new"`, a `"copy"` of an argument that is
    read again, or an argument that is not: overwritten `"in place"`, `"resized"`, or `"taken over"`."""
    nbytes: tuple[int, ...]
    """The bytes of each of these values."""
    drops: tuple[int, ...]
    """The numbers of the values that are not needed afterwards."""

    def __str__(self) -> str:
        notes = [_note(memory, nbytes) for memory, nbytes in zip(self.memory, self.nbytes, strict=True)]
        if self.fill is not None:
            notes.append(f"while %{self.fill} is filled")
        if self.drops:
            notes.append(f"then drops {', '.join(f'%{number}' for number in self.drops)}")
        text = str(self.operation)
        return f"{text}; {'; '.join(notes)}" if "  # " in text else f"{text}  # {'; '.join(notes)}"


def _note(memory: Memory, nbytes: int) -> str:
    notes = {"in place": "in place", "taken over": "takes it over", "copy": f"a copy, {in_units(nbytes)}"}
    return notes.get(memory, in_units(nbytes))


@dataclass(frozen=True, repr=False)
class ReplayPlan(Items[PlannedOperation]):
    """The operators that a replay runs, in order. Prints as a program, with a line for each."""

    operations: tuple[PlannedOperation, ...]
    peak: int
    """The peak of the memory in use, in bytes, results included. Memory that kernels allocate is estimated."""
    written: int
    """The bytes that all operators write."""

    def __str__(self) -> str:
        total = f"at most {in_units(self.peak)} at one time, {in_units(self.written)} written"
        return "\n".join([*map(str, self), total])

    def _parts(self) -> list[Table]:
        rows = [
            (
                ", ".join(map(str, one.operation.writes)),
                one.operation.call,
                one.way,
                ", ".join(one.memory),
                sum(one.nbytes),
            )
            for one in self
        ]
        return [Table(("values", "call", "way", "memory", BYTES), rows)]


def plan(target: torch.Tensor | Iterable[torch.Tensor] | Module) -> ReplayPlan:
    """Return the operators that materializing `target` would run, without running any.

    `materialize_tensor` and `materialize_module` execute the same plan when they put values where they were recorded.
    With another device or dtype, storages are computed one by one. Values that were computed when the constructor read
    them, and kept, are not computed again, so their operators are not listed.

    Args:
        target: A deferred tensor, several of them, or a module, whose deferred tensors are computed together.

    Returns:
        The operators in the order in which they run, with their memory, as a sequence that prints as a program.

    Raises:
        TypeError: `target` is of another type.
        ValueError: A tensor has no recording.

    Example:
        >>> print(plan(deferred_init(lambda: torch.nn.Linear(4, 4, bias=False).half())))
        %1: float32[4, 4] = aten::uniform_(%0, -0.4..., 0.4...)  # 16 draws from 0; 64 B
        %2: float16[4, 4] = aten::_to_copy(%1, dtype=float16)  # 32 B; then drops %1
        at most 96 B at one time, 96 B written
    """
    program = Program(_tensors_of(target), uses_computed=True)
    return ReplayPlan(tuple(_in_order(program.planned)), program.peak, program.written)


def _tensors_of(target: torch.Tensor | Iterable[torch.Tensor] | Module) -> list[torch.Tensor]:
    if isinstance(target, torch.Tensor):
        return [target]
    if isinstance(target, Module):
        return [held.tensor for held in held_tensors(target) if _C.is_deferred(held.tensor)]
    tensors = list(target) if isinstance(target, Iterable) else [target]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"plan() takes a tensor, an iterable of tensors or a module, not {type(tensor).__name__}.")
    return tensors


def _in_order(planned: list[PlannedCall]) -> Iterator[PlannedOperation]:
    fill_of = {place: call.operation.writes[0].number for call in planned for place in call.plan.steps}
    for operation, of, drops in sorted(planned, key=lambda call: call.plan.place):
        yield PlannedOperation(
            operation=operation,
            way=WAYS[of.way - 1],
            fill=fill_of.get(of.place),
            memory=tuple(MEMORIES[origin] for origin, _ in of.memory),
            nbytes=tuple(nbytes for _, nbytes in of.memory),
            drops=drops,
        )
