"""Replay does what its plan predicts: csrc/core/deferred_init/plan/replay_plan.h."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from torchext.deferred_init import (
    deferred_init,
    materialize_module,
    materialize_tensor,
    plan,
)
from torchext.memory import track_memory


class TestText(TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)

    def test_an_operator_that_is_the_last_to_read_writes_in_place(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: torch.zeros(4).add_(1)))),
            """\
%0: float32[4] = aten::zeros([4], device=cpu)  # 16 B
%1: float32[4] = aten::add_.Tensor(%0, 1)  # in place; then drops %0
at most 16 B at one time, 32 B written""",
        )

    def test_a_constant_is_copied_before_it_is_written(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: torch.tensor([1.0, 2.0]).add_(1)))),
            """\
%1: float32[2] = aten::add_.Tensor(%0, 1)  # a copy, 8 B
at most 8 B at one time, 8 B written""",
        )

    def test_dead_writes_are_not_in_the_plan(self) -> None:
        def build() -> Tensor:
            weight = torch.empty(8).normal_()
            return weight.uniform_()

        self.assertExpectedInline(
            str(plan(deferred_init(build))),
            """\
%2: float32[8] = aten::uniform_(%1)  # 8 draws from 16; 32 B
at most 32 B at one time, 32 B written""",
        )

    def test_copy_of_otherwise_unused_tensor_reuses_it(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: torch.empty(8).uniform_().clone()))),
            """\
%1: float32[8] = aten::uniform_(%0)  # 8 draws from 0; 32 B
%2: float32[8] = aten::clone(%1)  # takes it over; then drops %1
at most 32 B at one time, 32 B written""",
        )

    def test_a_shard_asks_for_a_part(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: torch.empty(64, 64).normal_()[32:48].clone()))),
            """\
%1: float32[64, 64] = aten::normal_(%0)  # 4096 draws from 0; only [32:48]; 4.00 KiB
%2: float32[16, 64] = aten::clone(%1 as float32[16, 64] at 2048)  # takes it over; then drops %1
at most 4.00 KiB at one time, 4.00 KiB written""",
        )

    def test_steps_run_while_a_fill_is_in_the_cache(self) -> None:
        def build() -> Tensor:
            return torch.empty(1 << 17).normal_().mul_(0.02).to(torch.bfloat16)

        self.assertExpectedInline(
            str(plan(deferred_init(build))),
            """\
%1: float32[131072] = aten::normal_(%0)  # 131072 draws from 0; 512.00 KiB
%2: float32[131072] = aten::mul_.Tensor(%1, 0.02)  # in place; while %1 is filled; then drops %1
%3: bfloat16[131072] = aten::_to_copy(%2, dtype=bfloat16)  # 256.00 KiB; while %1 is filled; then drops %2
at most 768.00 KiB at one time, 1.25 MiB written""",
        )

    def test_derivations_run_one_storage_at_a_time(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: nn.Linear(4, 4).half()))),
            """\
