"""The current place of a program: the running module, and forward, backward or the optimizer's step.

It is read from the frames of the thread, so modules need no hooks.
"""

from __future__ import annotations

import sys
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .collectives import Place

__all__ = ["ModuleNames", "place_here"]

# Enough frames for nested modules; walking further is slow and rarely finds more.
DEEPEST = 200


class ModuleNames:
    """The names of modules in the models that contain them."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    def of(self, module: nn.Module, outermost: nn.Module | None) -> str:
        """Return the name of `module` in `outermost`, or its class if it is the model itself."""
        if module not in self._names and outermost is not None:
            for name, child in outermost.named_modules():
                self._names.setdefault(child, name)
        return self._names.get(module, "") or type(module).__name__


def place_here(names: ModuleNames) -> Place:
    """Return the current place of this thread."""
    in_backward = torch._C._current_graph_task_id() != -1
    innermost: nn.Module | None = None
    outermost: nn.Module | None = None
    label, is_stepping = "", False
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEEPEST):
        if frame is None:
            break
        owner = frame.f_locals.get("self") if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module):
            innermost, outermost = owner if innermost is None else innermost, owner
        elif isinstance(owner, torch.optim.Optimizer):
            is_stepping = True
        elif not label and owner is not None:
            label = _name_in_fsdp(owner)
        frame = frame.f_back
    module = label or ("" if innermost is None else names.of(innermost, outermost))
    phase = "backward" if in_backward else "optimizer" if is_stepping else "forward" if innermost is not None else ""
    return Place(module, phase)


def _name_in_fsdp(owner: object) -> str:
    """Return the name of the module whose parameters FSDP groups (`FSDPParamGroup`), or ""."""
    name = vars(owner).get("_module_fqn") if hasattr(owner, "__dict__") else None
    return name if isinstance(name, str) else ""
