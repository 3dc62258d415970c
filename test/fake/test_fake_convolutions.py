"""Convolutions of fakes: the library that would compute the results determines whether they are channels last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from common import kept_threads
from comparisons import channels_last, reversed_strides, with_gaps
from torch import Tensor, nn
from torch.nn import functional

from torchext.fake import fake_mode, is_fake

Layout = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda t: t,
    "channels last": channels_last,
    "reversed strides": reversed_strides,
}
CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    "conv1d": functional.conv1d,
    "conv2d": functional.conv2d,
    "conv3d": functional.conv3d,
    "conv_transpose1d": functional.conv_transpose1d,
    "conv_transpose2d": functional.conv_transpose2d,
    "conv_transpose3d": functional.conv_transpose3d,
}


class Case(NamedTuple):
    """The inputs of the choice of a library."""

    channels: int
    groups: int
    size: int  # of the kernel
    batch: int
    dtype: torch.dtype = torch.float32
    dilation: int = 1
    padding: int = 0


CASES = (
    Case(3, groups=1, size=3, batch=1),  # too small for oneDNN
    Case(3, groups=1, size=3, batch=2),
    Case(3, groups=1, size=2, batch=1, dilation=2),
    Case(4, groups=4, size=3, batch=1),
    Case(4, groups=2, size=1, batch=2),
    Case(1, groups=1, size=1, batch=2),
    Case(3, groups=1, size=3, batch=2, dtype=torch.float64),
    Case(3, groups=1, size=2, batch=1, dtype=torch.float64, dilation=2),
    Case(4, groups=2, size=2, batch=2, dtype=torch.bfloat16),
    Case(4, groups=2, size=2, batch=0),
    Case(4, groups=1, size=1, batch=1, dtype=torch.float64, padding=2),  # transposed results are smaller than the input
)


# Weights with one pixel, whose strides do not determine a format. None of them is computed by oneDNN.
WEIGHTS_OF_ONE_PIXEL = (
    Case(3, groups=1, size=1, batch=1),
    Case(4, groups=4, size=1, batch=1),
    Case(6, groups=2, size=1, batch=2, dtype=torch.float64),
    Case(3, groups=3, size=1, batch=1, dtype=torch.float64),
    Case(2, groups=2, size=1, batch=1, dtype=torch.float64, dilation=2),
    Case(3, groups=1, size=1, batch=1, dilation=2),
    Case(8, groups=4, size=1, batch=2, dtype=torch.float64, dilation=2),
)


def memory_of(name: str, case: Case, layouts: tuple[Layout, Layout]) -> list[tuple[tuple[int, ...], int]]:
    """Return the strides and the bytes of the result and of the gradients of input and weight."""
    dims = int(name[-2])
    shape = (case.channels, case.channels // case.groups, *[case.size] * dims)
    x = layouts[0](torch.rand(case.batch, case.channels, *[7] * dims, dtype=case.dtype))
    weight = layouts[1](torch.rand(shape, dtype=case.dtype))
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = CONVOLUTIONS[name](x, weight, groups=case.groups, dilation=case.dilation, padding=case.padding)
    tensors = (y, *torch.autograd.grad(y.sum(), (x, weight)))
    return [(tensor.stride(), tensor.untyped_storage().nbytes()) for tensor in tensors]


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", WEIGHTS_OF_ONE_PIXEL, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["convolution", "transposed"])
def test_gradients_of_weights_of_one_pixel_have_all_strides(case: Case, is_transposed: bool) -> None:
    def strides(layout: Layout, size: int) -> list[tuple[int, ...]]:
        x = layout(torch.rand(case.batch, case.channels, size, size, dtype=case.dtype))
        weight = torch.rand(case.channels, case.channels // case.groups, case.size, case.size, dtype=case.dtype)
        options = ([2, 2], [0, 0], [case.dilation] * 2, is_transposed, [0, 0], case.groups)
        y = torch.ops.aten.convolution(x, weight, None, *options)
        gradients = torch.ops.aten.convolution_backward(y, x, weight, None, *options, [True, True, False])
        return [t.stride() for t in (y, *gradients[:2])]

    for layout, size in itertools.product(LAYOUTS.values(), (1, 2, 5)):
        wanted = strides(layout, size)
        with fake_mode():
            assert strides(layout, size) == wanted, (layout, size)


@pytest.mark.cases(4)
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, LAYOUTS)], ids=" and ".join)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_results_are_laid_out_as_the_library_of_the_cpu_does(name: str, layouts: tuple[str, str]) -> None:
    of_both = (LAYOUTS[layouts[0]], LAYOUTS[layouts[1]])
    for case in CASES:
        wanted = memory_of(name, case, of_both)
        with fake_mode():
            assert memory_of(name, case, of_both) == wanted, case


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_result_is_on_the_memory_that_its_kernel_allocates(groups: int) -> None:
    """Without groups, the result was like the input before it was resized. It is too large for a trial."""

    def run() -> Tensor:
        x, weight = (torch.rand(shape, dtype=torch.float64) for shape in ((2, 6, 20, 20, 20), (6, 2, 1, 1, 1)))
        return functional.conv_transpose3d(x, weight, padding=4, groups=groups)

    wanted = run()
    with fake_mode():
        found = run()
    assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


def volumes(batch: int, dtype: torch.dtype) -> Tensor:
    x = torch.empty(batch, 64, 16, 16, 16, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)
    return functional.conv3d(x, torch.empty(8, 64, 3, 3, 3, dtype=dtype))


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layouts_do_not_depend_on_the_size(dtype: torch.dtype, has_onednn: bool) -> None:
    with torch.backends.mkldnn.flags(enabled=has_onednn):
        wanted = volumes(2, dtype)
        with fake_mode():
            assert volumes(2**22, dtype).stride() == wanted.stride()


def test_view_of_something_large_needs_no_memory() -> None:
    with fake_mode():
        x = torch.empty(10**6, 3, 10_000, 10_000)[:, :, :256, :256]
        assert functional.conv2d(x, torch.empty(8, 3, 3, 3)).shape == (10**6, 8, 254, 254)


def test_number_of_threads_decides() -> None:
    def run() -> tuple[int, ...]:
        x = channels_last(torch.rand(2, 4, 5, 6, 7))
        return functional.conv3d(x, torch.rand(4, 4, 1, 1, 1)).stride()

    with kept_threads():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            wanted = run()
            with fake_mode():
                assert run() == wanted


def on_cuda() -> Iterator[tuple[str, torch.dtype, bool]]:
    """Yield convolutions, dtypes, and whether cuDNN's results are channels last."""
    yield "conv2d", torch.float32, True
    yield "conv2d", torch.bfloat16, True
    yield "conv2d", torch.float64, False
    yield "conv3d", torch.float16, True
    yield "conv_transpose2d", torch.float16, True
    yield "conv1d", torch.float32, False


