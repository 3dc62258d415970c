"""Checks of the types of arguments."""

from __future__ import annotations

from typing import SupportsIndex

__all__ = ["check_is_dtype", "check_is_int"]


def check_is_dtype(dtype: object, name: str = "dtype") -> None:
    """Raise TypeError unless `dtype` is a dtype or None."""
    import torch  # not above: descriptions of GPUs check ints without PyTorch

    if dtype is None or isinstance(dtype, torch.dtype):
        return
    known = isinstance(dtype, str) and isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype)
    hint = f" Did you mean torch.{str(dtype).removeprefix('torch.')}?" if known else ""
    raise TypeError(f"`{name}` expects a torch.dtype, got {dtype!r}.{hint}")


def check_is_int(value: object, name: str) -> None:
    """Raise TypeError unless `value` is an int, of Python or of NumPy, and not a bool."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"`{name}`: expected an int, got {value!r}.")
