"""Fake tensors: what a program would do on a device, on any machine and without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import _C, _patches

__all__ = ["DataDependentError", "UnsupportedOperatorError", "fake_like", "fake_mode", "is_fake", "meta_like"]


class DataDependentError(RuntimeError):
    """An operator needs the values of a fake tensor, which has none."""


class UnsupportedOperatorError(NotImplementedError):
    """PyTorch cannot tell what an operator makes of fake tensors: it has no Meta kernel, or none for the arguments."""


_C.set_error_types(DataDependentError, UnsupportedOperatorError)


@contextmanager
def fake_mode(*, fake_cuda: bool = False) -> Iterator[None]:
    """Makes every tensor that is constructed in the block fake.

    A fake tensor has a shape, strides, a dtype, a device and autograd's state, but no data. Operators on fake tensors
    compute all of that and nothing else. Blocks nest, and each thread has its own.

    Args:
        fake_cuda: Lets fake tensors be on CUDA devices on a machine that has none. Has no effect where there are some.

    Example:
        >>> with fake_mode():
        ...     torch.ones(4, 4)
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True)
    """
    _patches.install()
    if fake_cuda:
        _C.enter_fake_cuda()
    _C.enter_fake_mode()
    try:
        yield
    finally:
        _C.leave_fake_mode()
        if fake_cuda:
            _C.leave_fake_cuda()


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor` is fake.

    Args:
        tensor: Any tensor. One that was fake and has been materialized is not fake any more.

    Raises:
        TypeError: `tensor` is no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_fake() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_fake(tensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor with the properties of `fake`.

    Args:
        fake: A fake tensor.

    Returns:
        A tensor on the meta device with the shape, strides and dtype of `fake`. Like the result of `detach()` it is not
        part of the autograd graph.

    Raises:
        TypeError: `fake` is no tensor.
        ValueError: `fake` is a real tensor.
    """
    if not is_fake(fake):
        raise ValueError("`fake` was expected to be a fake tensor, but it is a real one: use `fake.to('meta')`.")
    return _C.meta_like(fake)


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor with the properties of `tensor`, which is left as it is.

    Args:
        tensor: A strided tensor, real or fake.

    Returns:
        A fake tensor with the shape, strides, dtype, device and `requires_grad` of `tensor`, a leaf of autograd.

    Raises:
        TypeError: `tensor` is no tensor.
        NotImplementedError: `tensor` is not strided.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"fake_like() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    _patches.install()
    return _C.fake_like(tensor)
