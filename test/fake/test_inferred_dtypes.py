"""Dtypes that are inferred from Python numbers and the default dtype are those of eager execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from comparisons import metadata

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import fake_mode

DEFAULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
NUMBERS = (True, 2, 1.5, 1 + 1j)
Call = Callable[[], torch.Tensor]


def of_one_number(number: complex) -> Iterator[tuple[str, Call]]:
    """Return factories that infer the dtype of `number`."""
    yield "full", lambda: torch.full((2,), number)
    yield "new_full", lambda: torch.ones(3).new_full((2,), number)
    yield "scalar_tensor", lambda: torch.scalar_tensor(number)
    yield "tensor", lambda: torch.tensor([number, 1])
    yield "tensor0", lambda: torch.tensor(number)
    yield "as_tensor", lambda: torch.as_tensor([number])
    yield "asarray", lambda: torch.asarray([number])
    yield "asarray0", lambda: torch.asarray(number)
    yield "new_tensor", lambda: torch.ones(2).new_tensor([number])
    yield "arange", lambda: torch.arange(number)
    yield "arange2", lambda: torch.arange(1, 5 * number)
    yield "arange3", lambda: torch.arange(0, 3, number)
    yield "linspace", lambda: torch.linspace(number, 3, 3)
    yield "linspace of tensors", lambda: torch.linspace(torch.tensor(number), torch.tensor(3.0), 3)
    yield "linspace to tensor", lambda: torch.linspace(1, torch.tensor(number), 3)
    yield "logspace", lambda: torch.logspace(number, 3, 3)
    yield "logspace of tensors", lambda: torch.logspace(torch.tensor(number), 3, 3)
    yield "normal", lambda: torch.normal(number, 1.0, (2,))
    yield "where", lambda: torch.where(torch.ones(2, dtype=torch.bool), number, 1)
    yield "power of integers", lambda: number ** torch.ones(2, dtype=torch.int64)
    yield "mean", lambda: torch.full((2,), number).mean()
    yield "abs", lambda: torch.full((2,), number).abs()
    yield "fft", lambda: torch.fft.fft(torch.full((2,), number))


def of_a_tensor_and_a_number(dtype: torch.dtype, number: complex) -> Iterator[tuple[str, Call]]:
    yield "full", lambda: torch.full((2,), number, dtype=dtype)
    yield "full_like", lambda: torch.full_like(torch.ones(2, dtype=dtype), number)
    yield "add", lambda: torch.ones(2, dtype=dtype) + number
    yield "divide", lambda: torch.ones(2, dtype=dtype) / number
    yield "floor_divide", lambda: torch.ones(2, dtype=dtype) // number
    yield "remainder", lambda: torch.ones(2, dtype=dtype) % number
    yield "pow", lambda: torch.ones(2, dtype=dtype) ** number
    yield "ldexp", lambda: torch.ldexp(torch.ones(2, dtype=dtype), torch.tensor(number))
    yield "copysign", lambda: torch.copysign(torch.ones(2, dtype=dtype), number)
    yield "xlogy", lambda: torch.xlogy(torch.ones(2, dtype=dtype), number)
    yield "where", lambda: torch.where(torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=dtype), number)
    yield "clamp", lambda: torch.ones(2, dtype=dtype).clamp(number)
    yield "lerp", lambda: torch.lerp(torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype), number)


def of_the_default() -> Iterator[tuple[str, Call]]:
    """Return factories that use the default dtype."""
    for name in ("ones", "zeros", "rand", "randn", "eye", "Tensor"):
        yield name, lambda name=name: getattr(torch, name)(2)
    for window in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
        for length in (0, 1, 4):
            yield window, lambda window=window, length=length: getattr(torch, f"{window}_window")(length)
    for window in ("bartlett", "blackman", "cosine", "exponential", "gaussian", "hamming", "hann", "kaiser", "nuttall"):
        yield window, lambda window=window: getattr(torch.signal.windows, window)(4)
    yield "fftfreq", lambda: torch.fft.fftfreq(4)
    yield "rfftfreq", lambda: torch.fft.rfftfreq(4)
    yield "tril_indices", lambda: torch.tril_indices(3, 3)
    yield "randint", lambda: torch.randint(3, (2,))
    yield "randperm", lambda: torch.randperm(3)
    yield "normal of tensor", lambda: torch.normal(torch.ones(2, dtype=torch.float64), 1.0)
    yield "complex", lambda: torch.complex(torch.ones(2), torch.ones(2))
    yield "polar", lambda: torch.polar(torch.ones(2), torch.ones(2))
    yield "view_as_complex", lambda: torch.view_as_complex(torch.ones(2, 2))
    yield "FloatTensor", lambda: torch.FloatTensor([1, 2])
    yield "Tensor of list", lambda: torch.Tensor([1, 2])


@pytest.fixture(params=DEFAULTS, ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def check_metadata(calls: Iterator[tuple[str, Call]]) -> None:
    """Compare the calls that succeed eagerly; other tests cover errors."""
    wrong = {}
    for name, call in calls:
        try:
            eager = metadata(call())
        except (RuntimeError, TypeError, ValueError):
            continue
        with fake_mode():
            fake = metadata(call())
        tensor = deferred_init(call)
        deferred = metadata(tensor)
        real = metadata(materialize_tensor(tensor))
        if not eager == fake == deferred == real:
            wrong[name] = {"eager": eager, "fake": fake, "deferred": deferred, "materialized": real}
    assert not wrong


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_factories_infer_the_dtype_of_a_number(default: torch.dtype, number: complex) -> None:
    check_metadata(of_one_number(number))


@pytest.mark.cases(68)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_promote_a_tensor_and_a_number(default: torch.dtype, dtype: torch.dtype, number: complex) -> None:
    check_metadata(of_a_tensor_and_a_number(dtype, number))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_factories_make_the_default_dtype(default: torch.dtype) -> None:
    check_metadata(of_the_default())
