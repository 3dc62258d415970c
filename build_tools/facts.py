"""The version of this build, and build settings for CMake and the Makefile."""

from __future__ import annotations

from .settings import VERSION, is_set, minor_release, named


def version() -> str:
    """Return torchext's version. For wheels of several PyTorch releases, it includes the release of PyTorch."""
    if not is_set("TORCHEXT_LOCAL_VERSION"):
        return VERSION
    import torch

    return f"{VERSION}+pt{named(minor_release(torch.__version__))}"


def build_facts(variant: str) -> str:
    """Return the contents of torchext/lib/torchextBuild.cmake.

    The readers are torchext/share/cmake/torchext/torchextConfig.cmake, torchext/installation.py, and the Makefile.
    """
    import torch

    facts = {
        "torchext_VERSION": VERSION,
        "torchext_TORCH_VERSION": torch.__version__,
        "torchext_CXX_STANDARD": cxx_standard(torch.__version__),
        "torchext_BUILD": variant,
    }
    return "".join(f'set({name} "{value}")\n' for name, value in facts.items())


def cxx_standard(torch_version: str) -> int:
    """Return the C++ standard that PyTorch's CMake package requires, which its headers may use."""
    return 20 if minor_release(torch_version) >= (2, 12) else 17
