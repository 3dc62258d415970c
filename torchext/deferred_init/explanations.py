"""Recordings of deferred tensors, in a form to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..internals.document import Items, Table
from ..internals.held_tensors import held_tensors

__all__ = [
    "Explanation",
    "RecordedOperation",
    "RecordedValue",
    "explain",
    "export_graph",
    "text_of_call",
    "text_of_parts",
    "text_of_tensor",
]


@dataclass(frozen=True)
class RecordedValue:
    """The content of a tensor's memory after an operation.

    Values do not change: an operation in place reads a value and makes the next one.
    """

    number: int
    """The number of the value in the explanation, from 0."""
    shape: tuple[int, ...]
    """The shape as it was first written. Views show parts of it."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"%{self.number}: {str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class RecordedOperation:
    """A recorded call of an operator. It runs when a tensor that depends on it is materialized, if `runs`."""

    name: str
    """The operator, such as `aten::uniform_`. `constant` for the results of `torch.tensor()` and similar functions."""
    call: str
    """The call with its arguments, `%i` for the value with the number `i`. Default arguments are left out."""
    reads: tuple[int, ...]
    """The numbers of the values that it reads, in the order of the arguments."""
    writes: tuple[RecordedValue, ...]
    """The values that it makes."""
    generator_offset: int | None
    """For a random operator, the position at which it starts: the offset of a CUDA generator. For the CPU generator,
    the number of 32-bit draws since its last known state: its seeding, or the first recording after another use."""
    draws: int | None
    """How far it advances the generator, in the same unit. None if only running it can determine that."""
    source: str | None
    """The source line that recorded it, as `file:line in function`. None unless it was traced."""
    runs: bool = True
    """False if it will not run, because its results are not read: they are overwritten completely, or the explained
    tensors show no part of them. Then it draws nothing, and other operators still draw the same numbers."""
    parts: str | None = None
    """The elements of its results that are computed, as indices such as `[96:128, :8], [200:232]`, because no others
    are needed. None if all are computed."""

    def __str__(self) -> str:
        notes = []
        if self.generator_offset is not None:
            draws = "draws" if self.draws is None else f"{self.draws} draws"
            notes.append(f"{draws} from {self.generator_offset}")
        if self.source is not None:
            notes.append(self.source)
        if self.parts is not None:
            notes.append(f"only {self.parts}")
        if not self.runs:
            notes.append("not run: its results are not read")
        return f"{', '.join(map(str, self.writes))} = {self.call}" + (f"  # {'; '.join(notes)}" if notes else "")


class PlannedCall(NamedTuple):
    """A recorded operation that a replay runs, its part of the plan, and the numbers of the values to drop then."""

    operation: RecordedOperation
    plan: _C.PlannedOperator
    drops: tuple[int, ...]


class Program:
    """The recorded operations that make some tensors, and the plan to compute these together.

    Args:
        tensors: Tensors that have recordings.
        uses_computed: Leave out the operators of values that were computed when they were read, and kept.

    Attributes:
        operations: The operations, in recording order. Constants precede their first readers.
        planned: Those that run, in the same order.
        results: For each tensor, the number of its value, and an expression such as `%1 as float32[2] at 2`.
        peak: The peak of memory, in bytes, with the tensors.
        written: The bytes that the operations write.
    """

    def __init__(self, tensors: list[torch.Tensor], *, uses_computed: bool = False) -> None:
        self.operations: list[RecordedOperation] = []
        self.planned: list[PlannedCall] = []
        self._wholes: list[_C.RecordedTensor] = []  # by number
        self._numbers: dict[tuple[int | None, int], int] = {}
        operators, shown, totals, _ = _C.read_recordings(tensors, uses_computed)
        self.peak: int = totals[0]
        self.written: int = totals[1]
        for index, operator in enumerate(operators):
            self._add(index, operator)
        self.results: list[tuple[int, str]] = [(self._number(tensor), self._show(tensor)) for tensor, _ in shown]

    def _add(self, index: int, operator: _C.RecordedOperator) -> None:
        tensors = [one for one in operator.tensors if isinstance(one, _C.RecordedTensor)]
        reads = [self._number(tensor) for tensor in tensors if tensor.value is not None]
        call = text_of_call(operator, self._show)
        writes = [self._new_value((index, i), self._whole(tensor)) for i, tensor in enumerate(operator.writes)]
        _, offset, draws = operator.tape or (None, None, None)
        plan = operator.plan if operator.plan is not None and operator.plan.parts != [] else None
        operation = RecordedOperation(
            name=operator.name,
            call=call,
            reads=tuple(reads),
            writes=tuple(writes),
            generator_offset=offset,
            draws=draws,
            source=operator.source or None,
            # Allocations write nothing that is read. If they are not planned, other code allocates the memory.
            runs=plan is not None or operator.allocates,
            parts=None if plan is None else text_of_parts(plan.parts or ()) or None,
        )
        self.operations.append(operation)
        if plan is not None:
            self.planned.append(PlannedCall(operation, plan, tuple(self._numbers[value] for value in plan.drops)))

    def _new_value(self, key: tuple[int | None, int], whole: _C.RecordedTensor) -> RecordedValue:
        self._numbers[key] = number = len(self._wholes)
        self._wholes.append(whole)
        return RecordedValue(number, whole.sizes, whole.dtype)

    def _number(self, tensor: _C.RecordedTensor) -> int:
        assert tensor.value is not None
        operator, output, nbytes = tensor.value
        if (operator, output) not in self._numbers:
            value = self._new_value((operator, output), tensor)
            call = f"constant({nbytes} bytes)"
            self.operations.append(RecordedOperation("constant", call, (), (value,), None, None, None))
        return self._numbers[operator, output]

    def _whole(self, written: _C.RecordedTensor) -> _C.RecordedTensor:
        """Return the tensor of all of a value: an operator that writes through a view leaves the rest unchanged."""
        return self._wholes[self._number(written)] if written.value is not None else written

    def _show(self, tensor: _C.RecordedTensor) -> str:
        if tensor.value is None:
            return f"{'real' if tensor.is_real else 'like'} {text_of_tensor(tensor)}"
        number = self._number(tensor)
        if self._wholes[number][1:] == tensor[1:]:  # all but the value
            return f"%{number}"
        return f"%{number} as {text_of_tensor(tensor)}" + (f" at {tensor.offset}" if tensor.offset else "")


@dataclass(frozen=True, repr=False)
class Explanation(Items[RecordedOperation]):
    """Recorded operations, in the order in which they were recorded. Prints as a program, with a line for each."""

    operations: tuple[RecordedOperation, ...]
    result: str
    """The expression of the explained tensor."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self), f"return {self.result}"])

    def _parts(self) -> list[Table]:
        rows = [
            (", ".join(map(str, one.writes)), one.call if one.runs else f"{one.call} (not run)", one.draws, one.source)
            for one in self
        ]
        return [Table(("values", "call", "draws", "source"), rows)]


def explain(tensor: torch.Tensor) -> Explanation:
    """Return the recorded operations that make `tensor`.

    Args:
        tensor: A deferred tensor.

    Returns:
        The operations, as a sequence that prints as a program. They have source lines if they were recorded under
        `deferred_init(trace=True)` or `tracing()`.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: `tensor` has no recording.

    Example:
        >>> print(explain(deferred_init(torch.nn.Linear, 4, 4).bias))
        %0: float32[4] = aten::empty.memory_format([4], device=cpu)
        %1: float32[4] = aten::uniform_(%0, -0.5, 0.5)  # 4 draws from 16
        return %1
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"explain() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    program = Program([tensor])
    ((_, result),) = program.results
    return Explanation(tuple(program.operations), result)


def export_graph(module: Module, path: str | os.PathLike[str]) -> None:
    """Write the recording of the deferred tensors of `module` as a graph in Graphviz's DOT language.

    Boxes are operations, dashed if they will not run; ellipses are tensors of the module. An arrow leads from the
    operation that makes a value to those that read it. `dot -Tsvg graph.dot -o graph.svg` draws the graph.

    Args:
        module: A module. Its real tensors are left out.
        path: The file to write.

    Raises:
        TypeError: `module` is not a module.
        OSError: The file cannot be written.
    """
    if not isinstance(module, Module):
        raise TypeError(f"export_graph() takes a module, but `module` is a {type(module).__name__}.")
    deferred = [held for held in held_tensors(module) if _C.is_deferred(held.tensor)]
    program = Program([held.tensor for held in deferred])
    names: dict[int, list[str]] = {}
    for held, (number, _) in zip(deferred, program.results, strict=True):
        names.setdefault(number, []).append(held.name)
    Path(path).write_text("\n".join(_dot_lines(program.operations, names)) + "\n", encoding="utf-8")


def _dot_lines(operations: list[RecordedOperation], names: dict[int, list[str]]) -> Iterator[str]:
    yield "digraph recording {"
    yield "  node [fontname=monospace];"
    writer_of: dict[int, int] = {}
    for place, operation in enumerate(operations):
        writer_of.update((value.number, place) for value in operation.writes)
        label = operation.call if operation.source is None else f"{operation.call}\n{operation.source}"
        style = "" if operation.runs else ", style=dashed"
        yield f"  op{place} [shape=box, label={_quoted(label)}{style}];"
        for number in dict.fromkeys(operation.reads):
            yield f"  op{writer_of[number]} -> op{place} [label={_quoted(f'%{number}')}];"
    for number, held in names.items():
        label = "\n".join(dict.fromkeys(held))
        yield f"  tensor{number} [label={_quoted(label)}];"
        yield f"  op{writer_of[number]} -> tensor{number} [label={_quoted(f'%{number}')}];"
    yield "}"


def _quoted(text: str) -> str:
    r"""Return `text` as a DOT string, in which `\l` ends a line that is aligned to the left."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if "\n" not in escaped else '"' + escaped.replace("\n", "\\l") + '\\l"'


# ---- Texts of recorded calls


def text_of_call(operator: _C.RecordedOperator, show: Callable[[_C.RecordedTensor], str]) -> str:
    """Return a call without its outputs, given a text for each tensor: `aten::uniform_(%0, -0.5, 0.5)`.

    Arguments that have their default values are omitted. Those after an omitted one are written by name.
    """
    texts: list[str] = []
    by_name = False
    for name, kwarg_only, value, default in operator.arguments:
        text = _text(value, show)
        # Python passes `pin_memory=False` to every factory.
        is_noise = name == "pin_memory" and text == "False"
        if is_noise or (default is not ... and text == _text(default, show)):
            by_name = True
        else:
            by_name = by_name or kwarg_only
            texts.append(f"{name}={text}" if by_name else text)
    overload = operator.overload and f".{operator.overload}"
    return f"{operator.name}{overload}({', '.join(texts)})"


def text_of_tensor(tensor: _C.RecordedTensor) -> str:
    """Return the dtype and the shape, such as `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.sizes))}]"


def text_of_parts(parts: Iterable[Sequence[slice | None]]) -> str:
    """Return indices such as `[96:128, :8], [200:232]`, or an empty text if one of the parts is all of the tensor."""
    texts = [_text_of_part(part) for part in parts]
    return "" if "[]" in texts else ", ".join(texts)


def _text_of_part(part: Sequence[slice | None]) -> str:
    needed = max((i for i, of in enumerate(part, 1) if of is not None), default=0)
    return f"[{', '.join(map(_text_of_slice, part[:needed]))}]"


def _text_of_slice(of: slice | None) -> str:
    if of is None:
        return ":"
    return f"{of.start}:{of.stop}" if of.step == 1 else f"{of.start}:{of.stop}:{of.step}"


def _text(value: object, show: Callable[[_C.RecordedTensor], str]) -> str:
    match value:
        case _C.RecordedTensor():
            return show(value)
        case list() | tuple():
            items = ", ".join(_text(item, show) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        case float():
            return _text_of_float(value)
        case complex():
            return f"complex({_text_of_float(value.real)}, {_text_of_float(value.imag)})"
        case str():
            return f"'{value}'"
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case torch.layout() | torch.memory_format():
            words = str(value).removeprefix("torch.").removesuffix("_coo").removesuffix("_format").split("_")
            return "".join(map(str.capitalize, words))
        case torch.Generator():
            return f"generator on {value.device}"
        case None | int() | torch.device():
            return str(value)
    return "<Object>"


def _text_of_float(number: float) -> str:
    """Return the shortest decimal that equals `number` and reads as a floating-point number."""
    texts = [f"{number:.{digits}g}" for digits in (6, 15, 16, 17)]
    text = next((text for text in texts if float(text) == number), texts[-1])
    return text if text.strip("-0123456789") else f"{text}.0"
