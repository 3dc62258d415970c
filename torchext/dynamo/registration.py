"""Enters the guards in Dynamo's tables.

Nothing of PyTorch's is replaced: its tables, by type and by object, get rows for what is ours. Dynamo has no public way
for this (pytorch#198099 asks for one), so what is relied on is small, and the same in all releases from 2.11 to 2.15.
Where it is missing, in another build of PyTorch, guards break graphs as they would without this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

Wrap = Callable[[Any, Any], Any]


def register() -> None:
    """Lets Dynamo trace into the guards. Called once Dynamo has been imported."""
    try:
        from . import amp_tensors, blocks, refusals, regions

        by_type = {**regions.BY_TYPE, **blocks.BY_TYPE}
        by_object = [*regions.BY_OBJECT, *blocks.BY_OBJECT, *refusals.BY_OBJECT]
        _enter(by_type, by_object)
        refusals.keep_from_dynamo()
        amp_tensors.declare()
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(
            f"The guards of torchext break the graphs of torch.compile: torch {torch.__version__} is not as torchext "
            f"expects it ({type(error).__name__}: {error}).",
            RuntimeWarning,
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
