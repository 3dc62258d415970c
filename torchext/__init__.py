"""Fake tensors and exact deferred initialization, on PyTorch's own dispatch keys.

Importing this package registers nothing. The `Fake` and `DeferredInit` keys, and two more, are taken when a program
first uses what needs them.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

import torch as _torch  # loads the libraries that the extension module is linked against

try:
    from . import _C
except ImportError as error:
    if not str(error).startswith("torchext "):  # the loader's own, not one of ours
        raise ImportError(
            f"torchext was not built for the installed torch {_torch.__version__} ({error}). Build it again: "
            "pip install --no-build-isolation --force-reinstall --no-deps torchext"
        ) from error
    raise

__all__ = ["amp", "compat", "deferred_init", "fake", "inference", "inspect"]

fake = _import_module(".fake", __name__)
deferred_init = _import_module(".deferred_init", __name__)
inference = _import_module(".inference", __name__)
compat = _import_module(".compat", __name__)
inspect = _import_module(".inspect", __name__)
if _TYPE_CHECKING:
    from . import amp
else:
    amp = _import_module(".amp", __name__)
