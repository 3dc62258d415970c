"""Kinds of generators: positions of CUDA generators, here on fake devices, and kinds of other libraries.

Launches on real devices are compared in test/cuda_host/test_deferred_ledgers.py.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import assert_same_tensor, build_both
from cpp_library import compiled
from torch import Tensor, nn

from torchext import _C
from torchext.deferred_init import deferred_init, explain, materialize_module, materialize_tensor, plan, summary
from torchext.fake import FakeGPU, fake_mode


def offset() -> int:
    return torch.cuda.default_generators[0].get_offset()


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    with fake_mode(gpu=FakeGPU("H100-80GB", count=2)):
        torch.cuda.manual_seed_all(7)
        yield


@pytest.mark.usefixtures("fake_cuda")
class TestCudaGenerators:
    def test_are_in_the_state_after_eager_construction(self) -> None:
        def build() -> nn.Module:
            with torch.device("cuda"):
                return nn.TransformerEncoderLayer(64, 4, 100)

        build()
        eager = offset()
        torch.cuda.manual_seed(7)
        deferred_init(build)
        assert offset() == eager == 28

    def test_are_read_and_set_by_constructors(self) -> None:
        def build() -> list[Tensor]:
            state = torch.cuda.get_rng_state()
            first = torch.randn(5, device="cuda")
            torch.cuda.set_rng_state(state)
            second = torch.randn(5, device="cuda")
            with torch.random.fork_rng(devices=[0]):
                torch.cuda.manual_seed(3)
                third = torch.randn(2_000_000, device="cuda")
                assert offset() == 8
            return [first, second, third, torch.randn(5, device="cuda")]

        assert [starts_of(tensor) for tensor in deferred_init(build)] == [[0], [0], [0], [4]]
        assert offset() == 8

    def test_of_other_devices_move_apart(self) -> None:
        def build() -> list[Tensor]:
            return [torch.randn(5, device="cuda:1"), torch.randn(5, device="cuda:0"), torch.randn(5, device="cuda:1")]

        assert [starts_of(tensor) for tensor in deferred_init(build)] == [[0], [0], [4]]
        assert [generator.get_offset() for generator in torch.cuda.default_generators] == [4, 8]

    def test_positions_survive_copies_and_dead_writes(self) -> None:
        def build() -> list[Tensor]:
            weight = torch.empty(300, device="cuda").normal_().uniform_()
            return [weight, copy.deepcopy(weight), weight[:100].clone()]

        assert [starts_of(tensor) for tensor in deferred_init(build)] == [[4], [4], [4]]

    def test_values_are_refused_without_a_device(self) -> None:
        layer = deferred_init(nn.Linear, 3, 3, device="cuda")
        assert "4 draws from 0" in str(explain(layer.weight))
        assert "4 draws from 4" in str(plan(layer))
        assert "uniform_" in str(summary(layer, time="predicted"))
        with pytest.raises(RuntimeError, match=r"`aten::\w+` was recorded on cuda.*no CUDA device to compute it on"):
            materialize_module(layer)

    def test_counts_that_need_a_run_are_an_error_without_a_device(self) -> None:
        with pytest.raises(
            RuntimeError,
            match=r"`torchext::trunc_normal_` draws from the generator of cuda:0\. The number of draws is known "
            r"only after a run, .* Construct the model on the CPU and let materialize_module\(\) place it",
        ):
            deferred_init(lambda: nn.init.trunc_normal_(torch.empty(10, device="cuda")))
        assert offset() == 0

    def test_nothing_is_drawn_for_meta_tensors(self) -> None:
        own = torch.Generator("cuda").manual_seed(3)

        def build() -> Tensor:
            torch.empty(9, device="meta").normal_(generator=own)
            return torch.randn(5, device="cuda", generator=own)

        build()
        assert own.get_offset() == 4
        deferred_init(build)
        assert own.get_offset() == 8

    def test_states_are_shared_as_by_cuda_graphs(self) -> None:
        generator = torch.cuda.default_generators[0]
        shared = generator.graphsafe_get_state()
        torch.randn(5, device="cuda")
        assert shared.get_offset() == 4
        own = torch.Generator("cuda").manual_seed(3)
        own.graphsafe_set_state(shared)
        torch.randn(5, device="cuda", generator=own)
        assert offset() == 8

    def test_arguments_that_pytorch_refuses_do_not_crash(self) -> None:
        with pytest.raises(RuntimeError, match=r"n must be non-negative|multiplication overflow"):
            torch.randperm(-1, out=torch.empty(0, dtype=torch.long, device="cuda"))
        assert offset() == 0

    def test_digests_differ_between_seeds_and_offsets(self) -> None:
        def digest(seed: int, skipped: int) -> Any:
            torch.cuda.manual_seed(seed)
            for _ in range(skipped):
                torch.rand(3, device="cuda")
            return _C.digests_of_recordings([deferred_init(torch.randn, 5, device="cuda")])

        digests = [digest(0, 0), digest(1, 0), digest(0, 1)]
        assert digest(0, 0) == digests[0]
        assert len({str(one) for one in digests}) == 3


def starts_of(tensor: Tensor) -> list[int]:
    """Return the start positions of the draws that determine `tensor`."""
    return [one.generator_offset for one in explain(tensor) if one.runs and one.generator_offset is not None]


def test_digests_differ_between_gpus_if_values_do() -> None:
    def digest(gpu: str, numel: int) -> str:
        with fake_mode(gpu=FakeGPU(gpu)):
            torch.cuda.manual_seed(7)
            return str(_C.digests_of_recordings([deferred_init(torch.randn, numel, device="cuda")]))

    assert digest("H100-80GB", 1000) == digest("A100-80GB", 1000)
    assert digest("H100-80GB", 300_000) != digest("A100-80GB", 300_000)


# ---- Other kinds ----


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled("tapes", tmp_path_factory.mktemp("tapes"))


@pytest.fixture(params=["read_copies", "read_states"])
def other_kind(request: pytest.FixtureRequest, tapes: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Make the CPU's generator an unknown kind, or a kind that is defined in the test."""
    getattr(tapes, request.param)()
    yield tapes
    tapes.read_as_usual()


