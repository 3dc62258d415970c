"""Support for `torch.compile` and `torch.export`, which trace into our guards without a graph break.

Dynamo, which is imported when a program first compiles something, handles PyTorch's guards by name. Our guards are
added to its tables as soon as it has been imported: see `registration`.
"""

from __future__ import annotations

from ..internals.imports import when_imported

__all__: list[str] = []


def _register() -> None:
    from .registration import register

    register()


when_imported("torch._dynamo", _register)
