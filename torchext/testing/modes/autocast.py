"""`torch.autocast` enters and leaves torchext's regions.

The class keeps its arguments, warnings and attributes, which differ from torchext's; only its effect on the thread is
replaced. Functions that it decorates run in such a region. Unlike torchext's decorator, it does not cast their results.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from torchext import amp

__all__ = ["enter"]


def enter(is_control: bool) -> None:
    """Enter the mode."""
    autocast: Any = torch.amp.autocast_mode.autocast
    original_enter = autocast.__enter__

    @wraps(original_enter)
    def __enter__(self: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._is_torch_function_mode_enabled():
            return original_enter(self)
        region = amp.autocast(
            self.device, dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
        )
        region.__enter__()
        # An object may be entered again while it is open.
        self.__dict__.setdefault("_torchext_regions", []).append(region)
        return self

    original_exit = autocast.__exit__

    @wraps(original_exit)
    def __exit__(self: Any, *error: Any) -> Any:
        regions = self.__dict__.get("_torchext_regions")
        if not regions:
            return original_exit(self, *error)
        return regions.pop().__exit__(*error)

    autocast.__enter__, autocast.__exit__ = __enter__, __exit__
