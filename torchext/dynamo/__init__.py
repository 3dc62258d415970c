"""What Dynamo has to know of the guards: `torch.compile` and `torch.export` trace into them, without a graph break.

Dynamo, which is imported when a program first compiles something, knows PyTorch's guards by name. So ours are entered
in its tables as soon as it has been imported: see `registration`.
"""

from __future__ import annotations

from ..tools.imports import when_imported

__all__: list[str] = []


def _register() -> None:
    from .registration import register

    register()


when_imported("torch._dynamo", _register)
