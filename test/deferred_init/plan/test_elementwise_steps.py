"""Random values that are processed in stretches have the same bits: csrc/extensions/parts/part_calls.cpp."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from common import assert_same_tensor, build_both, has_same_bits, kept_threads
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor

NUMEL = 70_013  # more than one stretch; neither the size nor the remainder is a round number
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads."""
    with kept_threads():
        yield


def drawn(numel: int = NUMEL) -> Tensor:
    return torch.randn(numel)


def with_two_readers() -> list[Tensor]:
    values = drawn()
    return [values * 2, values * 3]


def that_is_wanted_itself() -> list[Tensor]:
    values = drawn()
    return [values, values * 3]


def shown_twice() -> list[Tensor]:
    values = drawn()
    part = values[5:]
    values.mul_(2)
    return [part, values]


def in_the_middle_of_a_storage() -> list[Tensor]:
    whole = torch.ones(NUMEL + 40)
    whole[20:-20].normal_().mul_(3).sub_(1)
    return [whole]


def with_ends_that_are_read() -> list[Tensor]:
    whole = torch.ones(NUMEL + 40)
    inner = whole[20:-20].uniform_()
    scaled = inner * 2
    return [scaled, whole[:20].clone()]


def multiplied_with_a_tensor() -> list[Tensor]:
    return [drawn() * torch.tensor(3.0), drawn().mul_(torch.rand(NUMEL))]


def added_with_a_factor() -> list[Tensor]:
    return [drawn().add_(1.1, alpha=3), drawn().sub(0.3, alpha=0.7)]


def multiplied_with_itself() -> list[Tensor]:
    values = drawn()
    return [values * values]


def that_are_not_numbers() -> list[Tensor]:
    """Compute NaNs. bfloat16 has several, and may get another one for elements that do not fill a vector."""
    by_zero = torch.randn(NUMEL, dtype=torch.bfloat16).mul_(0).div_(0)
    from_infinity = (torch.randn(NUMEL) * torch.inf).sub_(torch.inf).bfloat16().neg_()
    return [
        by_zero,
        from_infinity,
        drawn().bfloat16().add_(torch.nan),
        torch.empty(NUMEL).normal_(torch.nan).bfloat16(),
    ]


def that_are_not_numbers_in_single_precision() -> list[Tensor]:
    """Compute values that are finite Python numbers, but infinite or 0 in kernels."""
    too_large = drawn().bfloat16().mul_(1e300).mul_(1e-300)
    too_wide = torch.empty(NUMEL).normal_(0, 1e39).sub_(1).mul_(2).bfloat16()
    return [too_large, torch.zeros(NUMEL).uniform_(0, 1e-45).bfloat16().div_(1e-300), too_wide]


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "scaled": lambda: [drawn() * 0.02],
    "one after another": lambda: [(drawn() * 0.02).add_(1).neg_().abs_() / 3],
    "shifted": lambda: [torch.rand(NUMEL).mul_(2).sub_(1)],
    "matrix": lambda: [torch.randn(701, 101) * 0.1],
    "transposed": lambda: [torch.randn(701, 101).t() * 0.1],
    "parameter": lambda: [nn.Parameter(drawn() * 0.02)],
    "with steps that are not elementwise": lambda: [
        torch.rand(NUMEL).mul_(2).sub_(1).erfinv_().mul_(0.1).clamp_(-1, 1)
    ],
    "into another dtype and back": lambda: [(drawn().bfloat16() * 0.3).float() + 1],
    "into integers": lambda: [(torch.rand(NUMEL) * 9).to(torch.int32)],
    "into another layout": lambda: [torch.randn(1, 7, 100, 101).to(memory_format=torch.channels_last)],
    "with complex numbers": lambda: [drawn() * 2j],
    "with two readers": with_two_readers,
    "that is wanted itself": that_is_wanted_itself,
    "shown twice": shown_twice,
    "in the middle of a storage": in_the_middle_of_a_storage,
    "with ends that are read": with_ends_that_are_read,
    "multiplied with a tensor": multiplied_with_a_tensor,
    "added with a factor": added_with_a_factor,
    "multiplied with itself": multiplied_with_itself,
    "at the head of a larger storage": lambda: [torch.empty(3 * NUMEL)[:NUMEL].normal_() * 0.02],
    "that are not numbers": that_are_not_numbers,
    "that are not numbers in single precision": that_are_not_numbers_in_single_precision,
}


