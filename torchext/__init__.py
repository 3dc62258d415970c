"""Fake tensors and exact deferred initialization, on PyTorch's own dispatch keys.

Importing this package registers nothing. The `Fake` and `DeferredInit` keys, and two more, are registered when a
program first uses a feature that needs them.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch  # loads the libraries that the extension module is linked against

from .installation import (
    cmake_prefix_path,
    include_path,
    library_path,
)
from .installation import (
    why_it_cannot_be_loaded as _why_it_cannot_be_loaded,
)
from .version import __version__

try:
    from . import _C
except ImportError as error:
    raise ImportError(_why_it_cannot_be_loaded(error)) from error

from . import errors
from .errors import (
    CheckpointError,
    DataDependentError,
    MaterializationError,
    PatchError,
    RankFailedError,
    RanksDifferError,
    TorchextDeprecationWarning,
    TorchextError,
    TorchextFutureWarning,
    TorchextWarning,
    UnsupportedOperatorError,
)

__all__ = [
    "CheckpointError",
    "DataDependentError",
    "MaterializationError",
    "PatchError",
    "RankFailedError",
    "RanksDifferError",
    "TorchextDeprecationWarning",
    "TorchextError",
    "TorchextFutureWarning",
    "TorchextWarning",
    "UnsupportedOperatorError",
    "__version__",
    "amp",
    "checkpoint",
    "cmake_prefix_path",
    "compat",
    "deferred_init",
    "dry_run",
    "errors",
    "fake",
    "include_path",
    "inference",
    "inspect",
    "library_path",
    "memory",
]

if _TYPE_CHECKING:
    from . import amp, checkpoint, compat, deferred_init, dry_run, dynamo, fake, inference, inspect, memory
for _room in ("fake", "deferred_init", "checkpoint", "inference", "memory", "compat", "inspect", "amp", "dynamo"):
    _import_module(f".{_room}", __name__)


def __getattr__(name: str) -> object:
    if name == "dry_run":
        return _import_module(".dry_run", __name__)  # at first use, because it imports much of torch.distributed
    homes = [room for room in __all__ if name in getattr(globals().get(room), "__all__", ())]
    hint = f". Did you mean torchext.{homes[0]}.{name}?" if homes else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
