"""Patches for modules of PyTorch that are slow to import, and that a program may import at any time in a world."""

from __future__ import annotations

from ..fake.collectives import teach_offsets
from ..internals.imports import patch_imported
from .optimizer_shards import patch_optimizer_shards
from .pipelining import patch_pipelining
from .random_state import patch_distributed_tensors

__all__ = ["patch_late_imports"]


def patch_late_imports() -> None:
    """Declare the patches of imported modules. Called when a world begins, for each group and each record."""
    teach_offsets()
    patch_imported("torch.distributed.fsdp._optim_utils", ("_optim_state_dict",), patch_optimizer_shards)
    patch_imported("torch.distributed.pipelining.schedules", (), patch_pipelining)
    patch_imported("torch.distributed.tensor._random", (), patch_distributed_tensors)
