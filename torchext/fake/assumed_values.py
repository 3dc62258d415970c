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
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .. import _C
from ..errors import TorchextFutureWarning
from ..tools.dispatch_keys import without_our_keys
from ..tools.leases import Lease
from ..tools.source_lines import place_of, users_frame

__all__ = [
    "KINDS",
    "AssumedValue",
    "AssumedValues",
    "ValuePolicy",
    "assumes_values",
    "assuming_values",
    "note_reading",
    "programs_frame",
    "while_values_are_assumed",
]

ANSWERS = ("assume", "raise")

# The pattern of true elements that is repeated over an unknown mask: NOTE [Assumed masks].
MASKS = {"all": (True,), "half": (True, False), "none": (False,)}

# Distance in rows between each row of chosen positions and the previous row: NOTE [Assumed indices]. With `balanced`,
# all experts get the same number of tokens; with `same`, all tokens choose the same experts.
ROUTING = {"balanced": 1, "same": 0}

# Files whose functions call kernels for dispatch modes.
OF_MODES = {
    str(Path(torch.__file__).parent / name)
    for name in ("_compile.py", "_ops.py", "_dynamo/eval_frame.py", "utils/_stats.py", "utils/flop_counter.py")
} | {
    str(Path(__file__).parent / "patches" / name)
    for name in ("tensors.py", "python_data.py")  # before 2.13 they call operators for dispatch modes; they patch reads
}

# Kinds of assumed values. Kinds that affect control flow come first.
TRUTH, SHAPE, INTEGER, NUMBER, OTHER = KINDS = ("truth value", "shape", "integer", "number", "other value")

# Largest number of distinct answers that a report shows for one place.
MOST_ANSWERS = 3

# The directory of Python's own modules, and the names of its package directories. Any prefix counts, because an
# environment may be layered on another one.
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
FOLDERS_OF_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

# Words in a source line that checks whether values are finite or close: `isfinite` of `torch`, `math` and libraries.
FINITENESS_CHECKS = ("isfinite", "is_finite", "all_finite", "allclose")


@dataclass(frozen=True)
class ValuePolicy:
    """How to answer reads of unknown values.

    Attributes:
        answer: `assume`, or `raise`: reading such a value raises an error.
        masks: The elements of masks that are true, a key of `MASKS`.
        routing: The positions that are chosen, a key of `ROUTING`.
    """

    answer: str = "assume"
    masks: str = "all"
    routing: str = "balanced"

    @classmethod
    def parse(cls, text: str) -> ValuePolicy:
        """Return the policy for `text`, such as `assume,masks=half,routing=same`.

        Raises:
            ValueError: `text` is not a valid policy.
        """
        answer, *parts = text.split(",")
        if answer not in ANSWERS:
            raise ValueError(f"Expected a value policy that begins with one of {', '.join(ANSWERS)}, got {text!r}.")
        if answer == "raise" and parts:
            raise ValueError(f"`raise` cannot be combined with other value policies, got {text!r}.")
        chosen = dict(part.partition("=")[::2] for part in parts)
        for name, policy in chosen.items():
            if policy not in TABLES.get(name, {}):
                known = " or ".join(f"{name}={'|'.join(table)}" for name, table in TABLES.items())
                raise ValueError(f"Expected value policies of the form {known}, got {text!r}.")
        return cls(answer, **chosen)

    def behind(self, kind: int) -> str:
        """Return the policies that values of this kind depend on, in the syntax of a policy."""
        names = [name for name, bits in (("masks", _C.BY_MASKS), ("routing", _C.BY_ROUTING)) if kind & bits == bits]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


TABLES: dict[str, dict[str, Any]] = {"masks": MASKS, "routing": ROUTING}


@dataclass(frozen=True)
class AssumedValue:
    """A place that has read values that do not exist.

    Attributes:
        line: The line of the program, not of a package, `file:line in function`.
        reader: The innermost Python function that has read the value. It may be PyTorch's.
        operator: The operator that reads.
        answer: The answer, or the first few distinct answers of many.
        kind: Truth value, integer, number, shape, or other value.
        policy: The policies that the answer depends on, such as `masks=all`, or empty.
        count: Number of reads.
    """

    line: str
    reader: str
    operator: str
    answer: str
    kind: str
    policy: str
    count: int


Site = tuple[str, str, str, str, str]  # line, reader, operator, kind, policy


class AssumedValues:
    """Answers reads of values and counts them.

    Attributes:
        latest: The place of the latest read, with its answer.
    """

    def __init__(self, policy: ValuePolicy | None = None) -> None:
        self.latest: AssumedValue | None = None
        self._policy = policy or ValuePolicy()
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
                1.0 if operator in ("aten::equal", "aten::allclose") or _checks_finiteness(frame) else _default(dtype)
            )
        shown = str(bool(value)) if dtype is torch.bool else str(int(value) if not dtype.is_floating_point else value)
        self.note(operator, shown, frame, _kind_of(dtype), values)
        return value

    def note_shape(self, operator: str, shape: str, values: int) -> None:
        """Count a shape that depends on assumed values."""
        self.note(operator, shape, _reader(sys._getframe(1)), SHAPE, values)

    def note(self, operator: str, answer: str, frame: FrameType, kind: str = OTHER, values: int = 0) -> None:
        """Count one read."""
        user = programs_frame()
        policy = self._policy.behind(values)
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

    def install(self) -> None:
        """Answer reads from now on."""
        with without_our_keys():
            masks = torch.tensor(MASKS[self._policy.masks])
        _C.assume_values(self.answer, self.note_shape, masks, ROUTING[self._policy.routing])


def _kind_of(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return TRUTH
    return NUMBER if dtype.is_floating_point or dtype.is_complex else INTEGER


def _default(dtype: torch.dtype) -> float:
    return float(_C.ASSUMED_NUMBER) if dtype.is_floating_point or dtype.is_complex else 0.0


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


def assumes_values() -> bool:
    """Return true if values are assumed now."""
    return bool(_assumed)


while_values_are_assumed = Lease("a dry run answers reads of values that do not exist")


@contextmanager
def assuming_values(policy: str = "assume") -> Iterator[AssumedValues]:
    """Let programs read values of fakes in the block, on all threads.

    Args:
        policy: `assume`, or `raise`: reading unknown values raises an error, as it does outside of the block. `assume`
            may be followed by policies for masks and for routing, as in `assume,masks=half,routing=same`:
            docs/how_to/dry_runs.md, "Choose values that do not exist". `zero` is a deprecated name of `assume`.

    Yields:
        The reads so far.

    Raises:
        ValueError: `policy` is not a valid policy.
    """
    if policy == "zero":
        warnings.warn("The value policy `zero` is deprecated, use `assume`.", TorchextFutureWarning, stacklevel=3)
        policy = "assume"
    parsed = ValuePolicy.parse(policy)
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


def _patch_reads() -> None:
    for name in ("tolist", "numpy", "__array__"):
        while_values_are_assumed.patch(
            torch.Tensor, name, partial(_reading_values, name=name), "reads memory without calling an operator"
        )


def _reading_values(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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

    return read


def _shown(value: torch.Tensor) -> str:
    """Format a few numbers unchanged."""
    if value.numel() > 8:
        return f"{value.numel()} numbers"
    with without_our_keys():
        return str(value.tolist())


while_values_are_assumed.declare(_patch_reads)
