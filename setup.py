"""Builds torchext against the PyTorch that is installed in this environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup

ROOT = Path(__file__).parent
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)

# Ours only: PyTorch's headers are included as system headers.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror"]


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
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST_TORCH <= version <= NEWEST_TORCH:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TORCH, NEWEST_TORCH))
        sys.exit(
            f"torchext supports torch {oldest} to {newest}, but torch {torch.__version__} is installed: "
            f"type `pip install 'torch=={newest}.*'`"
        )
    return cpp_extension


def check_compiler() -> None:
    """Ends the installation with one sentence when there is no C++ compiler."""
    compiler = os.environ.get("CXX", "c++").split()[0]  # what PyTorch's build tools will call
    if shutil.which(compiler) is None:
        sys.exit(
            f"torchext is compiled from C++ and no compiler `{compiler}` was found: "
            "type `apt-get install g++` (or set CXX to a C++ compiler)"
        )


def find_sources() -> list[str]:
    """Our C++ files. One calls functions of PyTorch that a build without process groups does not have."""
    from torch import distributed

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp"))
    return [path for path in sources if distributed.is_available() or Path(path).name != "process_groups.cpp"]


def make_build() -> dict[str, object]:
    """The arguments of `setup()` that need torch."""
    cpp_extension = import_torch_extension_tools()
    check_compiler()
    system_headers = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    extension = cpp_extension.CppExtension(
        name="torchext._C",
        sources=find_sources(),
        depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h")),
        extra_compile_args=[*system_headers, *WARNINGS, "-O3", "-g0", "-fvisibility=hidden"],
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
    }


if __name__ == "__main__":
    # Asked for already when pip wants metadata, which is before it downloads what the metadata names.
    needs_no_torch = {"sdist", "--version"} & set(sys.argv[1:])
    setup(**({} if needs_no_torch else make_build()))
