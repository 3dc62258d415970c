"""FakeTensorMode, where tests use it, is torchext's `fake_mode`.

PyTorch's own code, `torch.compile` say, goes on with PyTorch's: it works on how that is made inside, and has tables by
that very class. So the modules that have it give it to PyTorch, and ours to others.
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
    """The class of what one cannot tell by its class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PyTorchFakeTensor) or (isinstance(instance, torch.Tensor) and is_fake(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PyTorchFakeTensor)

    def __getattr__(cls, name: str) -> Any:
        return getattr(PyTorchFakeTensor, name)


class FakeTensor(metaclass=_FakeTensors):
    """torchext's fake tensors, and PyTorch's."""


class FakeTensorMode:
    """What tests use of FakeTensorMode, by `fake_mode` and `fake_like`."""

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
        """The fake of a tensor, which is one and the same each time."""
        if tensor not in self._fakes:
            self._fakes[tensor] = fake_like(tensor)
        fake: torch.Tensor = self._fakes[tensor]
        return fake


class _Module(ModuleType):
    """A module whose names mean something else to tests. Properties come before the names of the module itself."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensor if is_called_by_tests() else PyTorchFakeTensor

    @property
    def FakeTensorMode(self) -> type:  # noqa: N802 - PyTorch's name
        return FakeTensorMode if is_called_by_tests() else PyTorchFakeTensorMode


def enter(is_control: bool) -> None:
    """Enters the mode."""
    for module in (torch._subclasses, fake_tensor):
        module.__class__ = _Module
