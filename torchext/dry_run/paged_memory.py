"""Memory that the host and a GPU share page by page, which bitsandbytes has for states of optimizers.

A library in C calls `cudaMallocManaged()`. It cannot be loaded without a driver, and its memory is not simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..tools.imports import once_imported
from .current import current, while_world_is_open

__all__ = ["refusing_paged_memory"]

MODULE = "bitsandbytes.functional"


@contextmanager
def refusing_paged_memory() -> Iterator[None]:
    """Lets bitsandbytes refuse to allocate such memory, also if it is imported in the block."""
    _teach()
    with once_imported(MODULE, _teach):
        yield


_patched: set[int] = set()


def _teach() -> None:
    module = sys.modules.get(MODULE)
    if hasattr(module, "get_paged") and id(module) not in _patched:
        _patched.add(id(module))
        while_world_is_open.patch(module, "get_paged", _refusing, "allocates by a library in C that needs a driver")


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_paged(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(*args, **kwargs)
        raise RuntimeError(
            "bitsandbytes' paged optimizers allocate memory that the GPU and the host share (cudaMallocManaged), which "
            "a dry run does not simulate. Use the optimizer that is not paged, such as AdamW8bit in place of "
            "PagedAdamW8bit: its states are then counted on the GPU."
        )

    return get_paged
