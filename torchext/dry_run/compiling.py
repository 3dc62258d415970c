"""Programs that compile: in a dry run what they compile runs as it is written.

Inductor makes kernels for the GPU, by Triton, and calls them with addresses; a fake GPU runs no kernels. What a
compiled program allocates is therefore not known here. `torch.compiler.set_stance("force_eager")` is PyTorch's own way
to ignore compilers, and the report says that they were ignored. Backends that call PyTorch's operators are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..tools.source_lines import users_frame
from .current import Job, current, while_world_is_open

__all__: list[str] = []

# Those that call operators of PyTorch, of `torch._dynamo.backends.debugging`.
BACKENDS_THAT_CALL_OPERATORS = ("eager", "aot_eager", "aot_eager_decomp_partition")


def _ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 it replaces that of torch
        job = current()
        backend = kwargs.get("backend") or "inductor"
        is_known = not isinstance(backend, str) or backend in BACKENDS_THAT_CALL_OPERATORS
        if job is not None and job.gpus is not None and not is_known and not kwargs.get("disable"):
            _ignore_compilers(job)
            frame = users_frame()
            job.remark(
                "torch.compile() was ignored: this is the memory of the program that is not compiled",
                "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}",
            )
        return original(*args, **kwargs)

    return compile


def _ignore_compilers(job: Job) -> None:
    if not job.ignores_compilers:
        job.ignores_compilers = True
        job.when_left.callback(torch.compiler.set_stance, "default")
        torch.compiler.set_stance("force_eager")


def _install() -> None:
    while_world_is_open.patch(torch, "compile", _ignored, "makes kernels for GPUs, which fake ones do not run")


while_world_is_open.declare(_install)
