"""Frames that Dynamo is to leave alone, without importing it."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch

__all__ = ["skip_frames"]


def skip_frames(code: CodeType, *, with_callees: bool = False) -> None:
    """Keeps Dynamo from compiling calls of `code` that a graph break leads to; it still traces into it from outside.

    It compiles each function that is called behind a graph break, but those in files of PyTorch's.

    Args:
        code: The code of the function.
        with_callees: Whether what the function calls is left alone as well.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    frames.set_code_exec_strategy(code, strategy)
