"""Pooling, padding and patches of images; losses; distances of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffers import accumulator_bytes, reduce_on_gpu
from .calls import KernelCall, copying, rule
from .geometry import Geometry, broadcast, contiguous

__all__: list[str] = []


def _copy_into_own_format(call: KernelCall, tensor: Geometry) -> None:
    """Follow `contiguous(suggest_memory_format())`, for kernels that also read channels last."""
    call.copy_unless(tensor.is_contiguous(tensor.memory_format()), tensor)


@rule(
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d"),
    *("upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest2d_backward", "_upsample_nearest_exact2d_backward", "upsample_bilinear2d_backward"),
)
def _results_and_own_format(call: KernelCall) -> None:
    call.allocate_results()
    _copy_into_own_format(call, call.tensor(0))


rule(
    *("avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool3d", "adaptive_max_pool3d_backward"),
    *("reflection_pad1d", "reflection_pad1d_backward", "reflection_pad2d", "reflection_pad2d_backward"),
    *("reflection_pad3d", "col2im"),
)(copying(after=[0]))
rule("_adaptive_avg_pool3d")(copying(before=[0]))


@rule("_adaptive_avg_pool2d")
def _own_format_and_results(call: KernelCall) -> None:
    _copy_into_own_format(call, call.tensor(0))
    call.allocate_results()


@rule("max_pool3d_with_indices_backward")
def _pool_backward(call: KernelCall) -> None:
    # Reads the gradient in the format of the image.
    call.allocate_results()
    gradient, image = call.tensor(0), call.tensor(1)
    call.copy_unless(gradient.is_contiguous(image.memory_format()), gradient)


@rule("max_pool2d_with_indices_backward", "avg_pool2d_backward")
def _pool_backward_in_two_dimensions(call: KernelCall) -> None:
    call.allocate_results()
    _copy_into_own_format(call, call.tensor(1))
    _pool_backward(call)


@rule("_adaptive_avg_pool2d_backward")
def _adaptive_average_pool_backward(call: KernelCall) -> None:
    # AdaptiveAveragePooling.cu: with channels last, the gradient is read without a copy.
    call.allocate_results()
    if call.tensor(1).memory_format() is not torch.channels_last:
        call.contiguous(call.tensor(0))


@rule("adaptive_max_pool2d")
def _adaptive_max_pool(call: KernelCall) -> None:
    # AdaptiveMaxPooling2d.cu: results that are not contiguous are computed in a copy.
    call.allocate_results()
    call.contiguous(call.result(), call.result(1), call.tensor(0))


@rule("adaptive_max_pool2d_backward")
def _adaptive_max_pool_backward(call: KernelCall) -> None:
    call.allocate_results()
    call.contiguous(call.tensor(0), call.tensor(2), call.result())


@rule("im2col")
def _image_to_columns(call: KernelCall) -> None:
    # `im2col_out_cuda_template()`: the result starts with the size of the image and is then resized.
    image = call.tensor(0)
    first = call.copy_unless(call.result().nbytes <= image.nbytes, image)
    call.contiguous(image)
    call.allocate_results(0)
    call.free(first)


@rule("unfold_backward")
def _unfold_backward(call: KernelCall) -> None:
    call.allocate_results()
    _, sizes, dim, size, step = call.arguments
    if step < size and sizes:  # as `unfold_backward_cuda_kernel()`: overlapping windows need an index of each position
        call.allocate(sizes[dim] * 8)


# ---- Losses: a number for each element, and a reduction of these


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


# ---- Distances between all pairs of rows: DistanceKernel.cu and its callers


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
