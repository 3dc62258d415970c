"""Takes out of the tests what costs each of them, or each sample of an operator, more than what it tests."""

from __future__ import annotations

import gc
import sys
import unittest
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["cut_fixed_costs"]


def cut_fixed_costs() -> None:
    """Is called after the collection, when all test files have been imported."""
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.traceback = _NoStacks  # type: ignore[attr-defined]
    for name in ("common_utils", "opinfo.core"):
        harness = sys.modules.get(f"torch.testing._internal.{name}")
        if harness is not None:
            harness.extract_test_fn = _running_test  # type: ignore[attr-defined]
    # What is there now, above all the lists of operators and the tests themselves, stays until the end. The garbage
    # collector need not go through it each time that a test asks for it.
    gc.collect()
    gc.freeze()


class _NoStacks:
    """Stands in for the module `traceback` where PyTorch seeds devices that are not initialized.

    With each seed it keeps a formatted stack, for an error that their initialization may raise. The harness for `op_db`
    seeds before each sample.
    """

    @staticmethod
    def format_stack() -> list[str]:
        return []


def _running_test() -> Callable[..., Any] | None:
    """Returns what `extract_test_fn` of PyTorch's harness does, but reads no sources."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        test = frame.f_locals.get("self")
        if isinstance(test, unittest.TestCase):
            *_, class_name, name = test.id().rsplit(".", 2)
            if class_name == type(test).__name__ and name.startswith("test"):
                function: Callable[..., Any] = getattr(test, name).__func__
                return function
        frame = frame.f_back
    return None
