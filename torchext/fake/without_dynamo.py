"""Meta kernels in Python run without importing Dynamo.

PyTorch wraps many of them in `torch._disable_dynamo`, so that the first call imports `torch._dynamo`, which takes as
long as importing `torch`. Real kernels do not. As long as Dynamo has not been imported, there is nothing to disable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch._compile

from ..tools.imports import when_imported
from ..tools.leases import while_fakes_live
from ..tools.patching import Patch, Patchable, Steps, patching_lock

__all__: list[str] = []

# The attribute with which `torch._compile` caches `torch._dynamo.disable(function)` after the first call.
CACHE = "__dynamo_disable"
HOMES = ("torch._decomp", "torch._meta_registrations", "torch._prims", "torch._refs")


def _call_directly() -> None:
    """Let the functions be called directly until Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    patch = while_fakes_live.patch(
        torch._compile,
        "_disable_dynamo",
        partial,  # nothing calls it
        "the first call of a function that it wraps imports Dynamo",
        patchable=_Wrapped(),
    )
    withdraw = partial(while_fakes_live.withdraw, [patch])
    when_imported("torch._dynamo", lambda: patching_lock.run_soon(withdraw))  # other threads may wait for the import


class _Wrapped(Patchable):
    """The attribute of the wrapped functions that were not called."""

    def __init__(self) -> None:
        super().__init__(own=...)
        self.function = None
        self.original = torch._compile._disable_dynamo
        self._functions = list(_disabled_functions())

    def _make(self, patches: tuple[Patch, ...], function: object, concerns: int, is_traced: bool) -> None:
        """Make nothing: each function gets itself."""

    def _exchange(self, wanted: object, steps: Steps) -> None:
        for function in self._functions:
            before, after = (function, ...) if wanted is ... else (..., function)
            steps.attributes.append((function, CACHE, before, after))


def _disabled_functions() -> Iterator[Callable[..., Any]]:
    """Yield the functions of PyTorch's Meta kernels that `torch._disable_dynamo` wraps, and that were not called."""
    wrapper = torch._compile._disable_dynamo(_call_directly).__code__
    for module in [module for name, module in sys.modules.items() if name.startswith(HOMES)]:
        for value in list(vars(module).values()):
            while (function := _wrapped_by(value)) is not None:
                if value.__code__ is wrapper and not hasattr(function, CACHE):
                    yield function
                value = function


def _wrapped_by(value: Any) -> Callable[..., Any] | None:
    """Return the function that a wrapper calls. PyTorch sets `__wrapped__` to others, such as a primitive."""
    if not isinstance(value, FunctionType) or "fn" not in value.__code__.co_freevars or value.__closure__ is None:
        return None
    found = value.__closure__[value.__code__.co_freevars.index("fn")].cell_contents
    return found if isinstance(found, FunctionType) else None


while_fakes_live.declare(_call_directly)
