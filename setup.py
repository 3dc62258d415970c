"""Builds torchext against the PyTorch that is installed in this environment.

What is built is a library, `torchext/lib/libtorchext.so`, which knows no Python, and the bindings to it, `torchext._C`.
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
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup

ROOT = Path(__file__).parent
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)

# How much memory (KiB) GCC uses before it first looks for what it could free, which takes a tenth of its time.
GCC_MEMORY = 1_000_000

# Of the C++. Larger groups leave processors idle at the end, and let those wait who change one file.
BYTES_IN_A_GROUP = 60_000

LIBRARY = "torchext.lib.libtorchext"
BINDINGS = "torchext._C"

# Ours only: PyTorch's headers are included as system headers.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror"]


def is_set(variable: str) -> bool:
    """Tells whether a variable of the environment is something else than 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def torch_release(version: str) -> tuple[int, ...]:
    """Returns the major and the minor version."""
    return tuple(int(part) for part in version.split(".")[:2])


def named(release: tuple[int, ...]) -> str:
    """Returns a release as PyTorch writes it."""
    return ".".join(map(str, release))


# ---- What is needed.


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
    if not OLDEST_TORCH <= torch_release(torch.__version__) <= NEWEST_TORCH:
        sys.exit(
            f"torchext supports torch {named(OLDEST_TORCH)} to {named(NEWEST_TORCH)}, but torch {torch.__version__} is "
            f"installed: type `pip install 'torch=={named(NEWEST_TORCH)}.*'`"
        )
    return cpp_extension


def check_platform() -> None:
    """Ends the installation with one sentence where torchext is known not to work."""
    import sysconfig

    if sys.platform != "linux":
        sys.exit(f"torchext runs on Linux, and this is {sys.platform}: docs/installing.md says what it would take")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "torchext relies on Python's global lock, and this Python is built without it: "
            f"take an ordinary Python {sys.version_info[0]}.{sys.version_info[1]}"
        )


def check_compiler() -> None:
    """Ends the installation with one sentence when there is no C++ compiler."""
    compiler = os.environ.get("CXX", "c++").split()[0]  # what PyTorch's build tools will call
    if shutil.which(compiler) is None:
        sys.exit(
            f"torchext is compiled from C++ and no compiler `{compiler}` was found: "
            "type `apt-get install g++` (or set CXX to a C++ compiler)"
        )


# ---- What is built.


def find_sources(folder: str = "", *, without: str = "") -> list[str]:
    """Our C++ files. One calls functions of PyTorch that a build without process groups does not have."""
    from torch import distributed

    found = (path.relative_to(ROOT) for path in ROOT.glob(f"csrc/{folder}**/*.cpp"))
    sources = sorted(str(path) for path in found if not without or not path.is_relative_to(f"csrc/{without}"))
    return [path for path in sources if distributed.is_available() or Path(path).name != "process_groups.cpp"]


def grouped(sources: list[str], folder: Path) -> list[str]:
    """Returns files in `folder` that include the sources, some of a room each.

    Half of the time that a small file takes goes into templates of PyTorch's headers, which GCC instantiates again for
    each file, precompiled or not.
    """
    by_room: dict[Path, list[str]] = {}
    for source in sources:
        by_room.setdefault(Path(source).parent, []).append(source)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for room, files in by_room.items():
        for number, group in enumerate(in_equal_parts(files)):
            path = folder / f"{'_'.join(room.parts)}_{number}.cpp"
            text = "".join(f'#include "{ROOT.absolute() / name}"\n' for name in group)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            made.append(str(path))
    return made


