"""`flex_attention` as its kernel, which has no matrix of scores: in programs that compile it.

Called without a compiler, `flex_attention` computes the scores of all queries and keys, and PyTorch warns that it does.
A program that compiles is taken to have compiled it, too. Inductor's kernels write the results that PyTorch's function
for fakes tells, and save these and what they were given; the backward pass makes gradients and one sum for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.autograd.function import once_differentiable

__all__ = ["KERNEL_OF", "attending_by_kernel", "attends_by_kernel", "call_kernel"]

KERNEL_OF = "flex_attention"

_told: list[Callable[[], None]] = []  # by the blocks that are open, on all threads


@contextmanager
def attending_by_kernel(when_called: Callable[[], None]) -> Iterator[None]:
    """Counts `flex_attention` as its kernel in the block, and calls `when_called` each time."""
    _told.append(when_called)
    try:
        yield
    finally:
        _told.remove(when_called)


def attends_by_kernel() -> bool:
    """Whether a call is counted as its kernel. Tells whoever has asked for that."""
    if _told:
        _told[-1]()
    return bool(_told)


def call_kernel(op: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Any], captured: list[Tensor]) -> Any:
    """Returns what the operator returns, differentiable by its kernel.

    Args:
        op: The higher-order operator.
        inputs: Query, key and value.
        others: Its other arguments.
        captured: The tensors that its functions have closed over, which may need gradients.
    """
    return _Kernel.apply(op, others, *inputs, *captured)  # type: ignore[no-untyped-call]


def _call(op: Callable[..., Any], *args: Any) -> Any:
    """Calls modes, as selective checkpointing, and then the rule for fakes."""
    with torch._C._AutoDispatchBelowAutograd():
        results = op(*args)
    if results is NotImplemented:
        raise NotImplementedError(
            "A dispatch mode does not know flex_attention, such as FlopCounterMode before PyTorch 2.15. Run the "
            "program without it."
        )
    return results


class _Kernel(torch.autograd.Function):
    """As `FlexAttentionAutogradOp` of `torch._higher_order_ops.flex_attention`, whose backward pass wants a graph."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], others: Sequence[Any], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.others = others
        out, log_sum, *further = _call(op, *inputs[:3], *others)
        ctx.mark_non_differentiable(*further)
        ctx.save_for_backward(*inputs, out, log_sum)
        return out, log_sum, *further

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor | None, grad_of_log_sum: Tensor | None, *further: Any) -> Any:
        *inputs, out, log_sum = ctx.saved_tensors
        score_mod, *others = ctx.others
        products = torch.empty_like(log_sum)  # of the result and its gradient, summed for each query
        # An operator, so that its floating-point operations are counted. Its rule for fakes looks into no graph.
        graph = score_mod
        made = _call(
            flex_attention_backward, *inputs[:3], out, log_sum, grad, grad_of_log_sum, score_mod, graph, *others
        )
        del products
        captured = [torch.empty_like(tensor) for tensor in inputs[3:]]
        return None, None, *made[:3], *captured
