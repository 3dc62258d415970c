"""Distributed checkpoints in a dry run: this rank saves and loads its part alone.

In a job, one rank makes the global plan from the plans of all ranks. In a dry run the others do not exist, so a
checkpoint and its metadata cover only the part of this rank. On the command line, PyTorch's code writes it, with
tensors as `torch.save()` describes them (`saving.py`), and reads it again. In `world()` nothing is written, and the
save returns the metadata. Loading reads existing files without the other ranks. Where rank 0 sends a whole state dict,
every other rank receives a description of the state dict that it already has.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..fake.values import note_reading, while_values_are_assumed
from ..internals.patching import Function
from .current import current, while_world_is_open
from .objects import root_sending
from .saving import NOT_WRITTEN, files_apart, holds_fakes

__all__: list[str] = []

CHECKPOINT = "torch.distributed.checkpoint"
ALONE = "receives the global plan from rank 0"


# ---- Saving


@while_values_are_assumed.replaces(
    f"{CHECKPOINT}._state_dict_stager:StateDictStager", "stage", reason="copies the memory of tensors"
)
def _stage(original: Function, /, self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    return state_dict if holds_fakes(state_dict) else original(self, state_dict, *args, **kwargs)


@while_values_are_assumed.replaces(f"{CHECKPOINT}.state_dict_saver", "_save_state_dict", reason=ALONE)
def _save_state_dict(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    state_dict = given.arguments["state_dict"]
    if files_apart() is not None or (current() is None and not holds_fakes(state_dict)):
        return _without_dist(original, *args, **kwargs)
    from torch.distributed.checkpoint import default_planner

    planner = given.arguments["planner"] or default_planner.DefaultSavePlanner()
    is_coordinator = dist.get_rank(given.arguments["process_group"]) == given.arguments["coordinator_rank"]
    planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    note_reading("checkpoint.save", NOT_WRITTEN, sys._getframe(1))
    _, metadata = default_planner.create_default_global_save_plan([plan])
    return metadata


@while_world_is_open.replaces(
    f"{CHECKPOINT}.state_dict_saver",
    "_ProcessBasedAsyncCheckpointExecutor",
    reason="starts a process that waits for other ranks",
)
def _make_executor(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    saver: Any = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
    return (original if current() is None else saver._ThreadBasedAsyncCheckpointExecutor)(*args, **kwargs)


@while_world_is_open.replaces(
    f"{CHECKPOINT}.filesystem:_FileSystemWriter",
    "prepare_global_plan",
    reason="numbers files by the plans of all ranks",
)
def _prepare_global_plan(original: Function, self: Any, plans: list[Any]) -> list[Any]:
    prepared: list[Any] = original(self, plans)
    if current() is None or not dist.is_initialized():
        return prepared
    prefix = sys.modules["torch.distributed.checkpoint.filesystem"]._StoragePrefix(f"__{dist.get_rank()}_")
    return [replace(plan, storage_data=prefix) for plan in prepared]


@while_world_is_open.replaces(
    f"{CHECKPOINT}.default_planner", "_validate_global_plan", reason="needs the plans of all ranks"
)
def _validate_global_plan(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if (job := current()) is None or job.size == 1:
        return found
    return True if isinstance(found, bool) else []  # since 2.12 a list of errors


# ---- Loading


@while_world_is_open.replaces(f"{CHECKPOINT}.state_dict_loader", "_load_state_dict", reason=ALONE)
def _without_dist(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    if current() is not None:
        given.arguments["no_dist"] = True
    return original(*given.args, **given.kwargs)


@while_world_is_open.replaces(
    f"{CHECKPOINT}.default_planner", "create_default_local_load_plan", reason="needs the files of all ranks"
)
def _create_default_local_load_plan(
    original: Function, /, state_dict: Mapping[str, Any], metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    if current() is not None and _is_derived_from_files(metadata):
        known = {key: _of_whole(saved, state_dict.get(key)) for key, saved in metadata.state_dict_metadata.items()}
        metadata = replace(metadata, state_dict_metadata=known)
    return original(state_dict, metadata, *args, **kwargs)


def _is_derived_from_files(metadata: Any) -> bool:
    """Whether the sizes are the largest ones in files of safetensors, instead of those that were saved with them."""
    return any(type(place).__name__ == "_HFStorageInfo" for place in (metadata.storage_data or {}).values())


def _of_whole(saved: Any, tensor: Any) -> Any:
    """Give a sharded tensor its whole size if only this rank's part was saved, from which a reader derived the size."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor) or getattr(saved, "size", tensor.size()) == tensor.size():
        return saved
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    is_part = saved.size == torch.Size([first + count for first, count in zip(offset, shape, strict=True)])
    return replace(saved, size=tensor.size()) if is_part else saved


@while_world_is_open.replaces(
    f"{CHECKPOINT}.state_dict", "_broadcast_state_dict", reason="receives the keys from rank 0"
)
def _broadcast_state_dict(
    original: Function, /, full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    if dist.get_rank() == 0:
        original(full_state_dict, local_state_dict, *args, **kwargs)
        return
    with root_sending([_described(local_state_dict)]):
        original(full_state_dict, local_state_dict, *args, **kwargs)


def _described(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Describe tensors as rank 0 does: scalars unchanged, other tensors by their size and dtype."""
    utils: Any = sys.modules["torch.distributed._state_dict_utils"]
    return {
        key: utils._TensorInfo(value.size(), value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() > 0
        else value
        for key, value in state_dict.items()
    }
