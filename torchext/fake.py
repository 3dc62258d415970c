"""Fake tensors: what a program would do on a device, on any machine and without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from . import _C, _fake_cuda, _patches

__all__ = [
    "CacheInfo",
    "DataDependentError",
    "UnsupportedOperatorError",
    "cache_clear",
    "cache_info",
    "fake_like",
    "fake_mode",
    "is_fake",
    "meta_like",
]


class DataDependentError(RuntimeError):
    """An operator needs the values of a fake tensor, which has none."""


class UnsupportedOperatorError(NotImplementedError):
    """PyTorch cannot tell what an operator makes of fake tensors: it has no Meta kernel, or none for the arguments."""


_C.set_error_types(DataDependentError, UnsupportedOperatorError)


@contextmanager
def fake_mode(*, fake_cuda: bool | int = False) -> Iterator[None]:
    """Makes every tensor that is constructed in the block fake.

    A fake tensor has a shape, strides, a dtype, a device and autograd's state, but no data. Operators on fake tensors
    compute all of that and nothing else. Blocks nest, and each thread has its own.

    Args:
        fake_cuda: On a machine without CUDA devices, their number in the block (True is one): fake tensors may be on
            them, and the functions of `torch.cuda` answer for them on this thread. A fake stays usable after the block.
            Has no effect where there are CUDA devices.

    Raises:
        ValueError: `fake_cuda` is not a number of devices that there can be.

    Example:
        >>> with fake_mode():
        ...     torch.ones(4, 4)
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True)
    """
    _patches.install()
    with _fake_cuda.fake_cuda(fake_cuda):
        _C.enter_fake_mode()
        try:
            yield
        finally:
            _C.leave_fake_mode()


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


class CacheInfo(NamedTuple):
    """What the cache of metadata has done since the process began or it was cleared.

    Attributes:
        hits: Calls whose results were remembered.
        misses: Calls whose results had to be found out.
        uncacheable: Those of the misses that cannot be remembered, because they change the metadata of their arguments,
            say.
        currsize: How many calls are remembered now.
        maxsize: How many can be. Those that were not asked for longest are forgotten first.
    """

    hits: int
    misses: int
    uncacheable: int
    currsize: int
    maxsize: int


def cache_info() -> CacheInfo:
    """Returns the statistics of the cache of metadata, which all threads share.

    What a call on fake tensors returns depends on the operator, the metadata of its arguments and a few settings of the
    process. The answer is remembered, so that only the first such call runs PyTorch's Meta kernel.
    """
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Forgets what the cache of metadata remembers, and sets its statistics to zero."""
    _C.cache_clear()
