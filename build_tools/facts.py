"""What this build is called, and what it tells the CMake package of itself."""

from __future__ import annotations

import re
from pathlib import Path

from .settings import ROOT, is_set, minor_release, named


def version() -> str:
    """Our version; for wheels that lie beside others, with the release of PyTorch that they are for."""
    [found] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "torchext" / "version.py").read_text(), re.M)
    if not is_set("TORCHEXT_LOCAL_VERSION"):
        return str(found)
    import torch

    return f"{found}+pt{named(minor_release(torch.__version__))}"


def write_build_facts(path: Path) -> None:
    """Writes what the CMake package has to know of this build: torchext/share/cmake/torchext/torchextConfig.cmake."""
    import torch

    facts = {"torchext_VERSION": version(), "torchext_TORCH_VERSION": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'set({name} "{value}")\n' for name, value in facts.items()))
