"""Meta kernels in Python run without importing Dynamo.

PyTorch wraps many of them in `torch._disable_dynamo`, so that the first call imports `torch._dynamo`, which takes as
long as importing `torch`. Real kernels do not. As long as Dynamo has not been imported, there is nothing to disable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch._compile

from ..tools.imports import when_imported
from ..tools.leases import while_fakes_live
from ..tools.patching import patching_lock

__all__: list[str] = []

# The attribute with which `torch._compile` caches `torch._dynamo.disable(function)` after the first call.
CACHE = "__dynamo_disable"


def _call_directly() -> None:
    """Let the wrappers call their functions directly until Dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    patch = while_fakes_live.patch(
        torch._compile, "getattr", _find_the_function, "wrappers without a cached function import Dynamo"
    )
    withdraw = partial(while_fakes_live.withdraw, [patch])
    when_imported("torch._dynamo", lambda: patching_lock.run_soon(withdraw))  # other threads may wait for the import


def _find_the_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `getattr` that finds the function itself where no disabled one is cached."""

    def find(owner: Any, name: str, *default: Any) -> Any:
        value = original(owner, name, *default)
        return owner if value is None and name == CACHE and "torch._dynamo" not in sys.modules else value

    return find


while_fakes_live.declare(_call_directly)
