"""Checkpoints of models that are larger than memory: from a recording to files, and from files to a model."""

from __future__ import annotations

from .loading import LoadedKeys, load_checkpoint
from .saving import CheckpointFile, CheckpointPlan, plan_checkpoint, save_safetensors

__all__ = [
    "CheckpointFile",
    "CheckpointPlan",
    "LoadedKeys",
    "load_checkpoint",
    "plan_checkpoint",
    "save_safetensors",
]


def __dir__() -> list[str]:
    return __all__
