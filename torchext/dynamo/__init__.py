"""Support for `torch.compile` and `torch.export`, which trace into our guards without a graph break.

Dynamo, which is imported when a program first compiles something, handles PyTorch's guards by name. Our guards are
added to its tables as soon as it has been imported.

Nothing in PyTorch is replaced: its tables, keyed by type and by object, get rows for our classes. Dynamo has no public
API for this (pytorch#198099 requests one). The internals that this code relies on are few, and equal in all releases
from 2.11 to 2.15. Where they are missing, in another build of PyTorch, our guards break graphs as they would without
this package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..errors import PatchError, TorchextWarning
from ..internals.imports import when_imported

__all__: list[str] = []


Wrap = Callable[[Any, Any], Any]


def _register() -> None:
    """Let Dynamo trace into the guards. Called after Dynamo has been imported."""
    try:
        from . import regions, results

        by_type = {**regions.BY_TYPE, **regions.BLOCKS_BY_TYPE}
        by_object = [*regions.BY_OBJECT, *regions.BLOCKS_BY_OBJECT, *results.BY_OBJECT]
        _enter(by_type, by_object)
        results.disallow_in_graph()
        regions.declare()
    except (ImportError, AttributeError, TypeError, PatchError) as error:
        warnings.warn(
            f"The guards of torchext break the graphs of torch.compile, because torch {torch.__version__} differs from "
            f"the releases that torchext supports ({type(error).__name__}: {error}).",
            TorchextWarning,
            stacklevel=2,
        )


def _enter(by_type: dict[type, Wrap], by_object: list[tuple[object, Wrap]]) -> None:
    from torch._dynamo.variables.builder import VariableBuilder

    builder: Any = VariableBuilder
    of_types = [builder._type_dispatch_impl(is_tracing_numpy) for is_tracing_numpy in (True, False)]
    of_objects = builder._id_dispatch()
    for table in of_types:
        table.update(by_type)
    of_objects.update({id(thing): wrap for thing, wrap in by_object})


when_imported("torch._dynamo", _register)
