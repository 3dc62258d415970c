"""`torch.set_default_tensor_type()` with a type of CUDA, which a PyTorch without CUDA refuses.

The dtype becomes the default dtype, and the device the default device, unless the program has set one by
`torch.set_default_device()`, which takes precedence as in PyTorch. The constructor `torch.Tensor(...)` is the
exception: it asks for neither, and stays on the CPU.

As in PyTorch the type holds for all threads. PyTorch's default devices are those of a thread, so other threads get
theirs when they enter a block of fake CUDA devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _C

__all__ = ["apply_default_type", "forget_default_type", "leave_default_type", "setting_default_type"]


class _Thread(threading.local):
    context: Any = None  # the default device that a type of CUDA has set on this thread


_thread = _Thread()
_dtypes: list[torch.dtype] = []  # while a type of CUDA is the default: the default dtype before


def setting_default_type(original: Callable[..., None]) -> Callable[..., None]:
    """Replaces `torch.set_default_tensor_type()`."""

    def set_default_tensor_type(t: Any, /) -> None:
        name = t if isinstance(t, str) else f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}"
        is_on_cuda = name.startswith("torch.cuda.") and _C.fake_cuda_devices() > 0
        before = torch.get_default_dtype()
        original(f"torch.{name.rpartition('.')[2]}" if is_on_cuda else t)  # refuses what is not floating-point
        if not is_on_cuda:
            _dtypes.clear()
            leave_default_type()
        else:
            if not _dtypes:
                _dtypes.append(before)
            apply_default_type()

    return set_default_tensor_type


def _default_device() -> Any:
    """The context of `torch.set_default_device()` on this thread."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def apply_default_type() -> None:
    """Makes CUDA the default device of this thread, if a type of CUDA is the default."""
    if _dtypes and _default_device() is None:
        torch.set_default_device("cuda")
        _thread.context = _default_device()


def leave_default_type() -> None:
    """Makes the CPU the default device of this thread again, unless the program has set another one since."""
    context, _thread.context = _thread.context, None
    if context is not None and _default_device() is context:
        torch.set_default_device(None)


def forget_default_type() -> None:
    """Restores the default dtype from before a type of CUDA became the default."""
    if _dtypes:
        torch.set_default_dtype(_dtypes.pop())
