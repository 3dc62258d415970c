"""The C++ API, used from C++: compiles files of `test/cpp/` against PyTorch and torchext, and runs their tests."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shlex
import shutil
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


COMPILER = shlex.split(os.environ.get("CXX", "c++"))
PYTORCHS_HEADERS = [f"-isystem{path}" for path in cpp_extension.include_paths()]
TOOLS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs a tool, without the sanitizers that `make sanitize` loads into our processes: CMake hangs with one."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def compiled(name: str, folder: Path) -> ctypes.CDLL:
    """A library that is linked against what a user's program is linked against."""
    output = folder / f"{name}.so"
    folders = [Path(torch.__file__).parent / "lib", Path(torchext.library_path())]
    command = [
        *COMPILER,
        *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        *(*PYTORCHS_HEADERS, f"-isystem{sysconfig.get_path('include')}"),
        *(f"-I{torchext.include_path()}", f"-I{ROOT / 'csrc'}"),
        str(SOURCES / f"{name}.cpp"),
        *(f"-o{output}", *(f"-L{folder}" for folder in folders), *(f"-Wl,-rpath,{folder}" for folder in folders)),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorchext"),
    ]
    done = run(command)
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
@pytest.mark.parametrize(("name", "tests"), [("inference_mode", 7), ("guards", 5), ("threads", 8)])
def test_cpp_programs_use_guards_and_threads(name: str, tests: int, tmp_path: Path) -> None:
    library = compiled(name, tmp_path)
    results = {name: library.run_test(index).decode() for index, name in named_tests(library)}
    assert len(results) == tests
    assert {name: message for name, message in results.items() if message} == {}


def errors_of(standard: str, header: str) -> str:
    """Returns what the compiler says of a program that includes nothing but `header`."""
    command = [*COMPILER, f"-std={standard}", "-fsyntax-only", *WARNINGS, *PYTORCHS_HEADERS]
    command += [f"-I{torchext.include_path()}", "-include", header, "-x", "c++", os.devnull]
    return run(command).stderr


@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_public_headers_compile_alone_and_without_a_warning(standard: str) -> None:
    if errors_of(standard, "ATen/core/Tensor.h"):
        pytest.skip(f"PyTorch's own headers are not {standard}")
    headers = sorted(Path(torchext.include_path()).glob("torchext/*.h"))
    errors = {path.name: errors_of(standard, f"torchext/{path.name}") for path in headers}
    assert len(errors) > 6
    assert {name: error for name, error in errors.items() if error} == {}


def test_public_headers_show_nothing_of_python_or_of_private_files() -> None:
    included = {
        name
        for path in Path(torchext.include_path()).glob("torchext/*.h")
        for name in re.findall(r'^#include ["<](.+)[">]', path.read_text(), re.M)
    }
    assert not [name for name in included if name.startswith(("torch/", "pybind11/", "Python.h", "."))]


def test_library_needs_no_python() -> None:
    library = Path(torchext.library_path()) / "libtorchext.so"
    for command, wanted in ((["nm", "-D", "--undefined-only"], " U "), (["readelf", "-d"], "NEEDED")):
        lines = subprocess.run([*command, library], capture_output=True, text=True, check=True).stdout.splitlines()
        named = [line.split()[-1] for line in lines if wanted in line]
        assert named
        assert not [name for name in named if re.match(r"_?Py|\[libtorch_python|\[libpython", name)]


def configured(project: Path, package: str, prefixes: list[str]) -> subprocess.CompletedProcess[str]:
    """Has CMake look for `package` in a project of its own."""
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(test LANGUAGES CXX)\nfind_package({package} REQUIRED)\n"
    )
    cmake = shutil.which("cmake", path=TOOLS)
    assert cmake is not None
    return run([cmake, "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"])


def test_cmake_package_refuses_a_torch_that_it_was_not_built_for(tmp_path: Path) -> None:
    here = Path(torchext.__file__).parent
    shutil.copytree(here / "share", tmp_path / "torchext" / "share")
    shutil.copy(here / "version.py", tmp_path / "torchext")
    facts = tmp_path / "torchext" / "lib" / "torchextBuild.cmake"
    facts.parent.mkdir()
    facts.write_text('set(torchext_TORCH_VERSION "2.3.1")\n')
    pytorch = torch.utils.cmake_prefix_path
    if torch.version.cuda is not None and configured(tmp_path / "pytorch", "Torch", [pytorch]).returncode != 0:
        pytest.skip("CMake does not find a PyTorch for CUDA without all of CUDA")
    done = configured(tmp_path / "project", "torchext", [str(tmp_path / "torchext" / "share" / "cmake"), pytorch])
    assert done.returncode != 0
    assert "this torchext was built for torch 2.3.1, but torch" in " ".join(done.stderr.split())
