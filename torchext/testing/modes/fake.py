"""FakeTensorMode in tests is torchext's `fake_mode`.

PyTorch itself, for example `torch.compile`, keeps its own FakeTensorMode, because it relies on internals of that class
and has tables keyed by it. So modules with this name return PyTorch's class to PyTorch, and ours to other callers.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils.weak import WeakIdKeyDictionary

from torchext.fake import fake_like, fake_mode, is_fake

from .callers import is_called_by_tests

__all__ = ["enter"]

PyTorchFakeTensor, PyTorchFakeTensorMode = fake_tensor.FakeTensor, fake_tensor.FakeTensorMode


class _FakeTensors(type):
    """A class whose instances are determined by the tensor, not by its Python class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PyTorchFakeTensor) or (isinstance(instance, torch.Tensor) and is_fake(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PyTorchFakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(PyTorchFakeTensor, name)


class FakeTensor(metaclass=_FakeTensors):
    """torchext's fake tensors, and PyTorch's."""


class FakeTensorMode:
    """The part of FakeTensorMode that tests use, implemented by `fake_mode` and `fake_like`."""

    def __init__(self, **kwargs: Any) -> None:
        self._open: list[ExitStack] = []
        self._fakes = WeakIdKeyDictionary()

    def __enter__(self) -> FakeTensorMode:
        block = ExitStack()
        block.enter_context(fake_mode())
        self._open.append(block)
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._open.pop().__exit__(*error)

    def from_tensor(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the fake of a tensor, the same object for each call."""
        if tensor not in self._fakes:
            self._fakes[tensor] = fake_like(tensor)
        fake: torch.Tensor = self._fakes[tensor]
        return fake


class _Module(ModuleType):
    """A module with other values for some names in tests. Properties take precedence over the module's own names."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensor if is_called_by_tests() else PyTorchFakeTensor

    @property
    def FakeTensorMode(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensorMode if is_called_by_tests() else PyTorchFakeTensorMode


def enter(is_control: bool) -> None:
    """Enter the mode."""
    for module in (torch._subclasses, fake_tensor):
        module.__class__ = _Module
