"""Covering arrays: few cases, in which each pair of values of two parameters occurs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from allpairspy import AllPairs

__all__ = ["covering_array", "parametrize_pairs"]


def covering_array(*values: Sequence[object]) -> list[tuple[object, ...]]:
    """Return cases for independent parameters with these values."""
    return [tuple(case) for case in AllPairs([list(one) for one in values])]


def parametrize_pairs(**values: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test whose three or more parameters are independent by a covering array.

    The cases detect every defect that depends on at most two parameters, as the product would. A product of two
    parameters is its own covering array: mark such a test as `cases`.
    """
    cases = covering_array(*values.values())
    return pytest.mark.parametrize(tuple(values), cases, ids=["-".join(map(str, case)) for case in cases])
