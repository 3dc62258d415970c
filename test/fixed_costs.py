"""Removes fixed costs of each test, or of each sample of an operator, that exceed the test itself."""

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
    """Run after the collection, when all test files have been imported."""
    for device in (torch.cuda, torch.mtia, torch.xpu):
        device.traceback = _NoStacks  # type: ignore[attr-defined]
    for name in ("common_utils", "opinfo.core"):
        harness = sys.modules.get(f"torch.testing._internal.{name}")
        if harness is not None:
            harness.extract_test_fn = _running_test  # type: ignore[attr-defined]
    # Existing objects, mostly the lists of operators and the tests themselves, live until the end. The garbage
    # collector need not traverse them each time a test collects.
    gc.collect()
    gc.freeze()


class _NoStacks:
    """Replaces the module `traceback` where PyTorch seeds uninitialized devices.

    PyTorch stores a formatted stack with each seed, for an error that their initialization may raise. The harness for
    `op_db` seeds before each sample.
    """

    @staticmethod
    def format_stack() -> list[str]:
        return []


def _running_test() -> Callable[..., Any] | None:
    """Replace `extract_test_fn` in PyTorch's harness, without reading sources."""
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
