"""Answers for reads of values that do not exist: NOTE [Assumed values].

With the policy `assume`, a floating-point number reads as 0.125, an integer as 0, and a truth value as false. Values
that follow from known or previously assumed values are computed instead. If the source line checks for finiteness, or
if two tensors are compared for equality, the answer is yes. Separate policies select the elements of masks and the
positions of indices. Each place that reads a value is counted, together with the policies that its value depends on, so
that the assumptions of a run can be reviewed.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .. import _C
from ..descriptions import DEFAULT_VALUES, INTEGER, NUMBER, OTHER, SHAPE, TRUTH
from ..errors import DataDependentError
from ..internals.dispatch_keys import without_our_keys
from ..internals.events import is_in_backward, place_of, users_frame
from ..internals.leases import Lease
from ..internals.patching import Function
from .routing import ROUTING, Balanced, Routing, make_routing, routing_module

__all__ = [
    "ANSWERS",
    "MASKS",
    "PARTS",
    "AssumedValue",
    "AssumedValues",
    "LinePolicy",
    "ValuePolicy",
    "as_policy",
    "assumes_values",
    "assuming_values",
    "note_exchange",
    "note_reading",
    "programs_frame",
    "while_values_are_assumed",
]

# Files whose functions call kernels for dispatch modes.
OF_MODES = {
    str(Path(torch.__file__).parent / name)
    for name in ("_compile.py", "_ops.py", "_dynamo/eval_frame.py", "utils/_stats.py", "utils/flop_counter.py")
} | {str(Path(__file__).parent / "tensor_patches.py")}  # replaces functions that read values

# Largest number of distinct answers that a report shows for one place.
MOST_ANSWERS = 3

# The directory of Python's own modules, and the names of its package directories. Any prefix counts, because an
# environment may be layered on another one.
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
FOLDERS_OF_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

# Words in a source line that checks whether values are finite or close: `isfinite` of `torch`, `math` and libraries.
FINITENESS_CHECKS = ("isfinite", "is_finite", "all_finite", "allclose")


Site = tuple[str, str, str, str, str]  # line, reader, operator, kind, policy


@dataclass(frozen=True)
class AssumedValue:
    """A place that has read values that do not exist.

    Attributes:
        line: The line of the program, not of a package, `file:line in function`.
        reader: The innermost Python function that has read the value. It may be PyTorch's.
        operator: The operator that reads.
        answer: The answer, or the first few distinct answers of many.
        kind: Truth value, integer, number, shape, or other value.
        policy: The policies that the answer depends on, such as `masks=all`, or empty. If more than four policies for
            lines are used, `or` connects some: the answer depends on at least one of them.
        count: Number of reads.
    """

    line: str
    reader: str
    operator: str
    answer: str
    kind: str
    policy: str
    count: int


class AssumedValues:
    """Answers reads of values and counts them.

    Attributes:
        latest: The place of the latest read, with its answer.
    """

    def __init__(self, policy: ValuePolicy | None = None) -> None:
        self.latest: AssumedValue | None = None
        self._policy = policy or ValuePolicy()
        self._routing: dict[LinePolicy | None, Routing] = {None: make_routing(self._policy.routing)}
        self._matched: set[LinePolicy] = set()
        self._line_of_module: WeakKeyDictionary[nn.Module, LinePolicy] = WeakKeyDictionary()
        self._kinds: dict[str, int] = {}
        self._counts: Counter[Site] = Counter()
        self._answers: dict[Site, dict[str, None]] = {}

    @property
    def sites(self) -> list[AssumedValue]:
        """The places where values were read, most frequent first."""
        return [self._value(site, count) for site, count in self._counts.most_common()]

    def answer(self, operator: str, dtype: torch.dtype, computed: float | None, values: int) -> float:
        """Return the assumed value for a read of `dtype`, or `computed` if it follows from earlier assumptions.

        `values` is the kind of the values that it is computed from.
        """
        frame = _reader(sys._getframe(1))
        value = computed
        if value is None:
            value = (
                1.0
                if operator in ("aten::equal", "aten::allclose") or _checks_finiteness(frame)
                else self._number_for(dtype)
            )
        shown = str(bool(value)) if dtype is torch.bool else str(int(value) if not dtype.is_floating_point else value)
        self.note(operator, shown, frame, _kind_of(dtype), values)
        return value

    def note_shape(self, operator: str, shape: str, values: int) -> None:
        """Count a shape that depends on assumed values."""
        self.note(operator, shape, _reader(sys._getframe(1)), SHAPE, values)

    def note(self, operator: str, answer: str, frame: FrameType, kind: str = OTHER, values: int = 0) -> None:
        """Count one read, or raise an error if its line has the policy `raise`."""
        user = programs_frame()
        line = self._line_here()
        if line is not None and line.policy.answer == "raise":
            raise DataDependentError(
                f"`{operator}` reads a value of a fake tensor that does not exist, at {place_of(user)}. The policy "
                f"{line.text} refuses to assume it."
            )
        policy = self._policies_behind(values)
        site = place_of(user), place_of(frame), operator, kind, policy
        self._counts[site] += 1
        answers = self._answers.setdefault(site, {})
        if len(answers) <= MOST_ANSWERS:
            answers[answer] = None
        self.latest = replace(self._value(site, self._counts[site]), answer=answer)

    def _value(self, site: Site, count: int) -> AssumedValue:
        answers = list(self._answers[site])
        shown = ", ".join(answers[:MOST_ANSWERS]) + (", ..." if len(answers) > MOST_ANSWERS else "")
        line, reader, operator, kind, policy = site
        return AssumedValue(line, reader, operator, shown, kind, policy, count)

    def positions(self, count: int, length: int, rows: int) -> tuple[torch.Tensor, int]:
        """Return rows of positions that a program chooses, flattened, and the kind of these values."""
        line = self._line_here(of_module=True)
        if line is not None and line not in self._routing:
            self._routing[line] = make_routing(line.policy.routing, must_fit=True)
        with without_our_keys():
            chosen = self._routing[line].choose(count, length, rows)
            if chosen is not None:
                return chosen, _C.BY_ROUTING if line is None else self._kind_named(line.text)
            return Balanced().choose(count, length, rows), self._kind_named("routing=balanced")

    def policy_here(self) -> tuple[torch.Tensor, int, float]:
        """Return the policy for masks at the line that is running, its kind, and the value of unknown numbers."""
        line = self._line_here()
        policy = self._policy if line is None else line.policy
        kind = _C.BY_MASKS if line is None else self._kind_named(line.text)
        return _pattern(policy.masks), kind, _number(policy)

    def note_exchange(self, group: str) -> None:
        """Call when ranks exchange integers in the group of this name."""
        for routing in self._routing.values():
            routing.exchanges_in = group

    @property
    def remarks(self) -> list[str]:
        """The assumptions about routing, and the policies that were not used."""
        unused = [line.text for line in self._policy.lines if line not in self._matched]
        return [
            *(remark for routing in self._routing.values() for remark in routing.report()),
            *(f"The policy {text} was not used: no value was read or chosen on this line." for text in unused),
        ]

    def install(self) -> None:
        """Answer reads from now on."""
        _C.assume_values(self, _pattern(self._policy.masks), _number(self._policy), bool(self._policy.lines))

    def _number_for(self, dtype: torch.dtype) -> float:
        line = self._line_here()
        is_real = dtype.is_floating_point or dtype.is_complex
        return _number(self._policy if line is None else line.policy) if is_real else 0.0

    def _line_here(self, of_module: bool = False) -> LinePolicy | None:
        """Return the policy of the line that is running.

        Args:
            of_module: Choose like the module did before, in the backward pass: recomputed layers are not called by the
                line that called them first.
        """
        if not self._policy.lines:
            return None
        frame = sys._getframe(1)
        line = self._policy.line_of(frame)
        module = routing_module(frame) if of_module else None
        if line is not None:
            self._matched.add(line)
            if module is not None:
                self._line_of_module[module] = line
        elif module is not None and is_in_backward():
            return self._line_of_module.get(module)
        return line

    def _kind_named(self, policy: str) -> int:
        """Return the kind of values that depend on another policy than that of the whole program."""
        number = len(self._kinds)
        return self._kinds.setdefault(policy, _C.BY_LINES[number % len(_C.BY_LINES)])

    def _policies_behind(self, kind: int) -> str:
        named: dict[int, list[str]] = {}  # policies may share bits
        for policy, bits in self._kinds.items():
            if kind & bits == bits:
                named.setdefault(bits, []).append(policy)
        return ", ".join([*self._policy.behind(kind), *map(" or ".join, named.values())])


def _pattern(masks: str) -> torch.Tensor:
    with without_our_keys():
        return torch.tensor(MASKS[masks])


def _number(policy: ValuePolicy) -> float:
    return 0.0 if policy.answer == "zero" else float(_C.ASSUMED_NUMBER)


def _kind_of(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return TRUTH
    return NUMBER if dtype.is_floating_point or dtype.is_complex else INTEGER


def programs_frame() -> FrameType | None:
    """Return the innermost frame outside of installed packages, or the innermost one if there is no such frame."""
    innermost = frame = users_frame()
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame if frame is not None and not frame.f_code.co_filename.startswith("<") else innermost


def _is_installed(file: str) -> bool:
    return file.startswith(STANDARD_LIBRARY) or any(folder in file for folder in FOLDERS_OF_PACKAGES)


def _reader(frame: FrameType) -> FrameType:
    """Return the frame that has called the operator. Dispatch modes come between it and the kernel."""
    while frame.f_code.co_filename in OF_MODES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _checks_finiteness(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return any(word in line for word in FINITENESS_CHECKS)


_assumed: list[AssumedValues] = []


def note_reading(operator: str, answer: str, frame: FrameType) -> None:
    """Count a read in the innermost block of `assuming_values()`, if one is open."""
    if _assumed:
        _assumed[-1].note(operator, answer, _reader(frame))


def note_exchange(group: str) -> None:
    """Call when ranks exchange integers, such as counts of tokens, in the group of this name."""
    if _assumed:
        _assumed[-1].note_exchange(group)


def assumes_values() -> bool:
    """Return true if values are assumed now."""
    return bool(_assumed)


while_values_are_assumed: Lease = Lease("a dry run answers reads of values that do not exist")


@contextmanager
def assuming_values(policy: str | ValuePolicy = DEFAULT_VALUES) -> Iterator[AssumedValues]:
    """Let programs read values of fakes in the block, on all threads.

    Args:
        policy: A policy, or its text: `assume`, `zero`, or `raise`: reading unknown values raises an error, as it does
            outside of the block. Policies for masks, for routing and for single lines may follow, as in
            `assume,masks=half,routing=worst,train.py:120=balanced`: docs/how_to/dry_runs.md, "Choose values that do not
            exist".

    Yields:
        The reads so far.

    Raises:
        TypeError: `policy` is neither a policy nor a text.
        ValueError: `policy` is not a valid policy.
    """
    parsed = as_policy(policy)
    values = AssumedValues(parsed)
    if parsed.answer == "raise":
        yield values
        return
    _assumed.append(values)
    values.install()
    try:
        with while_values_are_assumed.hold():
            yield values
    finally:
        _assumed.remove(values)
        if _assumed:
            _assumed[-1].install()
        else:
            _C.assume_nothing()


def _read_values(name: str, original: Function, /, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    is_fake = isinstance(self, torch.Tensor) and _C.is_fake(self) and not _C.is_deferred(self)
    if not is_fake or not _assumed or self.layout is not torch.strided:
        return original(self, *args, **kwargs)
    is_forced = name == "numpy" and bool(kwargs.get("force"))
    if name != "tolist" and self.device.type != "cpu" and not is_forced:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )
    value = _C.value_for_reading(self)
    if _C.known_value(self) is None:
        frame = _reader(sys._getframe(1))
        kind = _C.kind_of_values([self])
        _assumed[-1].note(f"Tensor.{name}", _shown(value), frame, _kind_of(self.dtype), kind)
    with without_our_keys():
        return original(value.detach().requires_grad_(self.requires_grad), *args, **kwargs)


for _name in ("tolist", "numpy", "__array__"):
    while_values_are_assumed.replaces(torch.Tensor, _name, reason="reads memory without calling an operator")(
        partial(_read_values, _name)
    )


def _shown(value: torch.Tensor) -> str:
    """Format a few numbers unchanged."""
    if value.numel() > 8:
        return f"{value.numel()} numbers"
    with without_our_keys():
        return str(value.tolist())


# ---- Policies for reads
#
# A policy is a list of parts, separated by commas: `assume,masks=half,train.py:120=worst`.


ANSWERS = ("assume", "zero", "raise")

# The pattern of true elements that is repeated over an unknown mask: NOTE [Assumed masks].
MASKS: dict[str, tuple[bool, ...]] = {"all": (True,), "half": (True, False), "none": (False,)}

# All parts of policies that need no argument, for suggestions.
PARTS = (
    *ANSWERS,
    *(f"masks={name}" for name in MASKS),
    *(f"{prefix}{name}" for prefix in ("routing=", "") for name in ("balanced", "same", "worst")),
)

NOT_A_LINE = "Expected the number of a source line, which is at least 1, got {!r}."

LINE = re.compile(r"(?P<file>[^=]+):(?P<line>\d+)=(?P<part>.+)", re.DOTALL)


@dataclass(frozen=True)
class LinePolicy:
    """The policy for what one source line does, including the functions that it calls.

    Args:
        file: The end of the path of the file.
        line: The number of the line, at least 1.
        policy: The policy, which has none for single lines.

    Attributes:
        text: The text of the policy, as `ValuePolicy.parse()` takes it.

    Raises:
        ValueError: `line` is less than 1, or `policy` has policies for single lines.
    """

    file: str
    line: int
    policy: ValuePolicy
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", self.file.removeprefix("./"))
        place = f"{self.file}:{self.line}"
        if self.line < 1:
            raise ValueError(NOT_A_LINE.format(place))
        if self.policy.lines:
            raise ValueError(f"The policy for the line {place} cannot have policies for other lines.")
        object.__setattr__(self, "text", ",".join(f"{place}={part}" for part in str(self.policy).split(",")))

    def matches(self, frame: FrameType) -> bool:
        """Return true if `frame` executes this line."""
        return frame.f_lineno == self.line and f"/{frame.f_code.co_filename}".endswith(f"/{self.file}")


@dataclass(frozen=True)
class ValuePolicy:
    """How to answer reads of unknown values. `str()` returns its text, as arguments `values=` and `--values` take it.

    Args:
        answer: `assume`; `zero`, with which unknown numbers are 0; or `raise`, with which reading such a value raises
            an error, and which cannot be combined with the others.
        masks: The elements of masks that are true: `all`, `half` or `none`. Default: `none` with `zero`, else `all`.
        routing: The positions that are chosen: `balanced`, `same`, `worst` or `histogram:FILE`.
        lines: The policies for single lines.

    Raises:
        ValueError: An argument has another value.

    Example:
        >>> str(ValuePolicy(masks="half", lines=(LinePolicy("train.py", 120, ValuePolicy(routing="worst")),)))
        'assume,masks=half,routing=balanced,train.py:120=assume,train.py:120=masks=all,train.py:120=routing=worst'
    """

    answer: str = "assume"
    masks: str = ""
    routing: str = "balanced"
    lines: tuple[LinePolicy, ...] = ()

    def __post_init__(self) -> None:
        if not self.masks:
            object.__setattr__(self, "masks", "none" if self.answer == "zero" else "all")
        for name, known in (("answer", ANSWERS), ("masks", MASKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}`: expected {' or '.join(known)}, got {getattr(self, name)!r}.")
        _check_routing(self.routing, f"routing={self.routing}")
        object.__setattr__(self, "lines", tuple(self.lines))
        if wrong := [line for line in self.lines if not isinstance(line, LinePolicy)]:
            raise TypeError(f"`lines`: expected LinePolicy objects, got {wrong[0]!r}.")
        if self.answer == "raise" and self.lines:
            raise ValueError("`raise` cannot be combined with other value policies, got policies for single lines.")

    def __str__(self) -> str:
        if self.answer == "raise":
            return self.answer
        return ",".join(
            [self.answer, f"masks={self.masks}", f"routing={self.routing}", *(line.text for line in self.lines)]
        )

    @classmethod
    def parse(cls, text: str) -> ValuePolicy:
        """Return the policy for `text`, such as `assume,masks=half,routing=same` or `zero,train.py:120=worst`.

        Raises:
            ValueError: `text` is not a valid policy.
        """
        everywhere: list[str] = []
        of_lines: dict[tuple[str, int], list[re.Match[str]]] = {}
        for part in text.split(","):
            match = LINE.fullmatch(part)
            if match is None:
                everywhere.append(part)
            else:
                of_lines.setdefault((match["file"].removeprefix("./"), int(match["line"])), []).append(match)
        program = cls()._with(_merged(everywhere, text))
        return replace(program, lines=tuple(program._of_line(*place, found) for place, found in of_lines.items()))

    def behind(self, kind: int) -> list[str]:
        """Return the policies for the whole program that values of this kind depend on, in the syntax of a policy."""
        names = [name for name, bits in (("masks", _C.BY_MASKS), ("routing", _C.BY_ROUTING)) if kind & bits == bits]
        return [f"{name}={getattr(self, name)}" for name in names]

    def line_of(self, frame: FrameType | None) -> LinePolicy | None:
        """Return the policy of the innermost line, of `frame` or its callers, that has one."""
        while frame is not None and self.lines:
            for line in self.lines:
                if line.matches(frame):
                    return line
            frame = frame.f_back
        return None

    def _with(self, changes: dict[str, Any]) -> ValuePolicy:
        masks = {"masks": ""} if changes.get("answer") in ("zero", "assume") else {}
        return replace(self, **{**masks, **changes})

    def _of_line(self, file: str, line: int, found: list[re.Match[str]]) -> LinePolicy:
        text = ",".join(match[0] for match in found)
        if line < 1:
            raise ValueError(NOT_A_LINE.format(text))
        policy = LinePolicy(file, line, self._with(_merged([match["part"] for match in found], text)))
        object.__setattr__(policy, "text", text)  # as it was written, for reports
        return policy


def as_policy(values: str | ValuePolicy) -> ValuePolicy:
    """Return the policy for an argument `values`.

    Raises:
        TypeError: `values` is of another type.
        ValueError: `values` is not the text of a policy, or combines `raise` with other policies.
    """
    if isinstance(values, str):
        return ValuePolicy.parse(values)
    if not isinstance(values, ValuePolicy):
        raise TypeError(f"`values`: expected a policy such as 'raise' or 'assume', got {values!r}.")
    if values.answer == "raise" and values != ValuePolicy("raise"):
        raise ValueError(f"`raise` cannot be combined with other value policies, got {values!r}.")
    return values


def _merged(parts: list[str], text: str) -> dict[str, str]:
    """Return the attributes that `parts` set, all for the whole program or all for one line."""
    changes: dict[str, str] = {}
    for name, choice in (change for part in parts for change in _changes(part, text)):
        if changes.setdefault(name, choice) != choice:
            raise ValueError(
                f"Expected one value policy for {name}, got both {changes[name]} and {choice} in {text!r}."
            )
    if changes.get("answer") == "raise" and len(changes) > 1:
        raise ValueError(f"`raise` cannot be combined with other value policies, got {text!r}.")
    return changes


def _changes(part: str, text: str) -> Iterator[tuple[str, str]]:
    """Return the attribute of a policy that `part` sets, and its value."""
    name, equals, choice = part.partition("=")
    if part in ANSWERS:
        yield "answer", part
    elif name == "masks" and choice in MASKS:
        yield name, choice
    elif name == "routing" and equals:
        _check_routing(choice, text)
        yield name, choice
    elif name == "histogram" and choice:
        _check_routing(f"histogram:{choice}", text)
        yield "routing", f"histogram:{choice}"
    elif part.partition(":")[0] in ("balanced", "same", "worst"):
        _check_routing(part, text)
        yield "routing", part
    else:
        raise ValueError(
            f"Expected value policies of the form {'|'.join(ANSWERS)}, masks={'|'.join(MASKS)}, "
            f"routing={'|'.join(ROUTING)}, or FILE:LINE=POLICY, got {part!r} in {text!r}."
        )


def _check_routing(choice: str, text: str) -> None:
    try:
        make_routing(choice)
    except ValueError as error:
        raise ValueError(f"{str(error)[:1].upper()}{str(error)[1:]}, for the value policy {text!r}.") from error
