"""The command `build_ext`: PyTorch's, with groups of files and a precompiled header."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

from setuptools import Extension

from .facts import write_build_facts
from .grouping import grouped
from .output import shortened_lines
from .settings import ROOT, is_set

# How much memory (KiB) GCC uses before it first looks for what it could free, which takes a tenth of its time.
GCC_MEMORY = 1_000_000

# The library's name as an extension.
LIBRARY = "torchext.lib.libtorchext"


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


def is_gcc(cpp_extension: ModuleType) -> bool:
    """Clang has precompiled headers, too, which are given to it in another way."""
    asked = subprocess.run([*cpp_extension.get_cxx_compiler().split(), "--version"], capture_output=True, check=False)
    return b"Free Software Foundation" in asked.stdout
