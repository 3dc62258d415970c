"""What this build is called, and what it tells CMake and the Makefile of itself."""

from __future__ import annotations

from .settings import VERSION, is_set, minor_release, named


def version() -> str:
    """Our version; for wheels that lie beside others, with the release of PyTorch that they are for."""
    if not is_set("TORCHEXT_LOCAL_VERSION"):
        return VERSION
    import torch

    return f"{VERSION}+pt{named(minor_release(torch.__version__))}"


def build_facts(variant: str) -> str:
    """Returns what torchext/lib/torchextBuild.cmake says of this build.

    It is read by torchext/share/cmake/torchext/torchextConfig.cmake, by torchext/installation.py, and by the Makefile.
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
    """Returns the C++ standard that PyTorch's own CMake package asks for, which its headers may use."""
    return 20 if minor_release(torch_version) >= (2, 12) else 17
