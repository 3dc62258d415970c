"""Losses: a number for each element, and a reduction of these."""

from __future__ import annotations

from collections.abc import Sequence

from .calls import KernelCall, rule
from .geometry import Geometry, broadcast, contiguous
from .reduction_buffers import accumulator_bytes, reduce_on_gpu

__all__: list[str] = []

NO_REDUCTION = 0


def _losses_of(call: KernelCall) -> Geometry:
    return contiguous(broadcast(call.tensor(0).sizes, call.tensor(1).sizes), call.result().dtype)


def _reduce_losses(call: KernelCall, sizes: Sequence[int]) -> None:
    """Reduce a contiguous tensor of these sizes to the result."""
    result = call.result()
    reduce_on_gpu(call, contiguous(sizes, result.dtype), [result], accumulator=accumulator_bytes(result.dtype))


@rule("mse_loss", "smooth_l1_loss")
def _elementwise_loss(call: KernelCall) -> None:
    call.allocate_results()
    if call.arguments[2] != NO_REDUCTION:
        losses = _losses_of(call)
        call.copy(losses)
        _reduce_losses(call, losses.sizes)


@rule("huber_loss")
def _huber_loss(call: KernelCall) -> None:
    # A separate function reduces the output of the kernel.
    if call.arguments[2] != NO_REDUCTION:
        losses = _losses_of(call)
        call.copy(losses)
        call.allocate_results()
        _reduce_losses(call, losses.sizes)


@rule("soft_margin_loss", "binary_cross_entropy")
def _loss_in_result(call: KernelCall) -> None:
    # `binary_cross_entropy_cuda()`: the result first holds the losses, and is shrunk after their reduction.
    call.allocate_results()
    if call.arguments[-1] != NO_REDUCTION:
        call.copy(call.result())
        _reduce_losses(call, call.tensor(0).sizes)


@rule("multi_margin_loss")
def _multi_margin_loss(call: KernelCall) -> None:
    # `multi_margin_loss_cuda_out()`: one loss per sample.
    call.allocate_results()
    source = call.tensor(0)
    if source.dim == 2 and call.arguments[5] != NO_REDUCTION:
        call.allocate(source.sizes[0] * source.element)
        _reduce_losses(call, source.sizes[:1])