def assert_same_bits(build: Callable[[], list[Tensor]], seed: int = 0) -> None:
    """Materialize one by one, in both orders, and all at once."""
    count = len(build_both(build, seed)[0])
    for order in (range(count), reversed(range(count))):
        eager, deferred = build_both(build, seed)
        for place in order:
            assert_same_tensor(materialize_tensor(deferred[place]), eager[place], f"seed {seed}, tensor {place}")
    eager, deferred = build_both(build, seed)
    module = nn.Module()
    for place, tensor in enumerate(deferred):
        module.register_buffer(f"b{place}", tensor.detach())
    materialize_module(module)
    for found, wanted in zip(module.buffers(), eager, strict=True):
        assert has_same_bits(found, wanted)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_have_the_same_bits(program: Callable[[], list[Tensor]], count: int) -> None:
    torch.set_num_threads(count)
    assert_same_bits(program)


@pytest.mark.cases(12)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_conversions_have_the_same_bits(source: torch.dtype, target: torch.dtype) -> None:
    assert_same_bits(lambda: [torch.empty(NUMEL, dtype=source).normal_(1, 30).mul_(3000).to(target) / 7])


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(4))
def test_random_chains_have_the_same_bits(block: int) -> None:
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.mul_(0.3),
        lambda t: t * -1.7,
        lambda t: t / 3,
        lambda t: t.div_(0.7),
        lambda t: t.add_(1),
        lambda t: t + 0.1,
        lambda t: t.sub_(2.5),
        lambda t: 1 - t,
        lambda t: t.neg(),
        lambda t: t.abs_(),
        lambda t: t.bfloat16(),
        lambda t: t.half(),
        lambda t: t.float(),
        lambda t: t.double(),
        lambda t: t.view(-1),
        lambda t: t[16:],
        lambda t: t.exp(),
        lambda t: t.detach(),
    ]

    def build(seed: int) -> list[Tensor]:
        choose = random.Random(seed)
        values = choose.choice([torch.randn, torch.rand])(NUMEL, dtype=choose.choice(FLOATS))
        made = []
        for _ in range(choose.randrange(1, 8)):
            values = choose.choice(steps)(values)
            if choose.random() < 0.15:
                made.append(values)
        return [*made, values, torch.rand(3)]

    for seed in range(block * 15, block * 15 + 15):
        torch.set_num_threads(1 + seed % 3)
        assert_same_bits(lambda seed=seed: build(seed), seed)


def operators_of(build: Callable[[], Tensor]) -> set[str]:
    """Return the operators that PyTorch's profiler records while the tensor is materialized."""
    deferred = deferred_init(build)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        materialize_tensor(deferred)
    return {event.key for event in profiled.key_averages()}


def test_steps_run_within_the_fill() -> None:
    seen = operators_of(lambda: (torch.randn(NUMEL) * 0.02).add_(1))
    assert not seen & {"aten::mul", "aten::mul_", "aten::add_"}
    assert "aten::_to_copy" not in operators_of(lambda: torch.randn(NUMEL).bfloat16())


def test_operators_that_round_differently_at_vector_ends_run_on_the_whole() -> None:
    seen = operators_of(lambda: torch.rand(NUMEL).mul_(0.9).erfinv_().mul_(2))
    assert {"aten::erfinv_", "aten::mul_"} <= seen
    assert "aten::add_" in operators_of(lambda: torch.rand(NUMEL).add_(1, alpha=3))
