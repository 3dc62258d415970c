"""Compares a compiled function with its eager execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparisons import PROPERTIES, metadata
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

BACKENDS = ("eager", "aot_eager")


def compiled(function: Callable[..., Any], backend: str = "eager", fullgraph: bool = True) -> Callable[..., Any]:
    """Compile without earlier caches, and count graph breaks from here on."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend=backend, fullgraph=fullgraph)


def graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def check_same(found: Any, wanted: Any, counts_writes: bool = True) -> None:
    """Compare results. Inductor writes some into memory that it has allocated, which bumps the version."""
    compared = PROPERTIES | {"is_inference", "storage_offset"} | ({"version"} if counts_writes else set())
    assert metadata(found, compared) == metadata(wanted, compared)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def check_compiled(function: Callable[..., Any], *args: Any, backend: str = "eager") -> None:
    """Check for one graph, no break, and eager results; then again with the existing graph."""
    wanted = function(*args)
    run = compiled(function, backend)
    check_same(run(*args), wanted)
    check_same(run(*args), wanted)
    assert graph_breaks() == 0
    assert graphs() == 1
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
