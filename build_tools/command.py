"""The command `build_ext`: PyTorch's command with grouped files and a precompiled header."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension

from .facts import build_facts
from .grouping import grouped
from .output import shortened_lines
from .settings import ROOT, is_set

# Memory (KiB) that GCC may use before its first garbage collection. Without this, collection takes a tenth of its time.
GCC_MEMORY = 1_000_000

# The library's name as an extension.
LIBRARY = "torchext.lib.libtorchext"


def make_build_command(cpp_extension: ModuleType) -> type:
    """Return PyTorch's command `build_ext`, extended by precompiled headers and progress output."""

    class Build(cpp_extension.BuildExtension):  # type: ignore[name-defined,misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            # Objects for another release of PyTorch or other flags cannot be reused.
            self.build_temp: str = str(Path(self.build_temp, variant()))
            # The bindings link against the library, so the two extensions are not parallel, but compilers are.
            if self.parallel:
                os.environ.setdefault("MAX_JOBS", str(self.parallel))
                self.parallel: int | None = None

        def get_ext_filename(self, fullname: str) -> str:
            if fullname.endswith(LIBRARY.rpartition(".")[2]):  # not a Python module, so no ABI suffix
                return str(Path(*fullname.split("."))) + ".so"
            return str(super().get_ext_filename(fullname))

        def run(self) -> None:
            roots = {Path(self.build_lib), *([ROOT] if self.inplace else [])}
            paths = [root / "torchext" / "lib" / "torchextBuild.cmake" for root in roots]
            facts = build_facts(variant())
            if not all(path.exists() and path.read_text() == facts for path in paths):
                # The existing file was linked for another PyTorch or with other flags, although it is newer than the
                # sources.
                self.force = True
            for path in paths:
                path.unlink(missing_ok=True)
                path.parent.mkdir(parents=True, exist_ok=True)
            super().run()
            for path in paths:
                path.write_text(facts)

        def build_extensions(self) -> None:
            if not self.use_ninja:
                print("compiling files one by one; `pip install ninja` makes this faster", flush=True)
            with shortened_lines():
                super().build_extensions()

        def build_extension(self, extension: Extension) -> None:
            extension.library_dirs.append(str(Path(self.build_lib, "torchext", "lib")))
            is_fast = not is_set("TORCHEXT_FILE_BY_FILE") and is_gcc(cpp_extension)
            if is_fast and extension.name == LIBRARY:
                self._compile_together(self.extensions)
            super().build_extension(extension)

        def copy_file(self, infile: str, outfile: str, *args: Any, **kwargs: Any) -> tuple[str, bool]:
            """Copy a library under a temporary name and rename it: running processes may have the old one mapped."""
            part = f"{outfile}.{os.getpid()}"
            super().copy_file(infile, part, *args, **kwargs)
            Path(part).replace(outfile)
            return outfile, True

        def _compile_together(self, extensions: list[Extension]) -> None:
            """Compile a header for all files, then the files of all extensions together to keep processors busy."""
            library = extensions[0]
            for extension in extensions:
                extension.sources = grouped(extension.sources, Path(self.build_temp, extension.name))
                # The extension must look the same when setuptools builds it later.
                flags = extension.extra_compile_args
                flags = [flag for flag in flags if not flag.startswith("-DTORCH_EXTENSION_NAME=")]
                extension.extra_compile_args = [*flags, f"--param=ggc-min-heapsize={GCC_MEMORY}"]
            header = self._precompiled(Path("csrc/precompiled.h"), library)
            for extension in extensions:
                extension.extra_compile_args += ["-include", str(header), "-fpch-preprocess", "-Winvalid-pch"]
            # PyTorch compiles with ccache if available. ccache needs this setting and `-fpch-preprocess` to cache
            # objects that were compiled with a precompiled header.
            os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros,include_file_mtime,include_file_ctime")
            if self.use_ninja:  # without ninja, compiled files would be compiled again
                sources = [source for extension in reversed(extensions) for source in extension.sources]
                self._compile(sources, library, self.build_temp)

        def _precompiled(self, header: Path, extension: Extension) -> Path:
            """Compile `header` and return the path to include.

            Ninja does not track that objects depend on a precompiled header. The header's name therefore contains a
            digest of its inputs: when these change, the commands that name it change.
            """
            folder = Path(self.build_temp, f"precompiled-{self._digest(header, extension)}").absolute()
            for outdated in set(folder.parent.glob("precompiled-*")) - {folder}:
                shutil.rmtree(outdated, ignore_errors=True)
            self.compiler.src_extensions += {".h"}.difference(self.compiler.src_extensions)
            [compiled] = self._compile([str(header)], extension, str(folder), ["-x", "c++-header"])
            # GCC uses `NAME.gch` for `NAME`, and reads `NAME` only if the flags do not fit.
            place = folder / header.name
            if not place.exists() or place.stat().st_mtime < Path(compiled).stat().st_mtime:
                replace_by_link(Path(compiled), Path(f"{place}.gch"))
                place.write_text(f'#include "{header.absolute()}"\n')
            return place

        def _digest(self, header: Path, extension: Extension) -> str:
            """Return a digest of the inputs of a precompiled header: its text, the compiler and the flags."""
            parts = [header.read_text(), compiler_version(cpp_extension), *self.compiler.compiler_so]
            parts += [*extension.include_dirs, *extension.extra_compile_args]
            return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

        def _compile(
            self, sources: list[str], extension: Extension, output_dir: str, flags_before: list[str] | None = None
        ) -> list[str]:
            """Compile files that are out of date, like setuptools, and return the names of the objects."""
            objects: list[str] = self.compiler.compile(
                sources,
                output_dir=output_dir,
                include_dirs=extension.include_dirs,
                extra_preargs=flags_before,
                extra_postargs=extension.extra_compile_args,
            )
            return objects

    return Build


def variant() -> str:
    """Return a name for the PyTorch release and the flags of the objects."""
    import torch

    names = [torch.__version__, os.environ.get("TORCHEXT_SANITIZE", "")]
    names += [name for name in ("coverage", "quick", "werror") if is_set(f"TORCHEXT_{name.upper()}")]
    return "-".join(re.sub(r"[^\w.+]", "-", name) for name in names if name)


def compiler_version(cpp_extension: ModuleType) -> str:
    """Return the version string of the compiler."""
    command = [*cpp_extension.get_cxx_compiler().split(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def is_gcc(cpp_extension: ModuleType) -> bool:
    """Return true for GCC. Clang also has precompiled headers, but takes them by another flag."""
    return "Free Software Foundation" in compiler_version(cpp_extension)


def replace_by_link(source: Path, target: Path) -> None:
    """Link `target` to `source`, or copy it if the file system has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
