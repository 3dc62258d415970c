"""Checks of arguments, and old names that keep working with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from ..errors import TorchextDeprecationWarning

__all__ = [
    "check_is_dtype",
    "check_is_int",
    "renamed_keywords",
    "renamed_names",
    "warn_deprecated",
]

P = ParamSpec("P")
T = TypeVar("T")


def warn_deprecated(old: str, new: str) -> None:
    """Warn the caller of the function that calls this that `old` is deprecated, and that `new` replaces it.

    Args:
        old: The name, as a caller writes it.
        new: The name to write instead.
    """
    warnings.warn(f"`{old}` is deprecated: use `{new}`.", TorchextDeprecationWarning, stacklevel=3)


def renamed_keywords(**renamed: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for functions that still take keyword arguments under their old names.

    Args:
        **renamed: The new name for each old one, as in `renamed_keywords(fake_cuda="gpu")`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in [old for old in renamed if old in kwargs]:
                new = renamed[old]
                if new in kwargs:
                    raise TypeError(f"{_name(function)}() got both `{new}` and `{old}`, its deprecated name.")
                warn_deprecated(f"{_name(function)}({old}=)", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return run

    return decorate


def renamed_names(module: str, **renamed: str) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a module whose functions still have their old names.

    Args:
        module: The name of the module.
        **renamed: The new name for each old one, as in `renamed_names(__name__, wrap="to_amp")`.
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_deprecated(f"{module}.{name}", f"{module}.{renamed[name]}")
        return getattr(sys.modules[module], renamed[name])

    return find


def _name(function: Callable[..., object]) -> str:
    name: str = getattr(function, "__qualname__", repr(function))
    return name.removesuffix(".__init__")


# ---- Checks of the types of arguments


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
