"""Meta kernels in Python run without importing Dynamo.

PyTorch wraps many of them in `torch._disable_dynamo`, so that the first call imports `torch._dynamo`, which takes as
long as importing `torch`. Real kernels do not. As long as Dynamo has not been imported, there is nothing to disable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch._compile

from ..tools.imports import when_imported
from ..tools.leases import while_fakes_live

__all__: list[str] = []

# The attribute with which `torch._compile` caches `torch._dynamo.disable(function)` after the first call.
CACHE = "__dynamo_disable"
HOMES = ("torch._decomp", "torch._meta_registrations", "torch._prims", "torch._refs")


def _call_directly() -> None:
    """Let the functions be called directly until Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    functions = list(_disabled_functions())
    for function in functions:
        setattr(function, CACHE, function)

    def disable() -> None:
        for function in functions:
            if getattr(function, CACHE, None) is function:
                delattr(function, CACHE)

    when_imported("torch._dynamo", disable)


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
