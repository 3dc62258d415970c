"""The purposes of memory."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["PINNED", "Category", "Phase"]

PINNED = "pinned"  # names pinned memory of the host, in place of a device


class Category(IntEnum):
    """The purpose of an allocation, as in `MemoryCategory` (csrc/extensions/memory/timeline.h).

    An allocation with several purposes counts for the last of them in this list.
    """

    TEMPORARY = 0
    """A result that is not kept for the backward pass."""
    ACTIVATION = 1
    """Made by a module, and alive when a backward pass begins."""
    INPUT = 2
    """Made outside of modules, backward passes and optimizers, such as a batch."""
    COMMUNICATION = 3
    """Made by collectives or for them, or a flat buffer that is passed to one."""
    WORKSPACE = 4
    """Allocated by a kernel besides its results."""
    GRADIENT = 5
    """Gradients of parameters, and buffers to which a backward pass adds gradients."""
    OPTIMIZER_STATE = 6
    PARAMETER = 7
    """Parameters and buffers of modules, also those that a sharded module has gathered."""
    CACHE = 8
    """Carried from one forward pass of a module to the next without gradients, such as keys and values."""

    @property
    def label(self) -> str:
        """The name in reports."""
        return LABELS[self]


LABELS = {
    Category.TEMPORARY: "temporaries",
    Category.ACTIVATION: "activations",
    Category.INPUT: "inputs",
    Category.COMMUNICATION: "communication",
    Category.WORKSPACE: "workspaces",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.PARAMETER: "parameters",
    Category.CACHE: "caches",
}


class Phase(IntEnum):
    """The phase of the program, as in `MemoryPhase`."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3
