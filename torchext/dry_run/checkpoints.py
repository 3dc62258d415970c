"""Distributed checkpoints in a dry run: this rank plans its part, and writes nothing.

In a job, one rank makes the global plan from the plans of all ranks. In a dry run the others do not exist, so the
metadata that a save returns cover only the part of this rank. Loading reads existing files without the other ranks.
Where rank 0 sends a whole state dict, every other rank receives a description of the state dict that it already has.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..fake.assumed_values import note_reading, while_values_are_assumed
from ..tools.leases import Lease
from ..tools.patching import Make
from .current import current, while_world_is_open
from .objects import root_sending
from .saving import NOT_WRITTEN, holds_fakes

__all__ = ["patch_checkpoints"]

_patched: set[int] = set()


def patch_checkpoints() -> None:
    """Declare the patches if distributed checkpoints are imported. The import is slow, and many programs need none."""
    for lease, name, owner, function, make, reason in _patches():
        module: Any = sys.modules.get(f"torch.distributed.checkpoint.{name}")
        patched = getattr(module, owner, None) if owner else module
        if hasattr(patched, function) and id(patched) not in _patched:
            _patched.add(id(patched))
            lease.patch(patched, function, make, reason)


def _patches() -> list[tuple[Lease, str, str, str, Make, str]]:
    """Return the lease, the module, the class or "", the function, the maker of its replacement, and the reason."""
    assumed, world = while_values_are_assumed, while_world_is_open
    return [
        (assumed, "state_dict_saver", "", "_save_state_dict", _only_planning, "writes the memory of tensors"),
        (assumed, "_state_dict_stager", "StateDictStager", "stage", _not_staging_fakes, "copies the memory of tensors"),
        (world, "state_dict_loader", "", "_load_state_dict", _reading_alone, "receives the global plan from rank 0"),
        (world, "state_dict", "", "_broadcast_state_dict", _receiving_own_tensors, "receives the keys from rank 0"),
    ]


def _only_planning(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _save_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        state_dict = given.arguments["state_dict"]
        if not holds_fakes(state_dict):
            return original(*args, **kwargs)
        from torch.distributed.checkpoint import default_planner

        planner = given.arguments["planner"] or default_planner.DefaultSavePlanner()
        is_coordinator = dist.get_rank(given.arguments["process_group"]) == given.arguments["coordinator_rank"]
        planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
        plan = planner.create_local_plan()
        note_reading("checkpoint.save", NOT_WRITTEN, sys._getframe(1))
        _, metadata = default_planner.create_default_global_save_plan([plan])
        return metadata

    return _save_state_dict


def _not_staging_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def stage(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return state_dict if holds_fakes(state_dict) else original(self, state_dict, *args, **kwargs)

    return stage


def _reading_alone(original: Callable[..., None]) -> Callable[..., None]:
    """Load by the plan of this rank alone. The global plan only checks for errors of other ranks."""
    signature = inspect.signature(original)

    def _load_state_dict(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if current() is not None:
            given.arguments["no_dist"] = True
        original(*given.args, **given.kwargs)

    return _load_state_dict


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
