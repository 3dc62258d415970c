"""Digests of recordings are equal if, and only if, materialization gives the same bits: `ranks.py` relies on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchext import _C
from torchext.deferred_init import deferred_init
from torchext.fake import fake_mode

REAL = torch.arange(64.0)


def digest_of(build: Callable[[], Tensor], seed: int = 0) -> tuple[int, int]:
    torch.manual_seed(seed)
    (digest,) = _C.digests_of_recordings([deferred_init(build)])
    return digest


def filled(x: Tensor) -> Tensor:
    return torch.rand(8, 8).add_(x)


def sum_into(out_of: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.rand(1)
    return torch.sum(x, 0, keepdim=True, out=out_of(x))


DIFFERENT: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "shapes": (lambda: torch.rand(8), lambda: torch.rand(4, 2)),
    "what came before": (lambda: torch.rand(8), lambda: (torch.rand(1), torch.rand(8))[1]),
    "an `out` that is the input and one that shows its memory": (
        lambda: sum_into(lambda x: x),
        lambda: sum_into(lambda x: x.detach()),
    ),
    "signs of zeros": (lambda: torch.full((8,), 0.0), lambda: torch.full((8,), -0.0)),
    "signs of imaginary zeros": (
        lambda: torch.full((8,), complex(1, 0.0)),
        lambda: torch.full((8,), complex(1, -0.0)),
    ),
    "last digits": (lambda: torch.rand(8) * 0.1, lambda: torch.rand(8) * 0.1000000000000001),
    "places of an index": (
        lambda: torch.rand(4, 4)[torch.tensor([1, 0])],
        lambda: torch.rand(4, 4)[:, torch.tensor([1, 0])],
    ),
    "views": (lambda: torch.rand(4, 4)[1], lambda: torch.rand(4, 4)[2]),
    "constants": (lambda: torch.tensor([1.0, 2.0]), lambda: torch.tensor([1.0, 3.0])),
    "real tensors": (lambda: filled(REAL.view(8, 8)), lambda: filled(REAL.view(8, 8) + 1)),
    "shapes of real tensors": (lambda: filled(REAL[:8].view(8, 1)), lambda: filled(REAL[:8].view(1, 8))),
    "strides of real tensors": (lambda: filled(REAL.view(8, 8)), lambda: filled(REAL.view(8, 8).t())),
    "dtypes of real tensors": (
        lambda: filled(REAL.view(8, 8)),
        lambda: filled(REAL.view(torch.int32).view(8, 8)),
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_digests_differ(one: Callable[[], Tensor], other: Callable[[], Tensor]) -> None:
    assert digest_of(one) == digest_of(one)
    assert digest_of(one) != digest_of(other)


def test_digests_differ_between_seeds() -> None:
    assert digest_of(lambda: torch.rand(8), 0) != digest_of(lambda: torch.rand(8), 1)


def test_digests_do_not_depend_on_other_recordings() -> None:
    def beside() -> Tensor:
        torch.ones(3).add_(1)
        result = torch.rand(8)
        torch.rand(300_000)
        return result

    assert digest_of(beside) == digest_of(lambda: torch.rand(8))
    ones = torch.ones(128)
    assert digest_of(lambda: filled(ones[64:].view(8, 8))) == digest_of(lambda: filled(ones[:64].view(8, 8)))


def test_draws_on_cuda_are_sources() -> None:
    with fake_mode(gpu=1):
        torch.cuda.manual_seed(0)
        tensor = deferred_init(torch.rand, 8, device="cuda")
        torch.cuda.manual_seed(0)
        again = deferred_init(torch.rand, 8, device="cuda")
    assert _C.digests_of_recordings([tensor]) == _C.digests_of_recordings([again])
    assert _C.sources_of([tensor]) == _C.sources_of([again])
    assert [source[0] for source in _C.sources_of([tensor])[0]] == ["aten::uniform_ of [8]"]


def test_tensors_that_are_not_deferred_have_no_digest() -> None:
    with pytest.raises(ValueError, match=r"A tensor of shape \[2\] has no recording to compare"):
        _C.digests_of_recordings([torch.ones(2)])
