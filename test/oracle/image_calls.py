"""More calls for record_kernels.py: pooling, padding, patches and batch normalization, of several layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from oracle.recording import Call, aten, make
from torch import Tensor

__all__ = ["image_calls"]

FLOATS = (torch.float32, torch.bfloat16)


def image_calls() -> Iterator[Call]:
    """Yield all calls."""
    for dtype in FLOATS:
        for x in layouts_of(make(4, 16, 24, 20, dtype=dtype)):
            yield from planar_pools(x)
            yield from paddings(x, [1, 2, 3, 4], "2d")
        for x in layouts_of(make(2, 8, 12, 8, 10, dtype=dtype)):
            yield from spatial_pools(x)
            yield from paddings(x, [1, 2, 1, 2, 1, 2], "3d")
        for x in (make(4, 16, 200, dtype=dtype), make(4, 200, 16, dtype=dtype).transpose(1, 2)):
            yield from paddings(x, [1, 2], "1d")
        for x in layouts_of(make(4, 8, 12, 10, dtype=dtype)):
            yield from patches(x)
    yield from batch_norms()


def layouts_of(x: Tensor) -> Iterator[Tensor]:
    """Yield `x` unmodified, with the channels last, and with two dimensions exchanged."""
    yield x
    yield x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)


def planar_pools(x: Tensor) -> Iterator[Call]:
    """Pooling over two dimensions."""
    geometry = ([2, 2], [2, 2], [0, 0])
    yield aten.max_pool2d_with_indices.default, (x, *geometry, [1, 1], False)
    y, where = aten.max_pool2d_with_indices(x, *geometry)
    for gradient in layouts_of(y.contiguous()):
        yield aten.max_pool2d_with_indices_backward.default, (gradient, x, *geometry, [1, 1], False, where)
        yield aten.avg_pool2d_backward.default, (gradient, x, *geometry, False, True, None)
    yield aten.avg_pool2d.default, (x, *geometry, False, True, None)
    yield aten.adaptive_max_pool2d.default, (x, [5, 5])
    y, where = aten.adaptive_max_pool2d(x, [5, 5])
    yield aten._adaptive_avg_pool2d.default, (x, [5, 5])
    for gradient in layouts_of(y.contiguous()):
        yield aten.adaptive_max_pool2d_backward.default, (gradient, x, where)
        yield aten._adaptive_avg_pool2d_backward.default, (gradient, x)


def spatial_pools(x: Tensor) -> Iterator[Call]:
    """Pooling over three dimensions."""
    geometry = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    yield aten.max_pool3d_with_indices.default, (x, *geometry, [1, 1, 1], False)
    y, where = aten.max_pool3d_with_indices(x, *geometry)
    for gradient in layouts_of(y.contiguous()):
        yield aten.max_pool3d_with_indices_backward.default, (gradient, x, *geometry, [1, 1, 1], False, where)
        yield aten.avg_pool3d_backward.default, (gradient, x, *geometry, False, True, None)
    yield aten.avg_pool3d.default, (x, *geometry, False, True, None)
    yield aten.adaptive_max_pool3d.default, (x, [3, 3, 3])
    y, where = aten.adaptive_max_pool3d(x, [3, 3, 3])
    yield aten._adaptive_avg_pool3d.default, (x, [3, 3, 3])
    for gradient in layouts_of(y.contiguous()):
        yield aten.adaptive_max_pool3d_backward.default, (gradient, x, where)
        yield aten._adaptive_avg_pool3d_backward.default, (gradient, x)


def paddings(x: Tensor, sizes: list[int], dims: str) -> Iterator[Call]:
    """Padding with values of the tensor."""
    for name in ("reflection_pad", "replication_pad"):
        yield getattr(aten, name + dims).default, (x, sizes)
        y = getattr(aten, name + dims)(x, sizes)
        others = (
            layouts_of(y.contiguous()) if x.dim() > 3 else iter([y, y.transpose(1, 2).contiguous().transpose(1, 2)])
        )
        for gradient in others:
            yield getattr(aten, name + dims + "_backward").default, (gradient, x, sizes)


def patches(x: Tensor) -> Iterator[Call]:
    """Patches of images, the inverse, and resized images."""
    geometry = ([3, 3], [1, 1], [1, 1], [1, 1])
    yield aten.im2col.default, (x, *geometry)
    columns = aten.im2col(x, *geometry)
    yield aten.col2im.default, (columns, [12, 10], *geometry)
    yield aten.col2im.default, (columns.transpose(1, 2).contiguous().transpose(1, 2), [12, 10], *geometry)
    yield aten.upsample_nearest2d.default, (x, [24, 20], None, None)
    yield aten.upsample_bilinear2d.default, (x, [24, 20], False, None, None)
    yield aten.upsample_bicubic2d.default, (x, [24, 20], False, None, None)


def batch_norms() -> Iterator[Call]:
    """Batch normalization. With channels last, blocks accumulate in a buffer."""
    for dtype, weight_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        inputs = [make(300, 64, dtype=dtype), make(2048, 512, dtype=dtype), make(16, 64, 300, dtype=dtype)]
        inputs += list(layouts_of(make(8, 64, 20, 20, dtype=dtype))) + list(
            layouts_of(make(2, 24, 9, 30, 40, dtype=dtype))
        )
        for x in inputs:
            weight, bias, mean, variance = (make(x.shape[1], dtype=weight_dtype) for _ in range(4))
            is_plain = x.is_contiguous()
            for affine in ((weight, bias), (None, None))[: 2 if is_plain else 1]:
                yield aten.native_batch_norm.default, (x, *affine, mean, variance, True, 0.1, 1e-5)
                y, *saved = aten.native_batch_norm(x, *affine, mean, variance, True, 0.1, 1e-5)
                for gradient, trains in itertools.product(
                    (y, y.contiguous(), y.transpose(0, 1).contiguous().transpose(0, 1)), (True, False)
                ):
                    mask = [True, affine[0] is not None, affine[0] is not None]
                    of_all = (affine[0], mean, variance, *saved, trains, 1e-5, mask)
                    yield aten.native_batch_norm_backward.default, (gradient, x, *of_all)
