"""Compiles files of `test/cpp/` and `test/bindings/` against PyTorch and torchext."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

import torchext

__all__ = ["COMPILER", "PYTORCHS_HEADERS", "ROOT", "compile_program", "compiled", "extension", "run"]

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
    done = run(_command(ROOT / "test" / "cpp" / f"{name}.cpp", output, library=library))
    assert done.returncode == 0, done.stderr
    return output


def extension(name: str) -> ModuleType:
    """Return the Python module of `test/NAME/*.cpp`, compiled if its sources have changed since the last time.

    All processes share the compiled module. While one of them compiles it, the others wait.
    """
    folder = ROOT / "build" / name / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _update(output, sorted((ROOT / "test" / name).glob("*.cpp")))
    loader = ExtensionFileLoader(name, str(output))
    module = module_from_spec(ModuleSpec(name, loader, origin=str(output)))
    loader.exec_module(module)
    return module


def _update(output: Path, sources: Sequence[Path]) -> None:
    """Compile `sources` as one unit: most of the time is that of PyTorch's headers."""
    unit, new, dependencies = (output.with_suffix(suffix) for suffix in (".cpp", ".new", ".d"))
    command = _command(unit, new, "-fvisibility=hidden", "-MMD", f"-MF{dependencies}", "-ltorch_python")
    text = "\n".join([f"// {shlex.join(command)}", *(f'#include "{source}"' for source in sources), ""])
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    if output.exists() and all(_is_older(Path(one), output) for one in _prerequisites(dependencies)):
        return
    done = run(command)
    assert done.returncode == 0, done.stderr
    new.replace(output)  # processes may have loaded the previous one


def _is_older(file: Path, output: Path) -> bool:
    return file.exists() and file.stat().st_mtime <= output.stat().st_mtime


def _prerequisites(dependencies: Path) -> list[str]:
    """Return the files that the compiler has read, without those of PyTorch and of the system."""
    return dependencies.read_text().replace("\\\n", " ").split()[1:]


def _command(source: Path, output: Path, *options: str, library: Path | None = None) -> list[str]:
    folders = [Path(torch.__file__).parent / "lib", library or Path(torchext.library_path())]
    return [
        *COMPILER,
        *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        *(*PYTORCHS_HEADERS, f"-isystem{sysconfig.get_path('include')}"),
        *(f"-I{path}" for path in (torchext.include_path(), ROOT / "csrc", ROOT / "test" / "cpp")),
        *(str(source), f"-o{output}"),
        *(*(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)),
        *(*options, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorchext"),
    ]
