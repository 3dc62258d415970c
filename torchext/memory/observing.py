"""Report to the core which module or optimizer runs, and which tensors are parameters, gradients and optimizer state.

It uses PyTorch's hooks for all modules and optimizers, which are registered while a tracker is open.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from .. import _C
from ..internals.held_tensors import parts_of
from .timeline import Category, Phase

__all__ = ["Observer"]

OPTIMIZER_SCOPE = "optimizer step"


class _Thread(threading.local):
    """The scopes of a thread outside of each module, and each optimizer step, that it is in."""

    def __init__(self) -> None:
        self.scopes: list[tuple[int, int, bool]] = []


class Observer:
    """Observe the modules and optimizers of all threads.

    Attributes:
        scopes: The names of the modules that have run, by their numbers in the core.
        owners: The names of parameters, gradients and optimizer state, by the number of the allocation.
    """

    def __init__(self, trace_lines: bool) -> None:
        self.scopes: list[str] = []
        self.owners: dict[int, str] = {}
        self._trace_lines = trace_lines
        self._numbers: dict[str, int] = {}
        self._thread = _Thread()
        # By `id()`. The references are weak, so that the program can free the objects.
        self._names: dict[int, tuple[str, ReferenceType[torch.nn.Module]]] = {}
        self._parameters: dict[int, tuple[str, TensorWeakRef]] = {}
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        self._outer = _C.set_memory_scope(-1, Phase.OTHER, self._trace_lines)

    def end(self) -> None:
        """Remove the hooks, and restore the scope of the thread, which a step that raised may not have restored."""
        for handle in self._handles:
            handle.remove()
        self.mark_gradients()
        _C.set_memory_scope(*self._outer)

    def mark_gradients(self) -> None:
        """Mark the gradients that the known parameters have now."""
        for name, reference in list(self._parameters.values()):
            parameter = reference()
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                self._mark(gradient, Category.GRADIENT, f"{name}.grad")

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        name = self._name_of(module)
        if name is None:
            name = self._learn(module)
        elif not self._thread.scopes:
            self._mark_parameters(module, name)
        scope = _C.set_memory_scope(self._number(name), Phase.FORWARD, self._trace_lines, id(module))
        self._thread.scopes.append(scope)

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        # A sharded module has gathered its parameters now.
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self._mark(parameter, Category.PARAMETER, f"{self._name_of(module) or ''}.{name}")
        if self._thread.scopes:
            _C.set_memory_scope(*self._thread.scopes.pop())

    def _learn(self, root: torch.nn.Module) -> str:
        """Name `root` and its modules, and mark their tensors."""
        root_name = type(root).__name__
        for name, module in root.named_modules():
            if self._name_of(module) is None:
                self._names[id(module)] = (f"{root_name}.{name}" if name else root_name, ref(module))
        self._mark_parameters(root, root_name)
        return root_name

    def _name_of(self, module: torch.nn.Module) -> str | None:
        name, reference = self._names.get(id(module), (None, None))
        return name if reference is not None and reference() is module else None

    def _owner_of(self, parameter: torch.Tensor) -> str | None:
        name, reference = self._parameters.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None

    def _mark_parameters(self, root: torch.nn.Module, prefix: str) -> None:
        for name, parameter in root.named_parameters():
            self._parameters[id(parameter)] = (f"{prefix}.{name}", TensorWeakRef(parameter))
            self._mark(parameter, Category.PARAMETER, f"{prefix}.{name}")
        for name, buffer in root.named_buffers():
            self._mark(buffer, Category.PARAMETER, f"{prefix}.{name}")
        self.mark_gradients()

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                owner = self._owner_of(parameter)
                if owner is None:
                    owner = f"parameter {i}"
                    self._parameters[id(parameter)] = (owner, TensorWeakRef(parameter))
                self._mark(parameter, Category.PARAMETER, owner)
        self.mark_gradients()
        self._thread.scopes.append(
            _C.set_memory_scope(self._number(OPTIMIZER_SCOPE), Phase.OPTIMIZER, self._trace_lines)
        )

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._thread.scopes:
            _C.set_memory_scope(*self._thread.scopes.pop())
        for parameter, state in optimizer.state.items():
            owner = self._owner_of(parameter) or "parameter"
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._mark(value, Category.OPTIMIZER_STATE, f"{owner}.{key}")

    def _mark(self, tensor: torch.Tensor, category: Category, owner: str) -> None:
        members = list(parts_of(tensor))
        _C.mark_memory(members, category)
        for member in members:
            number = _C.memory_number(member)
            if number >= 0:
                self.owners[number] = owner

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.scopes)
            self.scopes.append(name)
        return number
