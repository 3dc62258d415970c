"""The check of initial weights: the ranks of a mesh against one process, bit for bit."""

from __future__ import annotations

from .comparing import check_init
from .report import InitCheck, MeshCheck, TensorCheck

__all__ = ["InitCheck", "MeshCheck", "TensorCheck", "check_init"]
