"""`torch.set_default_tensor_type()` with a type of CUDA, which a PyTorch without CUDA refuses.

The dtype becomes the default dtype, and the device the default device, as `torch.set_default_device()` sets it. The
constructor `torch.Tensor(...)` is the exception: it asks for neither, and stays on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _C

__all__ = ["forget_default_type", "setting_default_type"]


class _Thread(threading.local):
    is_on_cuda = False


_thread = _Thread()


def setting_default_type(original: Callable[..., None]) -> Callable[..., None]:
    """Replaces `torch.set_default_tensor_type()`."""

    def set_default_tensor_type(t: Any, /) -> None:
        name = t if isinstance(t, str) else f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}"
        is_on_cuda = name.startswith("torch.cuda.") and _C.fake_cuda_devices() > 0
        original(f"torch.{name.rpartition('.')[2]}" if is_on_cuda else t)  # refuses what is not floating-point
        forget_default_type()
        if is_on_cuda:
            torch.set_default_device("cuda")
            _thread.is_on_cuda = True

    return set_default_tensor_type


def forget_default_type() -> None:
    """Makes the CPU the default device again, if a type of CUDA was the default."""
    if _thread.is_on_cuda:
        _thread.is_on_cuda = False
        torch.set_default_device(None)
