"""Parts of PyTorch that take long to be imported, and that a program may import at any time in a world."""

from __future__ import annotations

from ..fake.collectives import teach_offsets
from .checkpoints import teach_checkpoints
from .pipelining import teach_pipelining
from .random_state import teach_distributed_tensors

__all__ = ["teach_what_is_imported"]


def teach_what_is_imported() -> None:
    """Declares the patches of what is imported by now. Called when a world begins, for each group, and each record."""
    teach_offsets()
    teach_checkpoints()
    teach_pipelining()
    teach_distributed_tensors()
