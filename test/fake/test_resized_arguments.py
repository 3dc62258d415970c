"""Arguments that a call resizes get the eager shapes, and other arguments do not change shape."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import assert_same_tensor
from comparisons import ALL_PROPERTIES, Raised, metadata, outcome
from torch import Tensor
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, MovingAveragePerChannelMinMaxObserver

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode

# Composite operators and random fills resize their output below the dispatcher (`at::native::resize_output()`).
RESIZE_NATIVELY: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda out: torch.bernoulli(torch.full((2,), 0.5), out=out),
    "cauchy": lambda out: torch.ops.aten.cauchy.out(torch.ones(3), out=out),
    "inner": lambda out: torch.inner(torch.ones(2, 3), torch.ones(4, 3), out=out),
    "kron": lambda out: torch.kron(torch.ones(2, 3), torch.ones(3, 2), out=out),
    "matrix_norm": lambda out: torch.linalg.matrix_norm(torch.ones(4, 2, 3), out=out),
    "normal": lambda out: torch.normal(0.0, torch.ones(2, 3), out=out),
    "pinv": lambda out: torch.linalg.pinv(torch.eye(3), out=out),
    "quantile": lambda out: torch.quantile(torch.arange(6.0).view(2, 3), 0.5, dim=1, out=out),
    "rand_like": lambda out: torch.ops.aten.rand_like.out(torch.ones(3, 2), out=out),
    "tensordot": lambda out: torch.tensordot(torch.ones(2, 3), torch.ones(3, 2), dims=1, out=out),
    "vecdot": lambda out: torch.linalg.vecdot(torch.ones(4, 3), torch.ones(4, 3), out=out),
}


@pytest.mark.parametrize("name", RESIZE_NATIVELY)
def test_output_that_is_resized_natively_gets_memory(name: str) -> None:
    def fn() -> Tensor:
        torch.manual_seed(0)
        return RESIZE_NATIVELY[name](torch.empty(0))

    # Not strictly: `at::native::resize_output()` does not bump the version, but the operator that fakes need does.
    assert_same_tensor(materialize_tensor(deferred_init(fn)), fn(), strictly=False)


@pytest.mark.parametrize("name", RESIZE_NATIVELY)
def test_fake_output_that_is_resized_natively_gets_a_storage(name: str) -> None:
    wanted, fake = RESIZE_NATIVELY[name](torch.empty(0)), fake_like(torch.empty(0))
    RESIZE_NATIVELY[name](fake)
    assert (fake.shape, fake.untyped_storage().nbytes()) == (wanted.shape, wanted.untyped_storage().nbytes())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(0,), (2, 3)], ids=["empty", "of the same number of elements"])
@pytest.mark.parametrize("size", [3, 300], ids=["small", "too large to be tried out"])
def test_output_gets_the_order_of_strides_of_its_input(shape: tuple[int, ...], size: int) -> None:
    def fn() -> Tensor:
        input_ = torch.arange(float(2 * size * size)).view(2 * size, size)
        out = torch.empty(shape if shape == (0,) else (2 * size, size))
        return torch.mul(input_.t(), 2, out=out)

    wanted = fn()
    assert wanted.stride() == (1, size)
    for _ in range(2):  # the second result comes from the cache, which also holds trials
        assert_same_tensor(materialize_tensor(deferred_init(fn)), wanted)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("size", [6, 300, 6000])
def test_in_place_operator_does_not_grow_its_argument(size: int) -> None:
    fake = fake_like(torch.ones(size, 1, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=rf"\[{size}, 1\] doesn't match the broadcast shape \[{size}, {size}\]"):
        fake &= fake_like(torch.ones(size, dtype=torch.bool))
    assert fake.shape == (size, 1)


@pytest.mark.parametrize("size", [40, 400000])
def test_kernel_that_resizes_more_than_its_meta_kernel_is_followed(size: int) -> None:
    def fn() -> tuple[Tensor, ...]:
        observed = FusedMovingAvgObsFakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=-128,
            quant_max=127,
        )
        result = observed(torch.arange(float(size)).view(4, -1) / size)
        return observed.scale, observed.zero_point, observed.activation_post_process.min_val, result

    wanted = fn()
    found = deferred_init(fn)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    for tensor, expected in zip(found, wanted, strict=True):
        assert_same_tensor(materialize_tensor(tensor), expected, strictly=False)


# A trial shows that the argument is resized, but a trial with the sizes of the call would take too long.
def test_argument_whose_new_shape_is_unknown_is_refused() -> None:
    with fake_mode():
        observed = FusedMovingAvgObsFakeQuantize(observer=MovingAveragePerChannelMinMaxObserver, ch_axis=0)
        large = torch.empty(64, 1_000_000)
        with pytest.raises(NotImplementedError, match=r"resizes an argument of shape \[0\], but the call is too large"):
            observed(large)
        assert observed.scale.shape == (1,)


def test_output_of_a_kernel_without_a_meta_kernel_is_resized() -> None:
    matrix = torch.rand(4, 3)
    wanted = torch.geqrf(matrix, out=(torch.empty(0), torch.empty(0)))
    for _ in range(2):
        a, tau = fake_like(torch.empty(0)), fake_like(torch.empty(0))
        torch.geqrf(fake_like(matrix), out=(a, tau))
        for fake, real in zip((a, tau), wanted, strict=True):
            assert (fake.shape, fake.stride()) == (real.shape, real.stride())
            assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_output_whose_shape_depends_on_values_is_refused() -> None:
    with pytest.raises(DataDependentError, match=r"aten::bincount.out"):
        torch.ops.aten.bincount.out(
            fake_like(torch.ones(3, device="meta").long(), device="cpu"), out=fake_like(torch.empty(0).long())
        )


def test_storage_is_never_made_smaller_than_its_tensor() -> None:
    fake = fake_like(torch.ones(4))
    torch.ops.aten.exponential.out(fake_like(torch.ones(30)), out=fake.resize_(0))
    assert fake.untyped_storage().nbytes() == fake.numel() * fake.element_size()


def numbers(like: Tensor, *shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).to(like.dtype)


MATH_BITS: dict[str, Callable[[int], Tensor]] = {
    "negative": lambda size: torch._neg_view(torch.zeros(size)),
    "imaginary part of a conjugate": lambda size: torch.zeros(size, dtype=torch.complex64).conj().imag,
    "conjugate": lambda size: torch.zeros(size, dtype=torch.complex64).conj(),
    "negative conjugate": lambda size: torch._neg_view(torch.zeros(size, dtype=torch.complex64).conj()),
    "part of a conjugate": lambda size: torch.zeros(2 * size + 1, dtype=torch.complex64).conj()[1::2],
}

# Structured kernels, composites, factories, and operators that know the bits or several outputs.
WRITE: dict[str, Callable[[Tensor], object]] = {
    "add": lambda out: torch.add(numbers(out, 3, 2), 1, out=out),
    "add, from the output": lambda out: torch.add(out, numbers(out, 3, 1), out=out),
    "arange": lambda out: torch.arange(0, 9, 1, out=out),
    "cat": lambda out: torch.cat([numbers(out, 3), numbers(out, 4)], out=out),
    "clone": lambda out: torch.ops.aten.clone.out(numbers(out, 3, 4), out=out),
    "cumsum": lambda out: torch.cumsum(numbers(out, 3, 4), 0, out=out),
    "eye": lambda out: torch.eye(4, out=out),
    "full": lambda out: torch.full((3, 4), 2.0, out=out),
    "index_select": lambda out: torch.index_select(numbers(out, 9), 0, torch.tensor([1, 2, 3, 4]), out=out),
    "inv": lambda out: torch.linalg.inv(numbers(out, 1, 1).expand(3, 1, 1), out=out),
    "kron": lambda out: torch.kron(numbers(out, 3), numbers(out, 3), out=out),
    "linspace": lambda out: torch.linspace(0, 1, 7, out=out),
    "matmul": lambda out: torch.matmul(numbers(out, 3, 4), numbers(out, 4, 3), out=out),
    "max": lambda out: torch.max(numbers(out, 3, 4), 1, out=(out, torch.zeros(0, dtype=torch.int64))),
    "mm": lambda out: torch.mm(numbers(out, 3, 4), numbers(out, 4, 3), out=out),
    "mul, of a part": lambda out: torch.mul(out.new_ones(4).conj(), numbers(out, 4), out=out),
    "randn": lambda out: torch.randn(9, out=out),
    "resize_as_": lambda out: out.resize_as_(torch.zeros(5)).fill_(1),
    "stack": lambda out: torch.stack([numbers(out, 3), numbers(out, 3)], out=out),
    "sum": lambda out: torch.sum(numbers(out, 3, 4), 0, out=out),
    "take": lambda out: torch.take(numbers(out, 9), torch.tensor([[1, 2, 3]]), out=out),
    "tensordot": lambda out: torch.tensordot(numbers(out, 3, 4), numbers(out, 4, 3), 1, out=out),
    "where": lambda out: torch.where(torch.tensor([True, False, True]), numbers(out, 3), numbers(out, 3), out=out),
    "zeros": lambda out: torch.zeros((3, 4), out=out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor")  # PyTorch leaks tensors if it raises
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("size", [0, 2, 30], ids=["empty", "grows", "shrinks"])
@pytest.mark.parametrize("kind", MATH_BITS)
def test_output_with_a_math_bit_is_resized(kind: str, size: int, mode: Callable[[], Any]) -> None:
    for name, write in WRITE.items():

        def fn(write: Callable[[Tensor], object] = write) -> Tensor:
            torch.manual_seed(0)
            out = MATH_BITS[kind](size)
            write(out)
            return out

        with mode():
            wanted = outcome(fn)
            with fake_mode():
                found = outcome(fn)
            deferred = outcome(lambda fn=fn: deferred_init(fn))
            if isinstance(wanted, Raised):
                assert (found, deferred) == (wanted, wanted), name
                continue
            assert metadata(found, ALL_PROPERTIES) == metadata(wanted, ALL_PROPERTIES), name
            assert metadata(deferred, ALL_PROPERTIES) == metadata(wanted, ALL_PROPERTIES), name
            assert_same_tensor(materialize_tensor(deferred), wanted, name, strictly=False)


def test_operators_are_prepared_for_the_first_copied_tensor_with_a_math_bit() -> None:
    """They are prepared once per process, so a new process is needed."""
    program = """
import torch
from torchext.fake import fake_like
out = fake_like(torch.zeros(2, 2, dtype=torch.complex64).conj().imag)
print(tuple(torch.mm(fake_like(torch.ones(3, 3)), fake_like(torch.ones(3, 3)), out=out).shape), out.is_neg())
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "(3, 3) True\n", ended.stderr
