"""In any order and on any thread, every materialized tensor equals that of eager construction, bit for bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import assert_same_module, assert_same_tensor, build_both, too_large_to_copy
from torch import Tensor, nn

from torchext.deferred_init import is_deferred, materialize_module, materialize_tensor


class Model(nn.Module):
    """Ties, buffers, fills of all kinds, values that are read, and draws whose results are discarded."""

    def __init__(self, *outside: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 24, 0.1 * i) for i in range(3))
        self.convolution = nn.utils.parametrizations.spectral_norm(nn.Conv1d(16, 5, 3))
        self.recurrent = nn.LSTM(16, 7, bidirectional=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(9).outer(torch.rand(4)).sin(), persistent=False)
        self.register_buffer("order", torch.randperm(11))
        self.plain = torch.randn(5).half()
        for block in self.blocks:
            nn.init.trunc_normal_(block.linear1.weight, std=float(self.plain.abs().max()), a=-1, b=1)
            nn.init.orthogonal_(block.linear2.weight)
            torch.randn(3)
        with torch.no_grad():
            self.recurrent.get_parameter("bias_hh_l0")[7:14].normal_(1, 0.1)
        self.outside = nn.ParameterList(torch.rand(2) + tensor for tensor in outside)


def tensors_of(module: Model) -> list[Tensor]:
    return [*module.parameters(), *module.buffers(), module.plain]


def first_to_last(module: Model) -> None:
    for tensor in tensors_of(module):
        materialize_tensor(tensor)


def last_to_first(module: Model) -> None:
    for tensor in reversed(tensors_of(module)):
        materialize_tensor(tensor)


def shuffled(module: Model) -> None:
    for tensor in random.Random(1).sample(tensors_of(module), len(tensors_of(module))):
        materialize_tensor(tensor)


def one_in_ten_and_then_the_rest(module: Model) -> None:
    for tensor in tensors_of(module)[::10]:
        materialize_tensor(tensor)
    materialize_module(module)


def modules_from_the_last(module: Model) -> None:
    for child in reversed(list(module.children())):
        materialize_module(child)


def with_draws_and_seeds_between(module: Model) -> None:
    for i, tensor in enumerate(tensors_of(module)):
        torch.manual_seed(i)
        torch.randn(i)
        materialize_tensor(tensor)


def on_four_threads(module: Model) -> None:
    start = threading.Barrier(4)

    def share(i: int) -> None:
        start.wait()
        for tensor in tensors_of(module)[i::4]:
            materialize_tensor(tensor)

    threads = [threading.Thread(target=share, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ORDERS: list[Callable[[Model], Any]] = [
    materialize_module,
    first_to_last,
    last_to_first,
    shuffled,
    one_in_ten_and_then_the_rest,
    modules_from_the_last,
    with_draws_and_seeds_between,
    on_four_threads,
]


@pytest.mark.parametrize("materialize", ORDERS, ids=lambda order: order.__name__)
def test_order_does_not_matter(materialize: Callable[[Model], Any]) -> None:
    eager, deferred = build_both(Model)
    materialize(deferred)
    materialize_module(deferred)
    assert not is_deferred(deferred)
    assert_same_module(deferred, eager)
    assert_same_tensor(deferred.plain, eager.plain)


@pytest.mark.parametrize("share", [1, 10])
def test_other_tensors_stay_deferred(share: int) -> None:
    _, deferred = build_both(Model)
    tensors = tensors_of(deferred)
    for tensor in tensors[:share]:
        materialize_tensor(tensor)
    assert [is_deferred(tensor) for tensor in tensors[share:]] == [True] * (len(tensors) - share)


@pytest.mark.parametrize("materialize", ORDERS, ids=lambda order: order.__name__)
def test_second_try_after_an_error_gives_the_same_bits(materialize: Callable[[Model], Any]) -> None:
    outside = too_large_to_copy()
    eager, deferred = build_both(lambda: Model(outside))
    outside.add_(1)
    with pytest.raises(RuntimeError, match=r"`aten::add.Tensor` was recorded with a real tensor"):
        materialize_module(deferred)
    assert all(is_deferred(tensor) for tensor in tensors_of(deferred))
    deferred.outside, eager.outside = nn.ParameterList(), nn.ParameterList()
    materialize(deferred)
    materialize_module(deferred)
    assert_same_module(deferred, eager)
    assert_same_tensor(deferred.plain, eager.plain)
