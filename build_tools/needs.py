"""What an installation needs. What is missing ends it with one sentence that says what to type."""

from __future__ import annotations

import os
import shutil
import sys
from types import ModuleType

from .settings import NEWEST_TORCH, OLDEST_TORCH, named, torch_release


def import_torch_extension_tools() -> ModuleType:
    """Returns PyTorch's tools for C++ extensions, or ends the installation with one sentence."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        sys.exit(
            "torchext is compiled against the PyTorch of your environment, and there is none visible here: "
            "type `pip install torch` and then `pip install --no-build-isolation .`"
        )
    if not OLDEST_TORCH <= torch_release(torch.__version__) <= NEWEST_TORCH:
        sys.exit(
            f"torchext supports torch {named(OLDEST_TORCH)} to {named(NEWEST_TORCH)}, but torch {torch.__version__} is "
            f"installed: type `pip install 'torch=={named(NEWEST_TORCH)}.*'`"
        )
    return cpp_extension


def check_platform() -> None:
    """Ends the installation with one sentence where torchext is known not to work."""
    import sysconfig

    if sys.platform != "linux":
        sys.exit(f"torchext runs on Linux, and this is {sys.platform}: docs/installing.md says what it would take")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "torchext relies on Python's global lock, and this Python is built without it: "
            f"take an ordinary Python {sys.version_info[0]}.{sys.version_info[1]}"
        )


def check_compiler() -> None:
    """Ends the installation with one sentence when there is no C++ compiler."""
    compiler = os.environ.get("CXX", "c++").split()[0]  # what PyTorch's build tools will call
    if shutil.which(compiler) is None:
        sys.exit(
            f"torchext is compiled from C++ and no compiler `{compiler}` was found: "
            "type `apt-get install g++` (or set CXX to a C++ compiler)"
        )
