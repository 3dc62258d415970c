"""Fake tensors and exact deferred initialization, on PyTorch's own dispatch keys.

Importing this package registers nothing. The `Fake` and `DeferredInit` keys, and two more, are taken when a program
first uses what needs them.
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

from .errors import (
    CheckpointError,
    DataDependentError,
    MaterializationError,
    PatchError,
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
    "fake",
    "include_path",
    "inference",
    "inspect",
    "library_path",
    "memory",
]

fake = _import_module(".fake", __name__)
deferred_init = _import_module(".deferred_init", __name__)
checkpoint = _import_module(".checkpoint", __name__)
inference = _import_module(".inference", __name__)
memory = _import_module(".memory", __name__)
compat = _import_module(".compat", __name__)
inspect = _import_module(".inspect", __name__)
if _TYPE_CHECKING:
    from . import amp
else:
    amp = _import_module(".amp", __name__)
_import_module(".dynamo", __name__)
