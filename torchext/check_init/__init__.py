"""The check of initial weights: the ranks of a mesh against one process, bit for bit."""

from __future__ import annotations

from .comparing import InitCheck, MeshCheck, TensorCheck, check_init

__all__ = ["InitCheck", "MeshCheck", "TensorCheck", "check_init"]
