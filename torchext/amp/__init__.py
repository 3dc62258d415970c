"""Autocast: operators choose the precision in which they run, on PyTorch's own `Autocast*` keys and kernels.

There are four ways to use it: the context manager `autocast()`; the decorators `autocast`, `float` and `half`;
AmpTensors, which `wrap()` returns; and self-cleaning regions, `autocast(self_cleaning=True)`. docs/how_to/autocast.md
compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _C
from ..internals.arguments import RenamedAttribute
from . import amp_tensor, patches  # noqa: F401  (declare patches, and functions that the core calls)
from .amp_tensor import AmpTensor, is_amp, unwrap, wrap
from .decorators import Autocasting, InFloat32, InLowerPrecision, decorate
from .policies import policy, register_policy

__all__ = ["AmpTensor", "autocast", "float", "half", "is_amp", "policy", "register_policy", "unwrap", "wrap"]


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T", bound=Callable[..., Any])


class autocast(_C.AutocastRegion):  # noqa: N801 - a function to its users, as torch.autocast is
    """A region in which operators autocast: `with autocast(): ...`.

    It sets the same thread-local state as `torch.autocast`, so both report and respect each other's settings. Regions
    nest, including disabled regions in enabled ones and regions of different dtypes. One object can be entered any
    number of times, on any thread. When the last region of the thread ends, PyTorch drops the cached casts of weights.
    Enabling autocast for a device type that this machine lacks has no effect on tensors on other devices.

    Running `backward()` in an enabled region warns once for each source line.

    As a decorator, `@autocast` or `@autocast("cuda", dtype=...)`, it runs a function in such a region. If operators do
    not autocast for the device type outside of the call, the floating point tensors that the function returns, in any
    container that `torch.utils._pytree` handles, are cast to float32. Otherwise they are returned unchanged. Methods,
    generators, `async def` functions, modules and their classes, and classes of autograd functions can be decorated.
    The `backward` of an autograd function runs as its `forward` did.

    Args:
        device_type: The device type, as in `tensor.device.type`. Default: the accelerator in use (the fake one inside
            `fake_mode(gpu=...)`), or the CPU.
        dtype: The lower precision, `torch.bfloat16` or `torch.float16`. Default: the result of
            `torch.get_autocast_dtype(device_type)`. Other dtypes disable the region, with a warning, on all devices
            except CUDA.
        enabled: Whether operators autocast.
        cache_enabled: Whether the casts of weights are cached, so that each weight is cast once. Default: as outside of
            the region; True outside of all regions.
        self_cleaning: Whether the results of operators in the region are AmpTensors (`is_amp()`). The next operator
            that does not autocast casts them to float32: its results are ordinary tensors, and no operator gets a
            mixture of dtypes. Views of an AmpTensor are AmpTensors. So are tensors written in place, which keep their
            dtype.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The device type does not exist.

    Example:
        >>> with autocast("cpu"):
        ...     torch.ones(2, 2) @ torch.ones(2, 2)
        tensor([[2., 2.],
                [2., 2.]], dtype=torch.bfloat16)
    """

    __slots__ = ()

    cache = RenamedAttribute("cache_enabled")

    def __call__(self, function: T) -> T:
        """Decorate `function`."""
        return decorate(function, Autocasting(self))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_region, self._arguments()

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache_enabled, self_cleaning = self._arguments()
        return f"autocast({device_type!r}, {dtype=}, {enabled=}, {cache_enabled=}, {self_cleaning=})"


def _make_region(
    device_type: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, self_cleaning: bool
) -> autocast:
    return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled, self_cleaning=self_cleaning)


def _float(function: T) -> T:
    """Run a function in full precision: without autocast, on float32, with float32 results. A decorator.

    The floating point tensors among the arguments and the results, in any container that `torch.utils._pytree` handles,
    are cast. float64 tensors and other objects are passed unchanged.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`). Parameters of modules are not arguments, and are not cast.

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InFloat32())


def _half(function: T) -> T:
    """Cast the floating point arguments of a function to the lower precision of the region around the call.

    Use it for kernels that do not autocast, because PyTorch's dispatcher does not call them. float64 arguments are not
    cast, and neither are arguments on devices for which operators do not autocast.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`).

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InLowerPrecision())


float = _float  # noqa: A001 - the public name; this module does not use the type
half = _half
_float.__name__, _float.__qualname__ = "float", "float"
_half.__name__, _half.__qualname__ = "half", "half"
