"""`torch.set_default_tensor_type()` with a CUDA type, which PyTorch without CUDA rejects.

It sets the default dtype and the default device. A device that the program has set by `torch.set_default_device()`
takes precedence, as in PyTorch. The exception is the constructor `torch.Tensor(...)`, which ignores both and stays on
the CPU.

As in PyTorch the type holds for all threads. PyTorch's default devices are thread-local, so other threads get theirs
when they enter a block of fake CUDA devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _C

__all__ = ["apply_default_type", "forget_default_type", "leave_default_type", "setting_default_type"]


class _Thread(threading.local):
    context: Any = None  # the default device that a CUDA type has set on this thread


_thread = _Thread()
_dtypes: list[torch.dtype] = []  # the previous default dtype while a CUDA type is the default


def setting_default_type(original: Callable[..., None]) -> Callable[..., None]:
    """Replace `torch.set_default_tensor_type()`."""

    def set_default_tensor_type(t: Any, /) -> None:
        name = t if isinstance(t, str) else f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}"
        is_on_cuda = name.startswith("torch.cuda.") and _C.fake_cuda_devices() > 0
        before = torch.get_default_dtype()
        original(f"torch.{name.rpartition('.')[2]}" if is_on_cuda else t)  # rejects types that are not floating-point
        if not is_on_cuda:
            _dtypes.clear()
            leave_default_type()
        else:
            if not _dtypes:
                _dtypes.append(before)
            apply_default_type()

    return set_default_tensor_type


def _default_device() -> Any:
    """Return the context of `torch.set_default_device()` on this thread."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def apply_default_type() -> None:
    """Make CUDA the default device of this thread if the default type is a CUDA type."""
    if _dtypes and _default_device() is None:
        torch.set_default_device("cuda")
        _thread.context = _default_device()


def leave_default_type() -> None:
    """Make the CPU the default device of this thread again, unless the program has set another one."""
    context, _thread.context = _thread.context, None
    if context is not None and _default_device() is context:
        torch.set_default_device(None)


def forget_default_type() -> None:
    """Restore the default dtype from before the CUDA type."""
    if _dtypes:
        torch.set_default_dtype(_dtypes.pop())