def in_equal_parts(files: list[str]) -> list[list[str]]:
    """Cuts a list of files into as few parts as there may be, about equally long."""
    ends = list(accumulate((ROOT / name).stat().st_size for name in files))
    count = -(-ends[-1] // BYTES_IN_A_GROUP)
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, end in zip(files, ends, strict=True):
        parts[(end - 1) * count // ends[-1]].append(name)
    return [part for part in parts if part]


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
        extra_link_args=["-Wl,-soname,libtorchext.so", "-Wl,-z,defs", "-pthread", *instrumentation()],
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


def make_build_command(cpp_extension: ModuleType) -> type:
    """Returns PyTorch's command `build_ext`, which compiles headers in advance and shows how far it has come."""

    class Build(cpp_extension.BuildExtension):  # type: ignore[name-defined,misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # Objects for one release of PyTorch, or with other flags, are of no use to another.
            self.build_temp: str = str(Path(self.build_temp, self._variant()))

        def _variant(self) -> str:
            import torch

            names = [torch.__version__, os.environ.get("TORCHEXT_SANITIZE", "")]
            names += ["coverage" if is_set("TORCHEXT_COVERAGE") else ""]
            return "-".join(re.sub(r"[^\w.+]", "-", name) for name in names if name)

        def get_ext_filename(self, fullname: str) -> str:
            if fullname.endswith(LIBRARY.rpartition(".")[2]):  # no module, so without the name of a Python
                return str(Path(*fullname.split("."))) + ".so"
            return str(super().get_ext_filename(fullname))

        def build_extensions(self) -> None:
            with shortened_lines():
                super().build_extensions()

        def build_extension(self, extension: Extension) -> None:
            extension.library_dirs.append(str(Path(self.build_lib, "torchext", "lib")))
            is_fast = not is_set("TORCHEXT_FILE_BY_FILE") and self.use_ninja and is_gcc(cpp_extension)
            if is_fast and extension.name == LIBRARY:
                self._compile_together(*self.extensions)
            super().build_extension(extension)

        def run(self) -> None:
            for root in {Path(self.build_lib), *([ROOT] if self.inplace else [])}:
                write_build_facts(root / "torchext" / "lib" / "torchextBuild.cmake")
            super().run()

        def _compile_together(self, library: Extension, bindings: Extension) -> None:
            """Compiles a header for all files, and then the files of both, so that no processor waits in between."""
            for extension in (library, bindings):
                extension.sources = grouped(extension.sources, Path(self.build_temp, extension.name))
                # What has been compiled here has to look so when it is the turn of the extension.
                flags = extension.extra_compile_args
                flags = [flag for flag in flags if not flag.startswith("-DTORCH_EXTENSION_NAME=")]
                extension.extra_compile_args = [*flags, f"--param=ggc-min-heapsize={GCC_MEMORY}"]
            header = self._precompiled(Path("csrc/precompiled.h"), library)
            for extension in (library, bindings):
                extension.extra_compile_args += ["-include", str(header), "-fpch-preprocess"]
            # PyTorch compiles with ccache where it finds it. This, and the last flag, is what that wants to be told
            # before it remembers what was compiled with a precompiled header.
            os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros,include_file_mtime,include_file_ctime")
            self._compile([*bindings.sources, *library.sources], library)

        def _precompiled(self, header: Path, extension: Extension) -> Path:
            """Compiles `header`, and returns what stands for it."""
            self.compiler.src_extensions += {".h"}.difference(self.compiler.src_extensions)
            [compiled] = self._compile([str(header)], extension)
            # GCC takes `NAME.gch` for `NAME`, which is read only where the first does not fit the flags.
            place = Path(compiled).with_suffix(".h").absolute()
            if not place.exists() or place.stat().st_mtime < Path(compiled).stat().st_mtime:
                Path(f"{place}.gch").unlink(missing_ok=True)
                os.link(compiled, f"{place}.gch")
                place.write_text(f'#include "{header.absolute()}"\n')  # whose age is that of all that follows
            return place

        def _compile(self, sources: list[str], extension: Extension) -> list[str]:
            """Compiles, as setuptools would, what is not compiled yet, and returns the names of the objects."""
            objects: list[str] = self.compiler.compile(
                sources,
                output_dir=self.build_temp,
                include_dirs=extension.include_dirs,
                extra_postargs=extension.extra_compile_args,
            )
            return objects

    return Build


def write_build_facts(path: Path) -> None:
    """Writes what the CMake package has to know of this build: torchext/share/cmake/torchext/torchextConfig.cmake."""
    import torch

    facts = {"torchext_VERSION": version(), "torchext_TORCH_VERSION": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'set({name} "{value}")\n' for name, value in facts.items()))


def is_gcc(cpp_extension: ModuleType) -> bool:
    """Clang has precompiled headers, too, which are given to it in another way."""
    asked = subprocess.run([*cpp_extension.get_cxx_compiler().split(), "--version"], capture_output=True, check=False)
    return b"Free Software Foundation" in asked.stdout


@contextmanager
def shortened_lines() -> Iterator[None]:
    """Shows the commands of `ninja` and of the linker as the files that they are about."""
    sys.stdout.flush()
    lines, end = os.pipe()
    real = os.dup(1)
    os.dup2(end, 1)
    os.close(end)

    def pass_on() -> None:
        with open(lines, errors="replace") as source, open(real, "w", buffering=1, closefd=False) as target:  # noqa: PTH123
            for line in source:
                line = re.sub(r"^(\[\d+/\d+\]) .* -c \S*?([^/ ]+) -o .*", r"\1 \2", line)
                target.write(re.sub(r"^\S+ .* -shared .* -o (\S+) .*", r"linking \1", line))

    reader = threading.Thread(target=pass_on)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)  # closes the last end of the pipe, which ends the thread
        reader.join()
        os.close(real)


# ---- What it is called.


def version() -> str:
    """Our version; for wheels that lie beside others, with the release of PyTorch that they are for."""
    [found] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "torchext" / "version.py").read_text(), re.M)
    if not is_set("TORCHEXT_LOCAL_VERSION"):
        return str(found)
    import torch

    return f"{found}+pt{named(torch_release(torch.__version__))}"


def requirements(*, is_compiled: bool) -> list[str]:
    """What is compiled fits the minor release of PyTorch that it was compiled against, and no other."""
    if is_compiled:
        import torch

        return [f"torch=={named(torch_release(torch.__version__))}.*"]
    return [f"torch>={named(OLDEST_TORCH)},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}"]


def make_build() -> dict[str, object]:
    """The arguments of `setup()` that need torch."""
    check_platform()
    cpp_extension = import_torch_extension_tools()
    check_compiler()
    return {
        "ext_modules": make_extensions(cpp_extension),
        "cmdclass": {"build_ext": make_build_command(cpp_extension)},
    }


if __name__ == "__main__":
    # `egg_info` is what is asked for before a source distribution is made. The metadata of what will be installed are
    # asked for by `dist_info`, which is before pip downloads what they name.
    needs_no_torch = bool({"sdist", "egg_info", "--version"} & set(sys.argv[1:]))
    build = {} if needs_no_torch else make_build()
    setup(version=version(), install_requires=requirements(is_compiled=bool(build)), **build)
