"""Builds torchext against the installed PyTorch of this environment.

There are two targets: the library `torchext/lib/libtorchext.so`, which does not depend on Python, and its bindings,
`torchext._C`. These environment variables change the build:

- `TORCHEXT_WERROR=1`: enable many compiler warnings and make them errors. For development of torchext.
- `TORCHEXT_SANITIZE=address,undefined` (or `thread`): instrument both libraries.
- `TORCHEXT_COVERAGE=1`: both libraries count which of their lines run.
- `TORCHEXT_QUICK=1`: compile with `-O1`, in three quarters of the time. For tests, not for measurements.
- `TORCHEXT_FILE_BY_FILE=1`: compile each file separately, as clang-tidy reads it, and without precompiled headers. This
  takes four times as long, and shows whether each file includes everything that it needs.
- `TORCHEXT_LOCAL_VERSION=1`: add the release of torch to the version, as in `0.1.0+pt2.13`.
- `MAX_JOBS`: the number of parallel compilers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

# pip does not add the folder of setup.py to the path.
sys.path.insert(0, str(Path(__file__).absolute().parent))

from build_tools.command import LIBRARY, make_build_command
from build_tools.facts import version
from build_tools.needs import check_compiler, check_platform, check_setuptools, import_torch_extension_tools, need_torch
from build_tools.settings import NEWEST_TORCH, OLDEST_TORCH, ROOT, is_set, minor_release, named

BINDINGS = "torchext._C"

# Where a C++ program that does not itself link to PyTorch's libraries finds them, if torch is installed next to
# torchext. A torch that is already loaded, as in Python, or that the program links to, takes precedence.
BESIDE_TORCH = "-Wl,-rpath,$ORIGIN/../../torch/lib"

# For our sources only: PyTorch's headers are included as system headers.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror"]


# ---- Targets


def library_sources() -> list[str]:
    """Return the files of the library, or those of some folders of csrc, which `make core` builds alone."""
    if folders := os.environ.get("TORCHEXT_ONLY"):
        return [source for folder in folders.split() for source in find_sources(f"{folder}/")]
    return find_sources(without="python") + ["build_tools/write_counts.cpp"] * is_set("TORCHEXT_COVERAGE")


def find_sources(folder: str = "", *, without: str = "") -> list[str]:
    """Return our C++ files. One calls PyTorch functions that a build without process groups does not have."""
    from torch import distributed

    found = (path.relative_to(ROOT) for path in ROOT.glob(f"csrc/{folder}**/*.cpp"))
    sources = sorted(str(path) for path in found if not without or not path.is_relative_to(f"csrc/{without}"))
    return [path for path in sources if distributed.is_available() or Path(path).name != "process_groups.cpp"]


def compiler_flags(cpp_extension: ModuleType) -> list[str]:
    """Return the compiler flags for all files."""
    flags = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    flags += [f"-I{ROOT / 'torchext' / 'include'}", optimization(), "-g0", "-fvisibility=hidden"]
    if is_set("TORCHEXT_WERROR"):
        flags += WARNINGS
    return flags + instrumentation()


def optimization() -> str:
    """Return the optimization level of the compiler."""
    return "-O1" if is_set("TORCHEXT_QUICK") else "-O3"


def instrumentation() -> list[str]:
    """Return compiler and linker flags for sanitizers and coverage."""
    flags = []
    if sanitizers := os.environ.get("TORCHEXT_SANITIZE"):
        # The vptr check of `undefined` needs symbols that PyTorch's libraries do not export.
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1", "-O1"]
    if is_set("TORCHEXT_COVERAGE"):
        flags += ["--coverage", "-O1"]
    return flags


def make_extensions(cpp_extension: ModuleType) -> list[Extension]:
    """Return the library, and then the bindings, which are linked against it and need all of it."""
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("torchext/include/**/*.h")]
    common = {
        "depends": sorted(str(path.relative_to(ROOT)) for path in headers),
        "extra_compile_args": compiler_flags(cpp_extension),
    }
    library = Extension(
        name=LIBRARY,
        language="c++",
        sources=library_sources(),
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        extra_link_args=["-Wl,-soname,libtorchext.so", "-Wl,-z,defs", BESIDE_TORCH, "-pthread", *instrumentation()],
        **common,
    )
    bindings = cpp_extension.CppExtension(
        name=BINDINGS,
        sources=find_sources("python/"),
        libraries=["torchext"],
        extra_link_args=["-Wl,-rpath,$ORIGIN/lib", *instrumentation()],
        **common,
    )
    return [library] if "TORCHEXT_ONLY" in os.environ else [library, bindings]


# ---- Metadata


def requirements(*, is_compiled: bool) -> list[str]:
    """Return the requirements. Binaries work only with the minor release of PyTorch that they were compiled for."""
    if is_compiled:
        import torch

        return [f"torch=={named(minor_release(torch.__version__))}.*"]
    return [f"torch>={named(OLDEST_TORCH)},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"]


def make_build() -> dict[str, object]:
    """Return the arguments of `setup()` that need torch."""
    check_platform()
    check_setuptools()
    cpp_extension = import_torch_extension_tools()
    check_compiler()
    return {
        "ext_modules": make_extensions(cpp_extension),
        "cmdclass": {"build_ext": make_build_command(cpp_extension)},
    }


if __name__ == "__main__":
    build = make_build() if need_torch(sys.argv[1:]) else {}
    setup(version=version(), install_requires=requirements(is_compiled=bool(build)), **build)
