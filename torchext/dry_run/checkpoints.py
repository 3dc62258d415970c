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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..fake.values import note_reading, while_values_are_assumed
from ..internals.imports import patching
from ..internals.leases import Lease
from ..internals.patching import Make
from .current import current, while_world_is_open
from .objects import root_sending
from .saving import NOT_WRITTEN, files_apart, holds_fakes

__all__ = ["checkpoints_of_one_rank"]


@contextmanager
def checkpoints_of_one_rank() -> Iterator[None]:
    """Save and load checkpoints without the other ranks in the block. It may import their modules."""
    with ExitStack() as imports:
        for name in _PATCHES:
            imports.enter_context(patching(f"torch.distributed.checkpoint.{name}", (), _patch))
        yield


def _patch(module: ModuleType) -> None:
    for lease, owner, function, make, reason in _PATCHES[module.__name__.rpartition(".")[2]]:
        patched = getattr(module, owner) if owner else module
        if hasattr(patched, function):
            lease.patch(patched, function, make, reason)


def _alone(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if current() is not None:
            given.arguments["no_dist"] = True
        return original(*given.args, **given.kwargs)

    return call


def _only_planning(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    writing = _alone(original)

    def _save_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        state_dict = given.arguments["state_dict"]
        if files_apart() is not None or (current() is None and not holds_fakes(state_dict)):
            return writing(*args, **kwargs)
        from torch.distributed.checkpoint import default_planner

        planner = given.arguments["planner"] or default_planner.DefaultSavePlanner()
        is_coordinator = dist.get_rank(given.arguments["process_group"]) == given.arguments["coordinator_rank"]
        planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
        plan = planner.create_local_plan()
        note_reading("checkpoint.save", NOT_WRITTEN, sys._getframe(1))
        _, metadata = default_planner.create_default_global_save_plan([plan])
        return metadata

    return _save_state_dict


def _in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_executor(*args: Any, **kwargs: Any) -> Any:
        saver: Any = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
        return (original if current() is None else saver._ThreadBasedAsyncCheckpointExecutor)(*args, **kwargs)

    return make_executor


def _naming_files_by_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_global_plan(self: Any, plans: list[Any]) -> list[Any]:
        prepared: list[Any] = original(self, plans)
        if current() is None or not dist.is_initialized():
            return prepared
        prefix = sys.modules["torch.distributed.checkpoint.filesystem"]._StoragePrefix(f"__{dist.get_rank()}_")
        return [replace(plan, storage_data=prefix) for plan in prepared]

    return prepare_global_plan


def _without_other_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_global_plan(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if (job := current()) is None or job.size == 1:
            return found
        return True if isinstance(found, bool) else []  # since 2.12 a list of errors

    return _validate_global_plan


def _with_sizes_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_default_local_load_plan(state_dict: Mapping[str, Any], metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None and _is_derived_from_files(metadata):
            known = {key: _of_whole(saved, state_dict.get(key)) for key, saved in metadata.state_dict_metadata.items()}
            metadata = replace(metadata, state_dict_metadata=known)
        return original(state_dict, metadata, *args, **kwargs)

    return create_default_local_load_plan


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


def _not_staging_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def stage(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return state_dict if holds_fakes(state_dict) else original(self, state_dict, *args, **kwargs)

    return stage


def _receiving_own_tensors(original: Callable[..., None]) -> Callable[..., None]:
    def _broadcast_state_dict(
        full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if dist.get_rank() == 0:
            original(full_state_dict, local_state_dict, *args, **kwargs)
            return
        with root_sending([_described(local_state_dict)]):
            original(full_state_dict, local_state_dict, *args, **kwargs)

    return _broadcast_state_dict


def _described(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Describe tensors as rank 0 does: scalars unchanged, other tensors by their size and dtype."""
    utils: Any = sys.modules["torch.distributed._state_dict_utils"]
    return {
        key: utils._TensorInfo(value.size(), value.dtype)
        if isinstance(value, torch.Tensor) and value.dim() > 0
        else value
        for key, value in state_dict.items()
    }


# The lease, the class or "", the function, the maker of its replacement, and the reason.
_PATCHES: dict[str, list[tuple[Lease, str, str, Make, str]]] = {
    "_state_dict_stager": [
        (while_values_are_assumed, "StateDictStager", "stage", _not_staging_fakes, "copies the memory of tensors"),
    ],
    "default_planner": [
        (while_world_is_open, "", "_validate_global_plan", _without_other_ranks, "needs the plans of all ranks"),
        (while_world_is_open, "", "create_default_local_load_plan", _with_sizes_of_all, "needs the files of all ranks"),
    ],
    "filesystem": [
        (
            while_world_is_open,
            "_FileSystemWriter",
            "prepare_global_plan",
            _naming_files_by_rank,
            "numbers files by the plans of all ranks",
        ),
    ],
    "state_dict": [
        (while_world_is_open, "", "_broadcast_state_dict", _receiving_own_tensors, "receives the keys from rank 0"),
    ],
    "state_dict_loader": [
        (while_world_is_open, "", "_load_state_dict", _alone, "receives the global plan from rank 0"),
    ],
    "state_dict_saver": [
        (while_values_are_assumed, "", "_save_state_dict", _only_planning, "receives the global plan from rank 0"),
        (
            while_world_is_open,
            "",
            "_ProcessBasedAsyncCheckpointExecutor",
            _in_this_process,
            "starts a process that waits for other ranks",
        ),
    ],
}
