"""Functions that inductor has compiled, in constructors.

Their kernels read memory without calling an operator. So their arguments are materialized, and their results are real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..fake.patches.storages import make_real
from ..internals.dispatch_keys import is_constructing, without_our_keys
from ..internals.leases import while_fakes_live
from ..internals.patching import once

__all__ = ["install", "teach_inductor"]


def install() -> None:
    """Patch `torch.compile`, so that constructors can call functions that are compiled later."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: object, *args: Any, **kwargs: Any) -> Any:
            compiled = original(self, *args, **kwargs)
            teach_inductor()
            return compiled

        return __call__

    while_fakes_live.patch(
        torch._TorchCompileInductorWrapper, "__call__", make, "imports inductor, maybe for the first time"
    )


def teach_inductor() -> None:
    """Let constructors call compiled functions, if inductor has been imported."""
    if hasattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph"):
        _patch_graphs()


@once
def _patch_graphs() -> None:
    module: Any = sys.modules["torch._inductor.output_code"]
    while_fakes_live.patch(module.CompiledFxGraph, "__call__", _on_real_tensors, "runs kernels that read memory")


def _on_real_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: object, inputs: Any) -> Any:
        if not is_constructing():
            return original(self, inputs)
        make_real(inputs)
        with without_our_keys():
            return original(self, inputs)

    return __call__
