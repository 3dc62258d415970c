"""Compiles files of `test/cpp/` against PyTorch and torchext."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils import cpp_extension

import torchext

__all__ = ["COMPILER", "PYTORCHS_HEADERS", "ROOT", "compile_program", "compiled", "run"]

ROOT = Path(__file__).parents[1]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
PYTORCHS_HEADERS = [f"-isystem{path}" for path in cpp_extension.include_paths()]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a tool without the sanitizers that `make sanitize` preloads: CMake hangs with one of them."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """Return a library that is linked like a user's program."""
    return ctypes.CDLL(str(compile_program(name, folder, Path(torchext.library_path()))))


def compile_program(name: str, folder: Path, library: Path) -> Path:
    """Compile a file of `test/cpp/`, linked with the torchext in the folder `library`, and return the path."""
    output = folder / f"{Path(name).name}.so"
    folders = [Path(torch.__file__).parent / "lib", library]
    command = [
        *COMPILER,
        *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        *(*PYTORCHS_HEADERS, f"-isystem{sysconfig.get_path('include')}"),
        *(f"-I{path}" for path in (torchext.include_path(), ROOT / "csrc", ROOT / "test" / "cpp")),
        str(ROOT / "test" / "cpp" / f"{name}.cpp"),
        *(f"-o{output}", *(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorchext"),
    ]
    done = run(command)
    assert done.returncode == 0, done.stderr
    return output
