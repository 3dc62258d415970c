"""The location of this torchext for C++ programs, and instructions for reinstalling it in import errors."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any
from urllib.parse import unquote, urlsplit

from .version import NEWEST_TORCH, OLDEST_TORCH, __version__, is_supported

__all__ = [
    "cmake_prefix_path",
    "how_to_install_again",
    "include_path",
    "library_built_for",
    "library_path",
    "torch_version",
    "why_it_cannot_be_loaded",
]

_ROOT = Path(__file__).parent


def include_path() -> str:
    """Return the folder for `#include <torchext/...>`. PyTorch's headers are also needed."""
    return str(_ROOT / "include")


def library_path() -> str:
    """Return the folder of `libtorchext.so`, the part of torchext without Python."""
    return str(_ROOT / "lib")


def cmake_prefix_path() -> str:
    """Return the value of `CMAKE_PREFIX_PATH` for `find_package(torchext)`.

    It is a CMake list of two folders: torchext's, and that of the PyTorch in this process.
    """
    import torch

    return ";".join([str(_ROOT / "share" / "cmake"), torch.utils.cmake_prefix_path])


def why_it_cannot_be_loaded(error: ImportError) -> str:
    """Return the error message if the extension module cannot be imported: the reason, and the remedy.

    Args:
        error: The exception of the import, from the loader or from the module itself.
    """
    told = str(error)
    if told.startswith("torchext cannot be imported"):  # from the extension module's self-test
        return told
    if not _has_extension_module():
        return _what_to_do_without_an_extension_module()
    if not told.startswith("torchext "):  # from the loader
        told = f"{_what_was_built_for_another_torch()} ({told})."
    return f"{told} {how_to_install_again()}"


def how_to_install_again() -> str:
    """Return a sentence on how to get a torchext for the installed torch from the source of this one."""
    release = _release(torch_version())
    if not is_supported(release):
        oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST_TORCH, NEWEST_TORCH))
        return f"torchext {__version__} supports torch {oldest} to {newest}: install one of these, or another torchext."
    pip = "pip install --no-build-isolation --force-reinstall --no-deps"
    if (_ROOT.parent / "setup.py").exists():
        return f"Build it again: {pip} {shlex.quote(str(_ROOT.parent))}"
    source = _source()
    if source is not None and not source.endswith(".whl"):
        return f"Build it again: {pip} {shlex.quote(source)}"
    came_from = "where you got it" if source is None else f"where you got {source}"
    return (
        f"Install the wheel torchext-{__version__}+pt{release[0]}.{release[1]} from {came_from}, or build one from "
        f"the source distribution next to it: {pip} torchext-{__version__}.tar.gz"
    )


def _has_extension_module() -> bool:
    """Return true if there is an extension module for the running Python."""
    return any((_ROOT / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _what_to_do_without_an_extension_module() -> str:
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    checkout = _ROOT.parent
    if (checkout / "setup.py").exists():
        return (
            f"{checkout} is a source tree without a build for {python}. Leave it, and take it off PYTHONPATH, to use a "
            f"torchext that is installed; or build in place: cd {shlex.quote(str(checkout))} && "
            "python setup.py build_ext --inplace"
        )
    return f"The torchext in {_ROOT} was not built for {python}. {how_to_install_again()}"


def _what_was_built_for_another_torch() -> str:
    """Return the beginning of a sentence that names the library, if that is for another release, or torchext."""
    built_for = library_built_for()
    if built_for is not None and _release(built_for) != _release(torch_version()):
        return (
            f"torchext's library in {_ROOT / 'lib'} was built for torch {built_for}, but torch {torch_version()} is "
            "installed"
        )
    return f"torchext was not built for the installed torch {torch_version()}"


def torch_version() -> str:
    """Return the version of the installed PyTorch, without importing it."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    return str(run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def library_built_for() -> str | None:
    """Return the torch version that `libtorchext.so` was built for, from the file next to it."""
    facts = _ROOT / "lib" / "torchextBuild.cmake"
    found = re.search(r'^set\(torchext_TORCH_VERSION "(.+)"\)$', facts.read_text(), re.M) if facts.exists() else None
    return None if found is None else found[1]


def _release(version: str) -> tuple[int, int]:
    """Return the major and the minor version. `2.14.0a0+git5c1f` belongs to release 2.14."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _source() -> str | None:
    """Return the source that pip has recorded for the package (PEP 610)."""
    try:
        written = distribution("torchext").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    return None if written is None else _requirement(json.loads(written))


def _requirement(direct_url: dict[str, Any]) -> str:
    """Return the argument of `pip install` that the `direct_url.json` records."""
    url = str(direct_url["url"])
    folder = direct_url.get("subdirectory")
    if vcs := direct_url.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file://"):
        path = unquote(urlsplit(url).path)
        return path if folder is None else str(Path(path, folder))
    return url if folder is None else f"{url}#subdirectory={folder}"
