"""Pipeline stages whose neighbours do not exist.

Before the first step the stages vote on whether all of them were given the shapes that they exchange, by tensors that
are sent from stage to stage and read. Here each stage decides for itself: the others are taken to be built as it is. A
stage that was given no shapes asks its neighbours for theirs, which nobody can answer (`recv_object_list()`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .current import while_world_is_open

__all__ = ["teach_pipelining"]

_taught: set[int] = set()


def teach_pipelining() -> None:
    """Declares the patch, if pipelining is imported; that takes long, and most programs need none."""
    schedules: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None or id(schedules) in _taught:
        return
    _taught.add(id(schedules))
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        while_world_is_open.patch(
            schedules._PipelineSchedule, "_warmup_p2p", _deciding_alone, "reads what other stages have voted"
        )


def _deciding_alone(original: Callable[..., None]) -> Callable[..., None]:
    def _warmup_p2p(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        stage_module: Any = sys.modules["torch.distributed.pipelining.stage"]
        if not all(isinstance(stage, stage_module.PipelineStage) for stage in stages):
            original(self, stages, has_backward, p2p_done)
            return
        mode = stage_module.InferenceMode
        for stage in stages:
            is_dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC

    return _warmup_p2p
