"""More calls for record_kernels.py: attention, normalization, losses, sorting, embeddings and convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from oracle.recording import Call, aten, make
from torch import Tensor

__all__ = ["fused_calls"]

MEAN = 1


def fused_calls() -> Iterator[Call]:
    """Yield all calls. Backward kernels take the results of the forward ones."""
    yield from attention()
    yield from grouped_attention()
    yield from norms()
    yield from softmaxes()
    yield from losses()
    yield from sorting()
    yield from embeddings()
    yield from convolutions()
    yield from images()


def grouped_attention() -> Iterator[Call]:
    """Yield attention in which several query heads share keys and values."""
    for dtype, layout, is_masked in itertools.product((torch.bfloat16, torch.float32), ("bhtd", "bthd"), (False, True)):
        q, k, v = (heads(layout, dtype, (3, count, 100, 64)) for count in (8, 2, 2))
        mask = make(100, 104, dtype=dtype)[:, :100].expand(3, 8, 100, 100) if is_masked else None
        forward = (q, k, v, mask, True, 0.0, False)
        yield aten._scaled_dot_product_efficient_attention.default, (*forward, None)
        out, sums, *state = aten._scaled_dot_product_efficient_attention(*forward)
        of_all = (mask, out, sums, *state, 0.0, [True, True, True, is_masked], False, None)
        yield aten._scaled_dot_product_efficient_attention_backward.default, (out, q, k, v, *of_all)
        if dtype == torch.bfloat16 and not is_masked:
            yield aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.0, True, False, None)
            out, sums, _, _, _, _, *state, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
            lengths = (None, None, 100, 100)
            of_flash = (out, sums, *lengths, 0.0, True, *state, None)
            yield aten._scaled_dot_product_flash_attention_backward.default, (out, q, k, v, *of_flash)


def heads(layout: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Tensor:
    """Return [batch, head, position, feature] with the strides of another order."""
    batch, head, position, feature = sizes
    if layout == "bhtd":
        return make(*sizes, dtype=dtype)
    if layout == "bthd":
        return make(batch, position, head, feature, dtype=dtype).transpose(1, 2)
    return make(position, batch, head, feature, dtype=dtype).permute(1, 2, 0, 3)


def attention() -> Iterator[Call]:
    """Yield both fused kernels with tensors of several layouts."""
    for sizes, layout, dropout in itertools.product(
        ((3, 4, 100, 64), (2, 8, 7, 96), (1, 2, 513, 128), (2, 2, 300, 256)), ("bhtd", "bthd", "tbhd"), (0.0, 0.1)
    ):
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = (heads(layout, dtype, sizes) for _ in range(3))
            forward = (q, k, v, None, True, dropout, False, None)
            yield aten._scaled_dot_product_efficient_attention.default, forward
            out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(*forward[:-1])
            for gradient in (heads("bthd", dtype, sizes), heads("bhtd", dtype, sizes)):
                wanted = [True, True, True, False]
                backward = (gradient, q, k, v, None, out, sums, seed, offset, dropout, wanted, False, None)
                yield aten._scaled_dot_product_efficient_attention_backward.default, backward
        q, k, v = (heads(layout, torch.bfloat16, sizes) for _ in range(3))
        yield aten._scaled_dot_product_flash_attention.default, (q, k, v, dropout, True, False, None)
        done = aten._scaled_dot_product_flash_attention(q, k, v, dropout, True, False)
        out, sums, _, _, _, _, seed, offset, _ = done
        for gradient in (heads("bthd", torch.bfloat16, sizes), heads("bhtd", torch.bfloat16, sizes)):
            of_all = (None, None, sizes[2], sizes[2], dropout, True, seed, offset, None)
            backward = (gradient, q, k, v, out, sums, *of_all)
            yield aten._scaled_dot_product_flash_attention_backward.default, backward


def norms() -> Iterator[Call]:
    """Yield layer and group normalization of layouts that are copied and others, and norms of lists."""
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = make(96, dtype=dtype), make(96, dtype=dtype)
        for x in (make(40, 50, 96, dtype=dtype), make(50, 40, 96, dtype=dtype).transpose(0, 1)):
            yield aten.native_layer_norm.default, (x, [96], weight, bias, 1e-5)
            _, mean, rstd = aten.native_layer_norm(x, [96], weight, bias, 1e-5)
            for gradient in (x.contiguous(), make(96, 40, 50, dtype=dtype).permute(1, 2, 0)):
                backward = (gradient, x, [96], mean, rstd, weight, bias, [True, True, True])
                yield aten.native_layer_norm_backward.default, backward
        last = make(4, 96, 20, 20, dtype=dtype).to(memory_format=torch.channels_last)
        for images in (
            make(4, 96, 20, 20, dtype=dtype),
            make(4, 96, 1, 1, dtype=dtype),
            make(4, 96, dtype=dtype),
            last,
        ):
            for affine in ((weight, bias), (None, None)):
                yield aten.native_group_norm.default, (images, *affine, 4, 96, images[0, 0].numel(), 8, 1e-5)
                _, mean, rstd = aten.native_group_norm(images, *affine, 4, 96, images[0, 0].numel(), 8, 1e-5)
                wanted = [True, affine[0] is not None, affine[0] is not None]
                of_sizes = (4, 96, images[0, 0].numel(), 8, wanted)
                yield aten.native_group_norm_backward.default, (images, images, mean, rstd, affine[0], *of_sizes)
        tensors = [make(n, dtype=dtype) for n in (7, 70000, 200001)]
        yield aten._foreach_norm.Scalar, (tensors, 2, None)
        yield aten.native_dropout.default, (make(1000, dtype=dtype), 0.5, True)


def softmaxes() -> Iterator[Call]:
    """Yield softmax and similar operators, over the last dimension and others."""
    for dtype, dim in itertools.product((torch.float32, torch.bfloat16), (-1, 0)):
        for x in (make(300, 1000, dtype=dtype), make(1000, 300, dtype=dtype).t()):
            yield aten._softmax.default, (x, dim, False)
            yield aten._log_softmax.default, (x, dim, False)
            yield aten._softmax_backward_data.default, (x, x, dim, dtype)
            yield aten._log_softmax_backward_data.default, (x, x, dim, dtype)
            yield aten._safe_softmax.default, (x, dim, None)
            yield aten.logsumexp.default, (x, [dim], False)


def losses() -> Iterator[Call]:
    """Yield losses with and without reduction."""
    for size, reduction in itertools.product((1000, 300000), (0, MEAN, 2)):
        x, y = make(size), make(size)
        yield aten.mse_loss.default, (x, y, reduction)
        yield aten.smooth_l1_loss.default, (x, y, reduction, 1.0)
        yield aten.huber_loss.default, (x, y, reduction, 1.0)
        yield aten.binary_cross_entropy.default, (x, y, None, reduction)


def sorting() -> Iterator[Call]:
    """Yield sorting, top-k, and scans."""
    for dtype, sizes in itertools.product(
        (torch.float32, torch.bfloat16), ((5000,), (4, 50257), (300, 64), (2000, 500))
    ):
        x = make(*sizes, dtype=dtype)
        yield aten.sort.default, (x, -1, False)
        yield aten.sort.stable, (x, True, -1, True)
        yield aten.topk.default, (x, 50, -1, True, True)
        yield aten.cumsum.default, (x, -1, None)
        yield aten.cumsum.default, (x, 0, None)
        yield aten.cumprod.default, (x, -1, None)


def embeddings() -> Iterator[Call]:
    """Yield embeddings, whose gradients are sums by index."""
    for count in (40, 4000):
        indices = make(count, dtype=torch.int64)
        for by_frequency in (False, True):
            arguments = (make(count, 64), indices, 1000, -1, by_frequency)
            yield aten.embedding_dense_backward.default, arguments
        offsets = torch.arange(0, count, 4, device="cuda")
        for mode in (0, 1, 2):
            yield aten._embedding_bag.default, (make(1000, 64), indices, offsets, False, mode, False, None, False, -1)


def convolutions() -> Iterator[Call]:
    """Yield convolutions by PyTorch's kernels."""
    for stride, groups, dtype in itertools.product((1, 2), (1, 16), (torch.float32, torch.bfloat16)):
        x, weight = make(3, 16, 20, 20, dtype=dtype), make(32, 16 // groups, 3, 3, dtype=dtype)
        bias = make(32, dtype=dtype)
        geometry = ([stride, stride], [1, 1], [1, 1], False, [0, 0], groups)
        yield aten.convolution.default, (x, weight, bias, *geometry)
        gradient = aten.convolution(x, weight, bias, *geometry)
        yield aten.convolution_backward.default, (gradient, x, weight, [32], *geometry, [True, True, True])
    yield aten.convolution.default, (make(2, 8, 100), make(16, 8, 5), None, [1], [2], [1], False, [0], 1)
    yield aten.convolution.default, (make(2, 8, 9, 9), make(8, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)


def images() -> Iterator[Call]:
    """Yield gradients of upsampled images."""
    for gradient in (make(2, 8, 20, 20), make(2, 8, 20, 20).to(memory_format=torch.channels_last)):
        sizes = ([20, 20], [2, 8, 10, 10])
        yield aten.upsample_nearest2d_backward.default, (gradient, *sizes, None, None)
        yield aten.upsample_bilinear2d_backward.default, (gradient, *sizes, False, None, None)
