"""Excludes frames from compilation by Dynamo, without importing it."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch

__all__ = ["skip_frames"]


def skip_frames(code: CodeType, *, with_callees: bool = False) -> None:
    """Keep Dynamo from compiling calls of `code` that follow a graph break. Dynamo still traces into it from outside.

    Dynamo compiles each function that is called after a graph break, except those in PyTorch's files.

    Args:
        code: The code of the function.
        with_callees: Whether to exclude the functions that it calls as well.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    frames.set_code_exec_strategy(code, strategy)
