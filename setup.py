"""Builds torchext against the PyTorch that is installed in this environment.

What is built is a library, `torchext/lib/libtorchext.so`, which does not depend on Python, and the bindings to it,
`torchext._C`.
These variables of the environment change what is built:

- `TORCHEXT_WERROR=1`: the compiler warns of much, and warnings are errors. For those who change torchext.
- `TORCHEXT_SANITIZE=address,undefined` (or `thread`): both libraries are instrumented.
- `TORCHEXT_COVERAGE=1`: both libraries count which of their lines run.
- `TORCHEXT_FILE_BY_FILE=1`: each file is compiled for itself, as clang-tidy reads it, and no header in advance. That
  takes four times as long, and shows whether each file includes what it needs.
- `TORCHEXT_LOCAL_VERSION=1`: the version ends in the release of torch that it is for, as in `0.1.0+pt2.13`.
- `MAX_JOBS`: how many compilers run at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

# pip does not look for modules beside setup.py.
sys.path.insert(0, str(Path(__file__).absolute().parent))

from build_tools.command import LIBRARY, make_build_command
from build_tools.facts import version
from build_tools.needs import check_compiler, check_platform, check_setuptools, import_torch_extension_tools, need_torch
from build_tools.settings import NEWEST_TORCH, OLDEST_TORCH, ROOT, is_set, minor_release, named

BINDINGS = "torchext._C"

# Where a program in C++ finds PyTorch's libraries if it does not need them itself, and torch is installed beside
# torchext. A torch that is loaded already, as in Python, or that the program names, comes first.
BESIDE_TORCH = "-Wl,-rpath,$ORIGIN/../../torch/lib"

# Ours only: PyTorch's headers are included as system headers.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror"]


# ---- What is built.


def find_sources(folder: str = "", *, without: str = "") -> list[str]:
    """Our C++ files. One calls functions of PyTorch that a build without process groups does not have."""
    from torch import distributed

    found = (path.relative_to(ROOT) for path in ROOT.glob(f"csrc/{folder}**/*.cpp"))
    sources = sorted(str(path) for path in found if not without or not path.is_relative_to(f"csrc/{without}"))
    return [path for path in sources if distributed.is_available() or Path(path).name != "process_groups.cpp"]


def compiler_flags(cpp_extension: ModuleType) -> list[str]:
    """What the compiler is told for all files."""
    flags = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    flags += [f"-I{ROOT / 'torchext' / 'include'}", "-O3", "-g0", "-fvisibility=hidden"]
    if is_set("TORCHEXT_WERROR"):
        flags += WARNINGS
    return flags + instrumentation()


def instrumentation() -> list[str]:
    """What the compiler and the linker are told where runs are to be watched."""
    flags = []
    if sanitizers := os.environ.get("TORCHEXT_SANITIZE"):
        # Of the many checks of `undefined`, PyTorch's libraries do not export what that of virtual tables asks for.
        flags += [f"-fsanitize={sanitizers}", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1", "-O1"]
    if is_set("TORCHEXT_COVERAGE"):
        flags += ["--coverage", "-fprofile-update=atomic", "-O0"]
    return flags


def make_extensions(cpp_extension: ModuleType) -> list[Extension]:
    """The library, and then the bindings, which are linked against it."""
    headers = [*ROOT.glob("csrc/**/*.h"), *ROOT.glob("torchext/include/**/*.h")]
    common = {
        "depends": sorted(str(path.relative_to(ROOT)) for path in headers),
        "extra_compile_args": compiler_flags(cpp_extension),
    }
    library = Extension(
        name=LIBRARY,
        language="c++",
        sources=find_sources(without="python"),
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
    return [library, bindings]


# ---- What it is called.


def requirements(*, is_compiled: bool) -> list[str]:
    """What is compiled fits the minor release of PyTorch that it was compiled against, and no other."""
    if is_compiled:
        import torch

        return [f"torch=={named(minor_release(torch.__version__))}.*"]
    return [f"torch>={named(OLDEST_TORCH)},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"]


def make_build(arguments: list[str]) -> dict[str, object]:
    """The arguments of `setup()` that need torch."""
    check_platform()
    check_setuptools(arguments)
    cpp_extension = import_torch_extension_tools()
    check_compiler()
    return {
        "ext_modules": make_extensions(cpp_extension),
        "cmdclass": {"build_ext": make_build_command(cpp_extension)},
    }


if __name__ == "__main__":
    build = make_build(sys.argv[1:]) if need_torch(sys.argv[1:]) else {}
    setup(version=version(), install_requires=requirements(is_compiled=bool(build)), **build)
