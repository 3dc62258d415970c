"""Fake tensors and exact deferred initialization, on PyTorch's own dispatch keys.

Importing this package registers nothing. The `Fake` and `DeferredInit` keys, and two more, are registered when a
program first uses a feature that needs them.
"""

from __future__ import annotations

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

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
from .installation import (
    cmake_prefix_path,
    include_path,
    library_path,
)
from .installation import (
    why_it_cannot_be_loaded as _why_it_cannot_be_loaded,
)
from .version import __version__

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

if _typing.TYPE_CHECKING:
    from . import _C, amp, checkpoint, compat, deferred_init, dry_run, dynamo, fake, inference, inspect, memory


_CORE = ("fake", "deferred_init", "inference", "compat", "inspect", "amp", "dynamo")
_APPLICATIONS = ("checkpoint", "dry_run", "memory")  # imported when they are used


def _load_extension() -> None:
    _import_module("torch")  # loads the libraries that the extension module is linked against
    try:
        extension = _import_module("._C", __name__)
    except ImportError as error:
        raise ImportError(_why_it_cannot_be_loaded(error)) from error
    extension.provide("data_dependent_error", DataDependentError)
    extension.provide("unsupported_operator_error", UnsupportedOperatorError)
    extension.provide("materialization_error", MaterializationError)
    _import_module(".dynamo", __name__)  # waits for the import of Dynamo


def _find(name: str) -> object:
    if name == "_C":
        _load_extension()
        return _sys.modules[f"{__name__}._C"]
    if name in _CORE or name in _APPLICATIONS:
        return _import_module(f".{name}", __name__)
    if not name.startswith("_"):
        for room in ("dry_run", "memory"):  # which import little
            _import_module(f".{room}", __name__)
    homes = [room for room in __all__ if name in getattr(globals().get(room), "__all__", ())]
    hint = f". Did you mean torchext.{homes[0]}.{name}?" if homes else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


if not _typing.TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = _find


def __dir__() -> list[str]:
    return __all__


# The command imports PyTorch at the first use: `torchext --help` and the process that waits for ranks do not need it.
# While `python -m` imports the package, `argv` is "-m" and the arguments.
if "torchext_command" not in _sys.modules and not (
    _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)] == "torchext"
):
    _load_extension()
    for _room in _CORE:
        _import_module(f".{_room}", __name__)