def draws_in_many_ways() -> list[Tensor]:
    own = torch.Generator().manual_seed(3)
    weight = torch.empty(40, 50).normal_()
    return [
        weight,
        weight[:7].clone(),
        torch.rand(1000, generator=own),
        nn.functional.dropout(torch.ones(100), 0.5),
        torch.randperm(30),
        torch.empty(20).normal_().uniform_(generator=own),
        torch.bernoulli(torch.rand(50)),
        nn.init.trunc_normal_(torch.empty(2000)),
        nn.Linear(20, 20).weight.detach(),
        torch.randn(3),
    ]


@pytest.mark.ci  # compiles C++
@pytest.mark.parametrize("order", [sorted, lambda x: sorted(x)[::-1], lambda x: random.Random(0).sample(x, len(x))])
def test_other_kinds_of_generators_are_exact(other_kind: ctypes.CDLL, order: Callable[[list[int]], list[int]]) -> None:
    eager, deferred = build_both(draws_in_many_ways)
    after = torch.get_rng_state()
    for i in order(list(range(len(deferred)))):
        assert_same_tensor(materialize_tensor(deferred[i]), eager[i], f"result {i}")
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.ci  # compiles C++
def test_a_kind_is_one_file(tapes: ctypes.CDLL) -> None:
    tapes.read_states()
    try:
        before = tapes.positions_noted()
        layer = deferred_init(nn.Linear, 3, 3)
        assert tapes.positions_noted() == before + 2
        assert [starts_of(layer.weight), starts_of(layer.bias)] == [[before], [before + 1]]
    finally:
        tapes.read_as_usual()
