"""Checks the requirements of an installation. A missing one ends it with a sentence that names the command."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import version
from types import ModuleType
from typing import NoReturn

from .settings import NEWEST_TORCH, OLDEST_TORCH, is_supported, minor_release, named

# Commands that compile nothing and do not write the metadata of the installed package. pip calls `egg_info` before it
# makes a source distribution; the installed metadata comes from `dist_info`.
COMMANDS_WITHOUT_TORCH = {"check", "clean", "egg_info", "sdist"}

# Options that take the next word as their value.
OPTIONS_WITH_VALUES = {"--dist-dir", "-d", "--egg-base", "-e", "--formats", "--tag-build", "-b", "--owner", "--group"}


def need_torch(arguments: list[str]) -> bool:
    """Return false if no command among the arguments of setup.py needs torch, or if there is no command."""
    pairs = zip(["", *arguments], arguments, strict=False)
    words = [word for before, word in pairs if before not in OPTIONS_WITH_VALUES and not word.startswith("-")]
    return not COMMANDS_WITHOUT_TORCH.issuperset(words)


def import_torch_extension_tools() -> ModuleType:
    """Return PyTorch's tools for C++ extensions, or end the installation with one sentence."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            refuse_broken_torch(error)
        sys.exit(
            "torchext is compiled against the PyTorch of your environment, but this environment has no PyTorch: "
            "type `pip install torch` and then `pip install --no-build-isolation .`"
        )
    except ImportError as error:
        refuse_broken_torch(error)
    release = minor_release(torch.__version__)
    if not is_supported(release):
        or_else = ", or accept that it may crash: TORCHEXT_ACCEPT_UNVERIFIED_TORCH=1" if release > NEWEST_TORCH else ""
        sys.exit(
            f"torchext supports torch {named(OLDEST_TORCH)} to {named(NEWEST_TORCH)}, but torch {torch.__version__} is "
            f"installed: type `pip install 'torch=={named(NEWEST_TORCH)}.*'`{or_else}"
        )
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        refuse_broken_torch(error)
    return cpp_extension


def refuse_broken_torch(error: ImportError) -> NoReturn:
    """End the installation if torch is installed but cannot be imported."""
    sys.exit(
        f"torch is installed in this environment, but importing it fails: {type(error).__name__}: {error}. Repair it "
        'until `python -c "import torch.utils.cpp_extension"` works, and install torchext again'
    )


def check_platform() -> None:
    """End the installation with one sentence on an unsupported platform."""
    import sysconfig

    if sys.platform != "linux":
        sys.exit(f"torchext runs on Linux only, and this is {sys.platform}: see docs/how_to/install.md")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "torchext relies on Python's global interpreter lock, but this Python is free-threaded: use a default "
            f"build of Python {sys.version_info[0]}.{sys.version_info[1]}"
        )


def check_compiler() -> None:
    """End the installation with one sentence if there is no C++ compiler."""
    if not os.environ.get("CXX", "").split():
        os.environ.pop("CXX", None)  # empty: setuptools and PyTorch would call a compiler without a name
    compiler = os.environ.get("CXX", "c++").split()[0]  # the compiler that PyTorch's build tools call
    if shutil.which(compiler) is None:
        sys.exit(
            f"torchext is compiled from C++ and no compiler `{compiler}` was found: "
            "type `apt-get install g++` (or set CXX to a C++ compiler)"
        )


def check_setuptools() -> None:
    """End the installation if setuptools is too old to read the license expression in pyproject.toml."""
    installed = version("setuptools")
    if minor_release(installed) < (77, 0):
        sys.exit(
            f"torchext is built with setuptools 77 or later, but setuptools {installed} is installed: type "
            "`pip install 'setuptools>=77,<82' ninja`"
        )
