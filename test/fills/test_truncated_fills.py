"""Truncated normal fills have the bits of a loop that redraws all values until all are within the bounds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import bindings
import hypothesis.strategies as st
import pytest
import torch
from common import has_same_bits, kept_threads
from hypothesis import given
from torch import Generator, Tensor, nn

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import python_functions
from torchext.internals.patching import TORCH_RELEASE

# Before 2.13 PyTorch draws other values of half precision, which torchext leaves to its kernel.
DTYPES = [torch.float32] if TORCH_RELEASE < (2, 13) else [torch.float32, torch.bfloat16, torch.float16]

needs_own_kernel = pytest.mark.skipif(
    not bindings.is_fill_exact(True, torch.float32), reason="torchext has no kernel for this processor and this PyTorch"
)
rejects_by_rounds = pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="trunc_normal_ computes each value of one draw before PyTorch 2.12"
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Restore the number of threads."""
    with kept_threads():
        yield


def seeded(seed: int, draws: int = 0) -> Generator:
    generator = Generator().manual_seed(seed)
    torch.empty(draws).uniform_(generator=generator)
    return generator


def fill_in_rounds(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Generator) -> None:
    """Compute the result of the redrawing rounds."""
    low, high = tensor.new_tensor([a, b])
    tensor.normal_(mean, std, generator=generator)
    while (pending := (tensor < low) | (tensor > high)).any():
        again = torch.empty_like(tensor).normal_(mean, std, generator=generator)
        torch.where(pending, again, tensor, out=tensor)


def assert_is_all_rounds(
    numel: int, dtype: torch.dtype, mean: float, std: float, a: float, b: float, seed: int, drawn: int = 0
) -> None:
    theirs, their_generator = torch.empty(numel, dtype=dtype), seeded(seed, drawn)
    fill_in_rounds(theirs, mean, std, a, b, their_generator)
    own, generator = torch.full((numel,), 77, dtype=dtype), seeded(seed, drawn)
    draws = bindings.fill_truncated(own, mean, std, a, b, generator)
    assert draws is not None
    assert has_same_bits(own, theirs)
    assert torch.equal(generator.get_state(), their_generator.get_state())
    untouched, counting = torch.full((numel,), 77, dtype=dtype), seeded(seed, drawn)
    assert bindings.fill_truncated(untouched, mean, std, a, b, counting, only_counts=True) == draws
    assert (untouched == 77).all()
    assert torch.equal(counting.get_state(), their_generator.get_state())


@pytest.mark.cases(1)
@needs_own_kernel
@by_dtype
@given(
    numel=st.integers(16, 40_000),
    width=st.floats(0.4, 6),
    skew=st.floats(0.2, 3),
    std=st.sampled_from([1.0, 0.02, 37.5]),
    seed=st.integers(0, 1000),
    drawn=st.integers(0, 700),
)
def test_values_and_generator_are_those_of_all_rounds(
    dtype: torch.dtype, numel: int, width: float, skew: float, std: float, seed: int, drawn: int
) -> None:
    assert_is_all_rounds(numel, dtype, std / 2, std, std / 2 - width * skew * std, std / 2 + width * std, seed, drawn)


@pytest.mark.cases(4)
@needs_own_kernel
@by_dtype
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rest", [0, 1, 15])
@pytest.mark.parametrize("width", [0.7, 2, 4.5])
def test_large_fill_is_that_of_any_number_of_threads(dtype: torch.dtype, threads: int, rest: int, width: float) -> None:
    torch.set_num_threads(threads)
    assert_is_all_rounds(6 * 131_072 + rest, dtype, 0, 1, -width, width, seed=rest)


@needs_own_kernel
# Values out of bounds are millions of random numbers apart, so the generator jumps between them.
def test_rare_values_out_of_bounds_are_replaced() -> None:
    torch.set_num_threads(1)
    assert_is_all_rounds(5 << 22, torch.float32, 0, 1, -5, 5, seed=3)


def test_fill_is_that_of_several_parts() -> None:
    torch.set_num_threads(1)
    assert_is_all_rounds((1 << 23) + 16 + 3, torch.float32, 0, 1, -3, 3, seed=5)


@needs_own_kernel
@by_dtype
def test_bounds_are_accepted(dtype: torch.dtype) -> None:
    values = torch.empty(4096, dtype=dtype).normal_(generator=seeded(3)).double().sort().values
    assert_is_all_rounds(4096, dtype, 0, 1, values[1000].item(), values[-1000].item(), seed=3)


@needs_own_kernel
@pytest.mark.parametrize(
    ("numel", "dtype", "std"), [(15, torch.float32, 1.0), (100, torch.float64, 1.0), (100, torch.float32, -1.0)]
)
def test_other_fills_are_left_alone(numel: int, dtype: torch.dtype, std: float) -> None:
    tensor, generator = torch.full((numel,), 7, dtype=dtype), seeded(0)
    assert bindings.fill_truncated(tensor, 0, std, -1, 1, generator) is None
    assert (tensor == 7).all()
    assert torch.equal(generator.get_state(), seeded(0).get_state())


@pytest.mark.parametrize("make", [lambda: torch.empty(8, 8).t()[1:], lambda: torch.empty(8, device="meta")])
def test_other_tensors_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"fill_truncated\(\) takes a contiguous tensor on the CPU"):
        bindings.fill_truncated(make(), 0, 1, -1, 1, seeded(0))


@needs_own_kernel
@rejects_by_rounds
@by_dtype
def test_deferred_trunc_normal_is_computed_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Tensor:
        return nn.init.trunc_normal_(torch.empty(3000, 1001, dtype=dtype), std=0.5, a=-1.1, b=1.4)

    torch.manual_seed(11)
    eager, state = build(), torch.get_rng_state()

    def fail(*args: object) -> None:
        raise AssertionError("the function was run on the whole tensor")

    monkeypatch.setattr(python_functions, "sample", fail)
    monkeypatch.setattr(python_functions, "count_draws", fail)
    torch.manual_seed(11)
    deferred = deferred_init(build)
    assert torch.equal(torch.get_rng_state(), state)
    assert has_same_bits(materialize_tensor(deferred), eager)


@rejects_by_rounds
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("bounds", [(-0.3, 0.2), (2, 3), (-8, 0.1), (8, 9)], ids=str)
def test_bounds_for_which_pytorch_samples_otherwise_have_its_values(
    dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    def build() -> list[Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mean is more than 2 std")
            sampled = nn.init.trunc_normal_(torch.empty(5003, dtype=dtype), a=bounds[0], b=bounds[1])
        return [sampled, torch.rand(3)]

    torch.manual_seed(2)
    eager = build()
    torch.manual_seed(2)
    for deferred, expected in zip(deferred_init(build), eager, strict=True):
        assert has_same_bits(materialize_tensor(deferred), expected)
