"""The record of a place that reads values that do not exist."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INTEGER", "KINDS", "NUMBER", "OTHER", "SHAPE", "TRUTH", "AssumedValue"]

# Kinds of assumed values. Kinds that affect control flow come first.
TRUTH, SHAPE, INTEGER, NUMBER, OTHER = KINDS = ("truth value", "shape", "integer", "number", "other value")


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
