"""`flex_attention` as the kernel that a compiled program runs, which has no matrix of scores.

Without a compiler, `flex_attention` computes the scores of all queries and keys, and PyTorch warns about it. A program
that compiles anything is assumed to compile `flex_attention` as well. Inductor's kernels write the results that
PyTorch's function for fakes returns, and save these and their inputs. The backward pass allocates gradients and one sum
for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.autograd.function import once_differentiable

__all__ = ["KERNEL_OF", "attending_by_kernel", "call_kernel", "is_flex_attention_compiled"]

KERNEL_OF = "flex_attention"

_callbacks: list[Callable[[], None]] = []  # callbacks of the open blocks, on all threads


@contextmanager
def attending_by_kernel(when_called: Callable[[], None]) -> Iterator[None]:
    """Count `flex_attention` as its kernel in the block, and call `when_called` each time."""
    _callbacks.append(when_called)
    try:
        yield
    finally:
        _callbacks.remove(when_called)


def is_flex_attention_compiled() -> bool:
    """Return true if a call counts as the kernel, after calling the innermost block's callback."""
    if _callbacks:
        _callbacks[-1]()
    return bool(_callbacks)


def call_kernel(op: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Any], captured: list[Tensor]) -> Any:
    """Return the results of the operator, differentiable by its kernel.

    Args:
        op: The higher-order operator.
        inputs: Query, key and value.
        others: Its other arguments.
        captured: Tensors in the closures of its functions. They may need gradients.
    """
    return _Kernel.apply(op, others, *inputs, *captured)  # type: ignore[no-untyped-call]


def _call(op: Callable[..., Any], *args: Any) -> Any:
    """Call dispatch modes, such as selective checkpointing, and then the rule for fakes."""
    with torch._C._AutoDispatchBelowAutograd():
        results = op(*args)
    if results is NotImplemented:
        raise NotImplementedError(
            "A dispatch mode does not support flex_attention (for example FlopCounterMode before PyTorch 2.15). Run "
            "the program without it."
        )
    return results


class _Kernel(torch.autograd.Function):
    """Mirrors `FlexAttentionAutogradOp` in `torch._higher_order_ops.flex_attention`, whose backward needs a graph."""

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
        products = torch.empty_like(log_sum)  # for each query, the sum of result times gradient
        # Called as an operator so that its FLOPs are counted. Its rule for fakes ignores the graph.
        graph = score_mod
        made = _call(
            flex_attention_backward, *inputs[:3], out, log_sum, grad, grad_of_log_sum, score_mod, graph, *others
        )
        del products
        captured = [torch.empty_like(tensor) for tensor in inputs[3:]]
        return None, None, *made[:3], *captured
