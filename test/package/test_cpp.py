"""The C++ API, used from C++: compiles files of `test/cpp/` against PyTorch and torchext, and runs their tests."""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import torchext

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "test" / "cpp"


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """A library that is linked against what a user's program is linked against."""
    output = folder / f"{name}.so"
    folders = [Path(torch.__file__).parent / "lib", Path(torchext.library_path())]
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        *(f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]),
        *(f"-I{torchext.include_path()}", f"-I{ROOT / 'csrc'}"),
        str(SOURCES / f"{name}.cpp"),
        *(f"-o{output}", *(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorchext"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(output))
    for function in (loaded.test_name, loaded.run_test):
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_size_t]
    return loaded


def named_tests(library: ctypes.CDLL) -> Iterator[tuple[int, str]]:
    for index in itertools.count():
        name = library.test_name(index)
        if name is None:
            return
        yield index, name.decode()


# One test for all of the tests of a file, so that only one process compiles them.
@pytest.mark.parametrize(("name", "tests"), [("inference_mode", 7), ("guards", 5)])
def test_guards_are_used_from_cpp(name: str, tests: int, tmp_path: Path) -> None:
    library = compiled(name, tmp_path)
    results = {name: library.run_test(index).decode() for index, name in named_tests(library)}
    assert len(results) == tests
    assert {name: message for name, message in results.items() if message} == {}
