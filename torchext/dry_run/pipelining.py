"""Pipeline stages whose neighbors do not exist.

Before the first step the stages vote on whether all of them have the shapes that they exchange. They send tensors from
stage to stage, and read them. They do so if the other ranks run in their own processes (`messages.py`). Otherwise each
stage decides alone, and assumes that the others were constructed in the same way. A stage without shapes would receive
them from its neighbors, which raises an error.

A traced stage is moved to its device as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend

from .. import _C
from ..internals.torch_release import DIFFERENCES
from .current import current, while_world_is_open

__all__ = ["patch_pipelining"]

_are_stages_meeting: ContextVar[bool] = ContextVar("_are_stages_meeting", default=False)


def patch_pipelining(schedules: Any) -> None:
    """Declare the patches of `torch.distributed.pipelining.schedules`."""
    schedule = schedules._PipelineSchedule
    patch = while_world_is_open.patch
    votes = "reads the votes of other stages"
    voting, meeting = DIFFERENCES["pipelines_vote"], DIFFERENCES["pipelines_meet"]
    if voting.applies:
        patch(schedule, "_warmup_p2p", _deciding_alone, votes, releases=voting.releases)
    if meeting.applies:
        name, asks = "_initialize_pipeline_distributed_state", "decides whether other stages exist"
        patch(schedule, name, _with_groups_called_fake, votes, releases=meeting.releases)
        patch(dist, "get_backend", _returning_fake_while_meeting, asks, releases=meeting.releases)
    stage: Any = sys.modules["torch.distributed.pipelining.stage"]
    keeps = "since 2.14, does not move stages with fake parameters"
    patch(stage._PipelineStage, "_move_submod_to_device", _moving_fakes, keeps)


def _are_others_running() -> bool:
    world = current()
    return world is not None and world.messages is not None


def _deciding_alone(original: Callable[..., None]) -> Callable[..., None]:
    def _warmup_p2p(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        stage_module: Any = sys.modules["torch.distributed.pipelining.stage"]
        if _are_others_running() or not all(isinstance(stage, stage_module.PipelineStage) for stage in stages):
            original(self, stages, has_backward, p2p_done)
            return
        mode = stage_module.InferenceMode
        for stage in stages:
            is_dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC

    return _warmup_p2p


def _with_groups_called_fake(original: Callable[..., None]) -> Callable[..., None]:
    """Report the backend `fake` while stages vote. Since 2.15 they decide alone then, and name missing shapes."""

    def _initialize_pipeline_distributed_state(self: Any, *args: Any, **kwargs: Any) -> None:
        before = _are_stages_meeting.set(not _are_others_running())
        try:
            original(self, *args, **kwargs)
        finally:
            _are_stages_meeting.reset(before)

    return _initialize_pipeline_distributed_state


def _returning_fake_while_meeting(original: Callable[..., str]) -> Callable[..., str]:
    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        return Backend.FAKE if _are_stages_meeting.get() else original(group)

    return get_backend


def _moving_fakes(original: Callable[..., None]) -> Callable[..., None]:
    """Move fake parameters like real ones, unless they are on the meta device."""

    def _move_submod_to_device(self: Any) -> None:
        parameters = list(self.submod.parameters())
        if any(_C.is_fake(parameter) for parameter in parameters) and not any(one.is_meta for one in parameters):
            self.submod.to(self.device)
        else:
            original(self)

    return _move_submod_to_device
