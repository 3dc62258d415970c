"""Covering arrays: few cases, in which each pair of values of two parameters occurs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from allpairspy import AllPairs

__all__ = ["parametrize_pairs"]


def parametrize_pairs(**values: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test whose three or more parameters are independent by a covering array.

    It shows all mistakes that depend on at most two parameters, as their product would. A product of two parameters is
    its own covering array: mark such a test as `cases`.
    """
    return pytest.mark.parametrize(tuple(values), [tuple(case) for case in AllPairs(OrderedDict(values))])
