"""What memory is for."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Category", "Phase"]


class Category(IntEnum):
    """What an allocation is for, as `MemoryCategory` (csrc/memory/timeline.h) has it.

    What is known to be of a later kind is not of an earlier one.
    """

    TEMPORARY = 0
    """A result that is not kept for the backward pass."""
    ACTIVATION = 1
    """Made by a module, and alive when a backward pass begins."""
    INPUT = 2
    """Made outside of modules, backward passes and optimizers, such as a batch."""
    COMMUNICATION = 3
    """Made by collectives, or for them, or flat and given to one."""
    WORKSPACE = 4
    """What a kernel allocates besides its results."""
    GRADIENT = 5
    """Gradients of parameters, and what a backward pass adds gradients to."""
    OPTIMIZER_STATE = 6
    PARAMETER = 7
    """Parameters and buffers of modules, also those that a sharded module has gathered."""
    CACHE = 8
    """Carried from one forward pass of a module to the next without gradients, such as keys and values."""

    @property
    def label(self) -> str:
        """How it is called in reports."""
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
    """What the program was doing, as `MemoryPhase` has it."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3
