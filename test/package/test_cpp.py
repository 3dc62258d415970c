"""The C++ API, used from C++: compiles files of `test/cpp/` against PyTorch and torchext, and runs their tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from cpp_library import COMPILER, PYTORCHS_HEADERS, ROOT, compiled, run
from cpp_tests import run_tests

import torchext

SOURCES = ROOT / "test" / "cpp"
TOOLS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


# One test per file, so that only one process compiles each file.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "tests"),
    [("inference_mode", 7), ("guards", 5), ("threads", 11), ("virtual_table", 2), ("operator_table", 5)],
)
def test_cpp_programs_pass_their_tests(name: str, tests: int, tmp_path: Path) -> None:
    results = run_tests(compiled(name, tmp_path))
    assert len(results) == tests
    assert {name: message for name, message in results.items() if message} == {}


def errors_of(standard: str, header: str) -> str:
    """Return the compiler's messages for a program that includes only `header`."""
    command = [*COMPILER, f"-std={standard}", "-fsyntax-only", *WARNINGS, *PYTORCHS_HEADERS]
    command += [f"-I{torchext.include_path()}", "-include", header, "-x", "c++", os.devnull]
    return run(command).stderr


@pytest.mark.ci
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


CMAKE = shutil.which("cmake", path=TOOLS)
PYTORCH = torch.utils.cmake_prefix_path


def package_in(folder: Path, **facts: object) -> str:
    """Make a CMake package without a library in `folder`, which was built for this torch or for another one."""
    here = Path(torchext.__file__).parent
    shutil.copytree(here / "share", folder / "share")
    shutil.copy(here / "version.py", folder)
    (folder / "lib").mkdir()
    facts = {"torchext_TORCH_VERSION": torch.__version__, "torchext_CXX_STANDARD": 17, **facts}
    text = "".join(f'set({name} "{value}")\n' for name, value in facts.items())
    (folder / "lib" / "torchextBuild.cmake").write_text(text)
    return str(folder / "share" / "cmake")


def configured(project: Path, asked: str, prefixes: list[str]) -> subprocess.CompletedProcess[str]:
    """Let CMake look for `asked` in a separate project without a compiler."""
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(test LANGUAGES NONE)\nfind_package({asked})\n"
        'get_target_property(features torchext::torchext INTERFACE_COMPILE_FEATURES)\nmessage("features ${features}")\n'
    )
    assert CMAKE is not None
    return run([CMAKE, "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"])


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return CMake's error in one line."""
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_cmake_package_refuses_a_torch_that_it_was_not_built_for(tmp_path: Path) -> None:
    package = package_in(tmp_path / "torchext", torchext_TORCH_VERSION="2.3.1")
    message = refusal(configured(tmp_path / "project", "torchext REQUIRED", [package, PYTORCH]))
    assert "this torchext was built for torch 2.3.1, but torch" in message


def test_cmake_package_accepts_another_patch_release_and_requires_the_standard(tmp_path: Path) -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    package = package_in(
        tmp_path / "torchext", torchext_TORCH_VERSION=f"{release}.9a0+git5c1f", torchext_CXX_STANDARD=20
    )
    done = configured(tmp_path / "project", "torchext REQUIRED", [package, PYTORCH])
    assert done.returncode == 0, done.stderr
    assert "features cxx_std_20" in done.stderr


def test_cmake_package_finds_the_torch_installed_next_to_it(tmp_path: Path) -> None:
    package = package_in(tmp_path / "torchext")
    message = refusal(configured(tmp_path / "alone", "torchext REQUIRED", [package]))
    assert "PyTorch was not found: add to CMAKE_PREFIX_PATH what `python -c 'import torch; " in message
    assert "print(torch.utils.cmake_prefix_path)'` prints" in message
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    assert configured(tmp_path / "beside", "torchext REQUIRED", [package]).returncode == 0


def test_cmake_package_has_no_components(tmp_path: Path) -> None:
    package = package_in(tmp_path / "torchext")
    done = configured(tmp_path / "project", "torchext REQUIRED COMPONENTS nonsense", [package, PYTORCH])
    assert "torchext has no components, but `nonsense` was requested" in refusal(done)


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("version", "is_compatible"),
    [
        ("0.1", True),
        ("0.1.0 EXACT", True),
        ("0.0", False),
        ("0.2", False),
        ("0.1.9", False),
        ("0.1...0.3", True),
        ("0.0...0.1.0", True),
        ("0.0...<0.1", False),
        ("0.2...0.3", False),
    ],
)
def test_cmake_package_admits_a_minor_version_or_a_range(version: str, is_compatible: bool, tmp_path: Path) -> None:
    package = package_in(tmp_path / "torchext")
    done = configured(tmp_path / "project", f"torchext {version} REQUIRED", [package, PYTORCH])
    assert (done.returncode == 0) == is_compatible, done.stderr


@pytest.mark.ci
def test_programs_start_without_python_and_use_it_first_in_several_threads(tmp_path: Path) -> None:
    assert CMAKE is not None
    prefixes = f"-DCMAKE_PREFIX_PATH={torchext.cmake_prefix_path()}"
    for command in ([CMAKE, "-S", SOURCES / "consumer", "-B", tmp_path, prefixes], [CMAKE, "--build", tmp_path]):
        done = run(command)
        assert done.returncode == 0, done.stderr
    for program in ("consumer", "first_use"):
        done = run([tmp_path / program])
        assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_library_searches_for_the_torch_next_to_it() -> None:
    library = Path(torchext.library_path()) / "libtorchext.so"
    found = re.search(r"runpath: \[(.*)\]", run(["readelf", "-d", library]).stdout)
    assert found is not None
    assert "$ORIGIN/../../torch/lib" in found[1].split(":")  # a Python may add its own folder to all that it links
