"""Compares a compiled function with its eager execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def state_of(value: Any) -> Any:
    """Return the properties of a result that must be equal besides its values."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.is_inference(), value.requires_grad, value.stride(), value.storage_offset()


def version_of(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def check_same(found: Any, wanted: Any, counts_writes: bool = True) -> None:
    """Compare states. Inductor writes some results into memory that it has allocated, which bumps the version."""
    found, wanted = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    assert list(map(state_of, found)) == list(map(state_of, wanted))
    if counts_writes:
        assert list(map(version_of, found)) == list(map(version_of, wanted))
    for one, other in zip(found, wanted, strict=True):
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
