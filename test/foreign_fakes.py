"""Another owner of the `Fake` key, like PyTorch's future C++ FakeTensor: NOTE [Two owners of the Fake key].

cpp/foreign_fakes.cpp implements it. With `--foreign-fakes`, the whole suite runs with it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

__all__ = ["compile_and_load", "foreign_fake", "foreign_mode", "is_foreign"]

SOURCE = Path(__file__).parent / "cpp" / "foreign_fakes.cpp"

_torch: Any = torch._C
_FAKE_KEYS = _torch.DispatchKeySet(_torch._dispatch_key_parse("Fake"))


def compile_and_load(folder: Path) -> None:
    """Register the other owner through a library that is compiled into `folder`."""
    output = folder / "foreign_fakes.so"
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        *(f"-isystem{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]),
        *(str(SOURCE), f"-o{output}", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch", "-ltorch_cpu"),
    ]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    torch.ops.load_library(str(output))


def foreign_fake(*shape: int) -> torch.Tensor:
    """Return a tensor of the other owner."""
    with _torch._ExcludeDispatchKeyGuard(_FAKE_KEYS):
        tensor: torch.Tensor = torch.ops.torchext_foreign.give_key(torch.empty(shape, device="meta"))
        return tensor


@contextmanager
def foreign_mode() -> Iterator[None]:
    """Make factories on this thread return tensors of the other owner."""
    with _torch._IncludeDispatchKeyGuard(_torch._parse_dispatch_key("Fake")):
        yield


def is_foreign(tensor: torch.Tensor) -> bool:
    """Return true if `tensor` belongs to the other owner."""
    return tensor.is_meta and bool(_torch._dispatch_keys(tensor).has(_torch._dispatch_key_parse("Fake")))
