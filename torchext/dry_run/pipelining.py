"""Pipeline stages whose neighbors do not exist.

Before the first step the stages vote on whether all of them have the shapes that they exchange. They send tensors from
stage to stage, and read them. They do so if the other ranks run in their own processes (`messages.py`). Otherwise each
stage decides alone, and assumes that the others were constructed in the same way. A stage without shapes would receive
them from its neighbors, which raises an error.

A traced stage is moved to its device as usual.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend

from .. import _C
from ..internals.patching import Function
from ..internals.torch_release import DIFFERENCES
from .current import current, while_world_is_open

__all__: list[str] = []

_VOTING, _MEETING = DIFFERENCES["pipelines_vote"], DIFFERENCES["pipelines_meet"]
_SCHEDULE = "torch.distributed.pipelining.schedules:_PipelineSchedule"
_VOTES = "reads the votes of other stages"

_are_stages_meeting: ContextVar[bool] = ContextVar("_are_stages_meeting", default=False)


def _are_others_running() -> bool:
    world = current()
    return world is not None and world.messages is not None


if _VOTING.applies:

    @while_world_is_open.replaces(_SCHEDULE, "_warmup_p2p", reason=_VOTES, releases=_VOTING.releases)
    def _warmup_p2p(original: Function, self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        stage_module: Any = sys.modules["torch.distributed.pipelining.stage"]
        if _are_others_running() or not all(isinstance(stage, stage_module.PipelineStage) for stage in stages):
            original(self, stages, has_backward, p2p_done)
            return
        mode = stage_module.InferenceMode
        for stage in stages:
            is_dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC


if _MEETING.applies:

    @while_world_is_open.replaces(
        _SCHEDULE, "_initialize_pipeline_distributed_state", reason=_VOTES, releases=_MEETING.releases
    )
    def _initialize_pipeline_distributed_state(original: Function, /, self: Any, *args: Any, **kwargs: Any) -> None:
        """Report the backend `fake` while stages vote. Since 2.15 they decide alone then, and name missing shapes."""
        before = _are_stages_meeting.set(not _are_others_running())
        try:
            original(self, *args, **kwargs)
        finally:
            _are_stages_meeting.reset(before)

    @while_world_is_open.replaces(  # `torch.distributed`, after the program has imported pipelines
        "torch.distributed.pipelining.schedules:dist",
        "get_backend",
        reason="decides whether other stages exist",
        releases=_MEETING.releases,
    )
    def _get_backend(original: Function, group: dist.ProcessGroup | None = None) -> Any:
        return Backend.FAKE if _are_stages_meeting.get() else original(group)


@while_world_is_open.replaces(
    "torch.distributed.pipelining.stage:_PipelineStage",
    "_move_submod_to_device",
    reason="since 2.14, does not move stages with fake parameters",
)
def _move_submod_to_device(original: Function, self: Any) -> None:
    """Move fake parameters like real ones, unless they are on the meta device."""
    parameters = list(self.submod.parameters())
    if any(_C.is_fake(parameter) for parameter in parameters) and not any(one.is_meta for one in parameters):
        self.submod.to(self.device)
    else:
        original(self)
