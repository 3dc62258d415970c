"""Programs that call `torch.compile()`: in a dry run their functions run eagerly.

Inductor generates Triton kernels and calls them with addresses, but a fake GPU runs no kernels. So the memory of a
compiled program is unknown here. `torch.compiler.set_stance("force_eager")` makes PyTorch ignore compilers, and the
report contains a remark. Backends that call PyTorch operators are not ignored.

Programs that need memory of another order of magnitude without a compiler are counted as compiled: `flex_attention`,
and its block masks if a compiled function makes them. For these no kernel writes the mask of each query and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch

from .. import _C
from ..fake.cuda.graphs import graph_observers
from ..fake.higher_order import attending_by_kernel
from ..internals.patching import Function
from ..internals.source_lines import place_of, users_frame
from .current import Job, current, while_world_is_open

__all__ = ["IGNORED", "is_in_compiled_code", "remarking_on_graphs"]

# Backends of `torch._dynamo.backends.debugging` that call PyTorch operators.
BACKENDS_THAT_CALL_OPERATORS = ("eager", "aot_eager", "aot_eager_decomp_partition")

IGNORED = "torch.compile() was ignored: this is the memory of the program when it is not compiled"


@while_world_is_open.replaces(torch, "compile", reason="generates GPU kernels, which fake GPUs do not run")
def _compile(original: Function, /, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    job = current()
    backend = kwargs.get("backend") or "inductor"
    is_known = not isinstance(backend, str) or backend in BACKENDS_THAT_CALL_OPERATORS
    if job is not None and job.gpu is not None and not is_known and not kwargs.get("disable"):
        _ignore_compilers(job)
        note = _once(partial(job.remark, IGNORED, place_of(users_frame())))
        if isinstance(model, FunctionType | MethodType):
            model = _compiled(model, note)
        elif not isinstance(model, torch.nn.Module | None):
            note()  # calls of other callables cannot be observed
        return _marked(original(model, *args, **kwargs), note)
    return original(model, *args, **kwargs)


def _remark(job: Job, text: str) -> None:
    job.remark(text, place_of(users_frame()))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` once: libraries compile functions at import that a program may never call."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


@contextmanager
def remarking_on_graphs(job: Job) -> Iterator[None]:
    """Add a remark about CUDA graphs to the report."""
    text = (
        "A CUDA graph was captured by running its body once, in a separate memory pool. Replaying it computes nothing, "
        "and counts its passes, optimizer calls and collectives again"
    )
    note = partial(_remark, job, text)
    graph_observers.append(note)
    try:
        yield
    finally:
        graph_observers.remove(note)


def _ignore_compilers(job: Job) -> None:
    if not job.ignores_compilers:
        job.ignores_compilers = True
        job.when_left.callback(torch.compiler.set_stance, "default")
        torch.compiler.set_stance("force_eager")
        note = partial(_remark, job, "flex_attention() was counted as the kernel that a compiler generates")
        job.when_left.enter_context(attending_by_kernel(note))


is_in_compiled_code: ContextVar[bool] = ContextVar("is_in_compiled_code", default=False)


def _compiled(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        before = is_in_compiled_code.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            is_in_compiled_code.reset(before)

    return call


def _marked(compiled: Any, note: Callable[[], None]) -> Any:
    """Mark the forward pass of a compiled module, which is an attribute of the wrapper that PyTorch returns."""
    if isinstance(compiled, torch.nn.Module) and "forward" in vars(compiled):
        compiled.forward = _compiled(compiled.forward, note)
    return compiled


# ---- Masks of `flex_attention`


replaces = partial(
    while_world_is_open.replaces,
    "torch.nn.attention.flex_attention",
    reason="allocates masks that Inductor's kernels do not write",
)


@replaces("create_mask")
def _create_mask(
    original: Function,
    mod_fn: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    device: Any = None,
) -> Any:
    """Return the mask as a view of one element."""
    if not is_in_compiled_code.get() or not _C.are_factories_fake():
        return original(mod_fn, batch, heads, queries, keys, device)
    device = torch.accelerator.current_accelerator() or "cpu" if device is None else device
    return torch.empty((), dtype=torch.bool, device=device).expand(batch or 1, heads or 1, queries, keys)


@replaces("_convert_mask_to_block_mask")
def _convert_mask_to_block_mask(
    original: Function,
    mask: torch.Tensor,
    query_block: int = 128,
    key_block: int = 128,
    separate_full_blocks: bool = False,
) -> Any:
    """Return two masks, for partial and for full blocks."""
    if not is_in_compiled_code.get() or not _C.is_fake(mask) or mask.dim() != 4:
        return original(mask, query_block, key_block, separate_full_blocks)
    *batch, queries, keys = mask.shape
    blocks = (*batch, -(-queries // query_block), -(-keys // key_block))
    partial, full = (torch.empty(blocks, dtype=torch.int8, device=mask.device) for _ in range(2))
    return partial, full if separate_full_blocks else None
