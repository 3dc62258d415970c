"""Distances between all pairs of rows: DistanceKernel.cu and its callers."""

from __future__ import annotations

from .calls import KernelCall, copying, rule

__all__: list[str] = []


rule("_cdist_forward")(copying(before=[0, 1]))


@rule("_cdist_backward")
def _distances_backward(call: KernelCall) -> None:
    gradient, first, second = call.arguments[:3]
    call.contiguous(first, second)
    call.allocate_results(0)
    call.allocate(gradient.numel * first.sizes[-1] * first.element)  # of each pair and feature, before the sum


@rule("_pdist_backward")
def _own_distances_backward(call: KernelCall) -> None:
    call.allocate_results()
    source = call.tensor(1)
    if source.numel > 0:
        call.allocate((source.sizes[0] - 1) * call.result().nbytes)
