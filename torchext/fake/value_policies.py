"""How to answer reads of values that do not exist, for the whole program and for single lines: NOTE [Assumed values].

A policy is a list of parts, separated by commas: `assume,masks=half,train.py:120=worst`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from .. import _C
from .routing import ROUTING, make_routing

__all__ = ["ANSWERS", "MASKS", "PARTS", "LinePolicy", "ValuePolicy"]

ANSWERS = ("assume", "zero", "raise")

# The pattern of true elements that is repeated over an unknown mask: NOTE [Assumed masks].
MASKS = {"all": (True,), "half": (True, False), "none": (False,)}

# All parts of policies that need no argument, for suggestions.
PARTS = (
    *ANSWERS,
    *(f"masks={name}" for name in MASKS),
    *(f"{prefix}{name}" for prefix in ("routing=", "") for name in ("balanced", "same", "worst")),
)

LINE = re.compile(r"(?P<file>[^=]+):(?P<line>\d+)=(?P<part>.+)", re.DOTALL)


@dataclass(frozen=True)
class LinePolicy:
    """The policy for what one source line does, including the functions that it calls.

    Attributes:
        file: The end of the path of the file.
        line: The number of the line.
        policy: The policy.
        text: The policy as it was written.
    """

    file: str
    line: int
    policy: ValuePolicy
    text: str

    def matches(self, frame: FrameType) -> bool:
        """Return true if `frame` executes this line."""
        return frame.f_lineno == self.line and f"/{frame.f_code.co_filename}".endswith(f"/{self.file}")


@dataclass(frozen=True)
class ValuePolicy:
    """How to answer reads of unknown values.

    Attributes:
        answer: `assume`; `zero`, with which unknown numbers are 0 and masks select nothing; or `raise`, with which
            reading such a value raises an error.
        masks: The elements of masks that are true, a key of `MASKS`.
        routing: The positions that are chosen: `make_routing()`.
        lines: The policies for single lines.
    """

    answer: str = "assume"
    masks: str = "all"
    routing: str = "balanced"
    lines: tuple[LinePolicy, ...] = ()

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
        changes = _merged(everywhere, text)
        if changes.get("answer") == "raise" and of_lines:
            raise ValueError(f"`raise` cannot be combined with other value policies, got {text!r}.")
        program = cls()._with(changes)
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
        masks = {"zero": {"masks": "none"}, "assume": {"masks": "all"}}.get(changes.get("answer", ""), {})
        return replace(self, **{**masks, **changes})

    def _of_line(self, file: str, line: int, found: list[re.Match[str]]) -> LinePolicy:
        text = ",".join(match[0] for match in found)
        if line == 0:
            raise ValueError(f"Expected the number of a source line, which is at least 1, got {text!r}.")
        return LinePolicy(file, line, self._with(_merged([match["part"] for match in found], text)), text)


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
