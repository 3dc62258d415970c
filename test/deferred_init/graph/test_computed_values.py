"""Values computed for a read are not recomputed: csrc/extensions/replay/kept_values.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import assert_same_tensor, build_both
from torch import Tensor

from torchext.deferred_init import deferred_init, materialize_tensor


@pytest.fixture
def counted() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator that returns its argument plus 1 and counts its runs."""
    library = torch.library.Library("torchext_test_reads", "FRAGMENT")
    library.define("counted(Tensor x) -> Tensor")

    def run(x: Tensor) -> Tensor:
        call.runs += 1  # type: ignore[attr-defined]
        return x + 1

    library.impl("counted", run, "CompositeExplicitAutograd")
    library.impl("counted", torch.empty_like, "Meta")

    def call(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.torchext_test_reads.counted(x)
        return result

    call.runs = 0  # type: ignore[attr-defined]
    yield call
    library._destroy()


@pytest.mark.parametrize("numel", [100, 1 << 19])
def test_reading_a_derived_value_computes_it_once(counted: Any, numel: int) -> None:
    def build() -> Tensor:
        derived = counted(torch.randn(numel))
        rows = derived.view(2, -1)
        return derived + sum(derived.sum().item() + rows[i % 2].max().item() for i in range(10))

    eager, deferred = build_both(build)
    assert counted.runs == 2  # eagerly and deferred
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert counted.runs == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("numel", [100, 1 << 19])
@pytest.mark.parametrize(
    "draw",
    [
        lambda w: w[torch.multinomial(w, 1)],
        torch.poisson,
        torch._standard_gamma,
        lambda w: torch.bernoulli(w.clamp(0, 1)),
        lambda w: torch.normal(w, 1),
        lambda w: w.max().item(),
    ],
    ids=["multinomial", "poisson", "gamma", "bernoulli", "normal", "item"],
)
def test_loop_that_draws_by_its_own_results_runs_each_operator_a_few_times(
    counted: Any, draw: Callable[[Tensor], Any], numel: int
) -> None:
    steps = 12

    def build() -> Tensor:
        w = torch.ones(numel)
        for _ in range(steps):
            w = counted(w).sqrt() + draw(w) * 0.01
            w = w.abs()
        return w

    eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert counted.runs <= 4 * steps  # eagerly once, and all of them once more when the result is materialized


def test_writes_after_a_read_do_not_change_earlier_recordings() -> None:
    def build() -> list[Tensor]:
        w = torch.randn(1000)
        copies = []
        for i in range(5):
            w.mul_(1 + torch.bernoulli(w.sigmoid())[0])
            copies.append(w + w.sum().item())
            w[i:500].add_(torch.poisson(w.abs())[i:500])
        return [*copies, w, w[3:7]]

    eager, deferred = build_both(build)
    for found, expected in zip(reversed(deferred), reversed(eager), strict=True):
        assert_same_tensor(materialize_tensor(found), expected)


def test_oldest_values_are_forgotten_where_there_are_many(counted: Any) -> None:
    def build() -> list[Tensor]:
        first = counted(torch.zeros(100))
        first.sum().item()
        others = [torch.zeros(16 << 20) for _ in range(5)]  # 64 MiB each
        for other in others:
            other.max().item()
        first.sum().item()
        return [first]

    deferred_init(build)
    assert counted.runs == 2


@pytest.mark.parametrize("shape", [(), (1,), (3,), (40, 40)])
@pytest.mark.parametrize(
    "write", [lambda row: row.fill_(3), lambda row: torch.exp(torch.ones_like(row), out=row)], ids=["fill_", "out"]
)
@pytest.mark.parametrize("make", [torch.zeros, torch.randn, lambda *shape: torch.softmax(torch.ones(*shape), 0)])
def test_value_of_which_a_part_was_read_is_computed_as_a_whole_afterwards(
    shape: tuple[int, ...], write: Callable[[Tensor], Tensor], make: Callable[..., Tensor]
) -> None:
    """The read computes only the row. The adjacent memory has arbitrary contents."""

    def build() -> Tensor:
        rows = make(3, *shape)
        write(rows[1])
        assert rows[1].sum().item() > 0
        return rows

    eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)