def format_of(name: str) -> torch.memory_format:
    return torch.channels_last_3d if name.endswith("3d") else torch.channels_last


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize(("name", "dtype", "is_channels_last"), [*on_cuda()])
def test_results_are_laid_out_as_cudnn_does(name: str, dtype: torch.dtype, is_channels_last: bool) -> None:
    dims = int(name[-2])
    with fake_mode(gpu=1):
        x = channels_last(torch.rand(2, 4, *[7] * dims, dtype=dtype, device="cuda"))
        y = CONVOLUTIONS[name](x, torch.rand(4, 4, *[3] * dims, dtype=dtype, device="cuda"))
    assert y.is_contiguous() != is_channels_last
    assert not is_channels_last or y.is_contiguous(memory_format=format_of(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
def test_results_without_cudnn_are_contiguous() -> None:
    with fake_mode(gpu=1), torch.backends.cudnn.flags(enabled=False):
        x = channels_last(torch.rand(2, 4, 7, 9, device="cuda"))
        assert nn.Conv2d(4, 5, 3, device="cuda")(x).is_contiguous()


def test_model_stays_channels_last() -> None:
    def run() -> Tensor:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1), nn.GELU()
        )
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        result = model(torch.rand(2, 3, 32, 32).contiguous(memory_format=torch.channels_last))
        assert isinstance(result, Tensor)
        return result

    wanted = run()
    with fake_mode():
        found = run()
    assert is_fake(found)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", [(7, 2), (3, 2, 5), (2, 3, 4, 5), (2, 3, 4, 5, 2), (1, 3, 1, 1)])
def test_gradient_of_batch_normalization_on_the_cpu_has_the_format_of_its_input(
    shape: tuple[int, ...], train: bool
) -> None:
    layouts: list[Layout] = [lambda t: t, reversed_strides, with_gaps, *([channels_last] if len(shape) == 4 else [])]
    for of_input, of_gradient in itertools.product(layouts, layouts):

        def strides(of_input: Layout = of_input, of_gradient: Layout = of_gradient) -> list[tuple[int, ...]]:
            x, grad = of_input(torch.rand(shape)), of_gradient(torch.rand(shape))
            ones = torch.ones(shape[1])
            _, mean, invstd = torch.native_batch_norm(x, ones, None, ones, ones, train, 0.1, 1e-5)
            gradients = torch.ops.aten.native_batch_norm_backward(
                grad, x, ones, ones, ones, mean, invstd, train, 1e-5, [True, True, True]
            )
            return [gradient.stride() for gradient in gradients]

        with fake_mode():
            found = strides()
        assert found == strides()