%2: float32[4, 4] = aten::uniform_(%0, -0.49999999999999994, 0.49999999999999994)  # 16 draws from 0; 64 B
%4: float16[4, 4] = aten::_to_copy(%2, dtype=float16)  # 32 B; then drops %2
%3: float32[4] = aten::uniform_(%1, -0.5, 0.5)  # 4 draws from 16; 16 B
%5: float16[4] = aten::_to_copy(%3, dtype=float16)  # 8 B; then drops %3
at most 96 B at one time, 120 B written""",
        )

    def test_constants_run_no_operator(self) -> None:
        self.assertExpectedInline(
            str(plan(deferred_init(lambda: torch.tensor([1.0, 2.0])))), """at most 8 B at one time, 0 B written"""
        )


class TestArguments:
    def test_real_modules_have_an_empty_plan(self) -> None:
        assert len(plan(nn.Linear(2, 2))) == 0

    def test_a_real_tensor_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Cannot explain a tensor of shape \[2\]: it has no recording"):
            plan(torch.zeros(2))

    def test_other_objects_are_rejected(self) -> None:
        with pytest.raises(TypeError, match="takes a tensor, an iterable of tensors or a module, not int"):
            plan([torch.zeros(2), 3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="takes a tensor, an iterable of tensors or a module, not float"):
            plan(2.5)  # type: ignore[arg-type]

    def test_a_plan_stays_as_it_was_made(self) -> None:
        tensor = deferred_init(lambda: torch.zeros(4))
        before = plan(tensor)
        text = str(before)
        tensor.add_(1)
        assert str(before) == text
        assert len(plan(tensor)) == len(before) + 1


def half(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().to(torch.float16)


def initialized(initialize: Callable[..., object], *sizes: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(sizes))
        initialize(module.weight)
        return module

    return build


def sharded() -> nn.Module:
    whole = nn.Linear(1024, 1024, bias=False)
    whole.weight = nn.Parameter(whole.weight.detach()[256:512].clone())
    return whole


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(2000, 256), nn.Linear(256, 2000, bias=False))
    model[1].weight = model[0].weight
    return model


def scaled() -> nn.Module:
    model = nn.Linear(512, 512)
    with torch.no_grad():
        model.weight.mul_(0.5).add_(0.1)
    return model


def averaged() -> nn.Module:
    model = nn.Linear(512, 512, bias=False)
    model.register_buffer("average", model.weight.detach().clone())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(768, 768),
    "embedding": lambda: nn.Embedding(5000, 128),
    "convolution": lambda: nn.Conv2d(128, 256, 3),
    "transposed convolution": lambda: nn.ConvTranspose2d(128, 128, 3),
    "LSTM": lambda: nn.LSTM(256, 256, num_layers=2),
    "GRU": lambda: nn.GRU(256, 256),
    "attention": lambda: nn.MultiheadAttention(512, 8),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4), 2, enable_nested_tensor=False),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(256, 4), 2),
    "normalized": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(8))),
    "in half precision": half(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))),
    "an encoder in half precision": half(lambda: nn.TransformerEncoderLayer(256, 4)),
    "a shard": sharded,
    "tied": tied,
    "scaled": scaled,
    "with an average": averaged,
    "xavier": initialized(nn.init.xavier_normal_, 512, 512),
    "truncated": initialized(nn.init.trunc_normal_, 512, 512),
    "an identity": initialized(nn.init.eye_, 1024, 1024),
    "convolutions that pass on": initialized(nn.init.dirac_, 256, 256, 3, 3),
    "bilinear": lambda: nn.Bilinear(64, 64, 64),
}


N = 1 << 18
# Tensors with temporary buffers, or without, for different reasons.
TENSORS: dict[str, Callable[[], Tensor]] = {
    "a sum into another dtype": lambda: torch.randn(N).add_(torch.randn(N).double()),
    "a sum into half precision": lambda: torch.randn(N).bfloat16().add_(torch.randn(N)),
    "a product of two dtypes": lambda: torch.randn(N).half() * torch.randn(N),
    "a choice between two dtypes": lambda: torch.where(torch.ones(N, dtype=torch.bool), torch.zeros(N), 0.0),
    "integers that are divided": lambda: torch.arange(N) / 3.0,
    "bounds of another dtype": lambda: torch.randn(N).half().clamp_(torch.zeros(N).double()),
    "a part of a product of two dtypes": lambda: (torch.randn(1024, 256).half() * torch.randn(1024, 256))[:256].clone(),
    "a shard in half precision": lambda: torch.empty(2048, 256).uniform_().bfloat16()[:256].clone(),
    "a shard in double precision": lambda: torch.empty(2048, 256).uniform_().double()[:256].clone(),
    "a scaled fill": lambda: torch.randn(N) * 0.02,
    "a scaled, shifted and converted fill": lambda: (torch.randn(N) * 0.02).add(1).to(torch.bfloat16),
    "a resized output": lambda: torch.add(torch.randn(N), 1, out=torch.empty(0)),
    "parts far from each other": lambda: torch.cat([(w := torch.randn(1024, 256) * 2)[:64], w[512:576]]),
    "nothing of a large tensor": lambda: torch.randn(1024, 64)[:0].clone(),
    "values that were read before": lambda: reads_own_values(torch.randn(N)),
}


def reads_own_values(weight: Tensor) -> Tensor:
    for i in range(5):
        weight.mul_(1 + weight[i].item() * 0.01)
    return weight.clone()


class TestPeak:
    @pytest.mark.parametrize("build", TENSORS.values(), ids=TENSORS)
    def test_temporaries_are_counted(self, build: Callable[[], Tensor]) -> None:
        torch.manual_seed(0)
        tensor = deferred_init(build)
        predicted = plan(tensor).peak
        with track_memory() as memory:
            materialize_tensor(tensor)
        try:
            measured = memory.peak_allocated("cpu").allocated
        except ValueError:  # nothing was allocated
            measured = 0
        assert measured == pytest.approx(predicted, rel=0.05, abs=1024)

    def test_is_plain_values_and_an_html_table_too(self) -> None:
        found = plan(deferred_init(nn.Linear, 4, 4, bias=False))
        values = json.loads(json.dumps(found.to_dict()))
        assert (values["peak"], values["written"]) == (found.peak, found.written)
        assert [one["way"] for one in values["operations"]] == [one.way for one in found]
        assert values["operations"][-1]["operation"]["name"] == "aten::uniform_"
        assert "<th>memory</th>" in found._repr_html_()

    def test_constants_are_counted_once_for_all_that_show_them(self) -> None:
        constant = deferred_init(lambda: torch.tensor([1.0, 2.0, 3.0]))
        assert plan([constant, constant[1:], constant]).peak == 12

    @pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
    def test_the_predicted_peak_is_the_measured_one(self, build: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        model = deferred_init(build)
        predicted = plan(model).peak
        with track_memory() as memory:
            materialize_module(model)
        measured = memory.peak_allocated("cpu").allocated
        assert measured == pytest.approx(predicted, rel=0.05)

    def test_peak_of_a_shard_is_its_size(self) -> None:
        shard = deferred_init(lambda: torch.empty(4096, 256).normal_()[1024:1280].clone())
        predicted = plan(shard)
        with track_memory() as memory:
            materialize_tensor(shard)
        assert predicted.peak == shard.nbytes
        assert memory.peak_allocated("cpu").allocated == pytest.approx(predicted.peak, rel=0.05)
