"""Autocast: operators that choose the precision that they run in, on PyTorch's own `Autocast*` keys and kernels.

There are four ways to use it: the context manager `autocast()`; the decorators `autocast`, `float` and `half`;
AmpTensors, which `wrap()` returns; and self-cleaning regions, `autocast(self_cleaning=True)`. docs/how_to/autocast.md
compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _C
from . import backward, function_modes, patches  # noqa: F401  (declare what is replaced, and what the core calls)
from .amp_tensor import AmpTensor, is_amp, unwrap, wrap
from .decorators import Autocasting, InFloat32, InLowerPrecision, decorate
from .policies import policy, register_policy

__all__ = ["AmpTensor", "autocast", "float", "half", "is_amp", "policy", "register_policy", "unwrap", "wrap"]

T = TypeVar("T", bound=Callable[..., Any])


class autocast(_C.AutocastRegion):  # noqa: N801 - a function to its users, as torch.autocast is
    """A region in which operators autocast: `with autocast(): ...`.

    It sets the state of the thread that `torch.autocast` sets, and each sees the other. Regions nest, also disabled
    regions in enabled ones, and regions of different dtypes; one object may be entered any number of times, on any
    thread. When the last region of the thread has been left, PyTorch forgets the casts of weights. Enabling autocast
    for a device type that this machine lacks has no effect on tensors elsewhere.

    Running `backward()` in an enabled region warns once for each line that does.

    As a decorator, `@autocast` or `@autocast("cuda", dtype=...)`, it runs a function in such a region. Where operators
    do not autocast for the device type yet, the floating tensors that the function returns, in any container that
    `torch.utils._pytree` knows, are cast to float32; where they do, they are returned as they are. Methods,
    generators, `async def` functions, modules and their classes, and classes of autograd functions can be decorated:
    the `backward` of the last runs as its `forward` did.

    Args:
        device_type: The type of the devices, as `tensor.device.type` is. By default the accelerator that is in use, the
            fake one inside `fake_mode(gpu=...)`, or else the CPU.
        dtype: `torch.bfloat16` or `torch.float16`, to which operators that gain from it cast. By default what
            `torch.get_autocast_dtype(device_type)` says. With another dtype the region is disabled, with a warning, on
            all devices but CUDA.
        enabled: Whether operators autocast.
        cache: Whether the casts of weights are remembered, so that each is cast once. By default as around the region;
            outside of all regions they are.
        self_cleaning: Whether what operators make inside is an AmpTensor (`is_amp()`) that the next operator that does
            not autocast casts to float32: then the results are ordinary tensors, and no operator meets a mixture of
            dtypes. Views of it stay what it is, and so does what is written in place, which keeps its dtype.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no such device type.

    Example:
        >>> with autocast("cpu"):
        ...     torch.ones(2, 2) @ torch.ones(2, 2)
        tensor([[2., 2.],
                [2., 2.]], dtype=torch.bfloat16)
    """

    __slots__ = ()

    def __call__(self, function: T) -> T:
        """Returns `function` decorated."""
        return decorate(function, Autocasting(self))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_region, self._arguments()

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache, self_cleaning = self._arguments()
        return f"autocast({device_type!r}, {dtype=}, {enabled=}, {cache=}, {self_cleaning=})"


def _make_region(device_type: Any, dtype: Any, enabled: bool, cache: bool | None, self_cleaning: bool) -> autocast:
    return autocast(device_type, dtype=dtype, enabled=enabled, cache=cache, self_cleaning=self_cleaning)


def _float(function: T) -> T:
    """Decorates what has to run in full precision: without autocast, on float32, returning float32.

    The floating tensors among the arguments and the results, in any container that `torch.utils._pytree` knows, are
    cast. Those in float64, and what is not a floating tensor, are passed on.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`). Parameters of modules are not arguments, and are left as they are.

    Raises:
        TypeError: `function` is something else.
    """
    return decorate(function, InFloat32())


def _half(function: T) -> T:
    """Decorates what takes the lower precision: its floating arguments are cast to that of the region around the call.

    This is for kernels that do not cast for themselves, because they are not called by PyTorch's dispatcher. Where
    operators do not autocast for the device of an argument it is left as it is; so are those in float64.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`).

    Raises:
        TypeError: `function` is something else.
    """
    return decorate(function, InLowerPrecision())


float = _float  # noqa: A001 - the public name; this module does not use the type
half = _half
_float.__name__, _float.__qualname__ = "float", "float"
_half.__name__, _half.__qualname__ = "half", "half"
