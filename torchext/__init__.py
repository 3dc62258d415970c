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
    how_to_install_again as _how_to_install_again,
)
from .version import __version__

try:
    from . import _C
except ImportError as error:
    told = str(error)
    if told.startswith("torchext cannot be imported"):  # a self-test of ours, which says what it has found
        raise
    if not told.startswith("torchext "):  # the loader's own words
        told = f"torchext was not built for the installed torch {_torch.__version__} ({told})."
    raise ImportError(f"{told} {_how_to_install_again()}") from error

__all__ = [
    "__version__",
    "amp",
    "cmake_prefix_path",
    "compat",
    "deferred_init",
    "fake",
    "include_path",
    "inference",
    "inspect",
    "library_path",
]

fake = _import_module(".fake", __name__)
deferred_init = _import_module(".deferred_init", __name__)
inference = _import_module(".inference", __name__)
compat = _import_module(".compat", __name__)
inspect = _import_module(".inspect", __name__)
if _TYPE_CHECKING:
    from . import amp
else:
    amp = _import_module(".amp", __name__)
