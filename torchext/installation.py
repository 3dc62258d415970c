"""Where this torchext is, for C++ programs, and how to install it again, for the error that says so."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from .version import __version__

__all__ = ["cmake_prefix_path", "how_to_install_again", "include_path", "library_path"]

_ROOT = Path(__file__).parent


def include_path() -> str:
    """Returns the folder that `#include <torchext/...>` is relative to. PyTorch's own headers are needed, too."""
    return str(_ROOT / "include")


def library_path() -> str:
    """Returns the folder of `libtorchext.so`, the part of torchext that knows no Python."""
    return str(_ROOT / "lib")


def cmake_prefix_path() -> str:
    """Returns what `CMAKE_PREFIX_PATH` needs for `find_package(torchext)`.

    That is a list, as CMake writes one, of two folders: torchext's own, and that of the PyTorch of this process.
    """
    return ";".join([str(_ROOT / "share" / "cmake"), torch.utils.cmake_prefix_path])


def how_to_install_again() -> str:
    """Returns a sentence that says how to get a torchext for the installed torch, from where this one came."""
    pip = "pip install --no-build-isolation --force-reinstall --no-deps"
    if (_ROOT.parent / "setup.py").exists():
        return f"Build it again: {pip} {_ROOT.parent}"
    source = _source()
    if source is not None and not source.endswith(".whl"):
        return f"Build it again: {pip} {source}"
    release = ".".join(torch.__version__.split(".")[:2])
    came_from = "where you got it" if source is None else f"where you got {source}"
    return (
        f"Take the wheel torchext-{__version__}+pt{release} from {came_from}, or build one from the source "
        f"distribution that lies beside it: {pip} torchext-{__version__}.tar.gz"
    )


def _source() -> str | None:
    """Returns the address that pip was given, which it writes down beside the package (PEP 610)."""
    try:
        written = distribution("torchext").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return None if written is None else str(json.loads(written)["url"]).removeprefix("file://")
