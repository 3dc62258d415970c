"""Checkpoints of models that are larger than memory: from a recording to files, and from files to a model."""

from __future__ import annotations

from . import distributed  # noqa: F401  (declares its patches)
from .loading import LoadedKeys, load_safetensors
from .saving import save_safetensors

__all__ = ["LoadedKeys", "load_safetensors", "save_safetensors"]
