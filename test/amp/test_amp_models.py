"""Autocast on whole models: values equal to `torch.autocast`, and training tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchext import amp
from torchext.deferred_init import deferred_init, materialize_module
from torchext.fake import fake_mode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


MODELS = {"llama": llama, "bert": bert}
TOKENS = torch.arange(24).reshape(2, 12)

Forward = Callable[[nn.Module], Any]


def in_torchs_region(model: nn.Module) -> Any:
    with torch.autocast("cpu", dtype=BF16):
        return model(TOKENS, labels=TOKENS)


def in_region(model: nn.Module) -> Any:
    with amp.autocast("cpu", dtype=BF16):
        return model(TOKENS, labels=TOKENS)


def in_self_cleaning_region(model: nn.Module) -> Any:
    with amp.autocast("cpu", dtype=BF16, self_cleaning=True):
        return model(TOKENS, labels=TOKENS)


def by_decorator(model: nn.Module) -> Any:
    return amp.autocast("cpu", dtype=BF16)(model)(TOKENS, labels=TOKENS)


def by_identity(model: nn.Module) -> Any:
    return amp.to_amp(model)(TOKENS, labels=TOKENS)


def run(model: nn.Module, forward: Forward) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss, the logits, and the gradients."""
    output = forward(model)
    output.loss.float().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss, output.logits, gradients


class TestValues:
    @pytest.mark.cases(1)
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("way", [in_region, by_decorator, in_self_cleaning_region, by_identity])
    def test_forward_and_backward_are_torch_autocasts_bit_for_bit(self, name: str, way: Forward) -> None:
        loss, logits, gradients = run(MODELS[name](), in_torchs_region)
        found_loss, found_logits, found_gradients = run(MODELS[name](), way)
        if way is by_decorator:  # casts the result
            loss, logits = loss.float(), logits.float()
        assert found_logits.dtype is logits.dtype
        assert torch.equal(found_loss, loss)
        assert torch.equal(found_logits, logits)
        assert found_gradients.keys() == gradients.keys()
        assert all(torch.equal(found_gradients[name], gradients[name]) for name in gradients)

    @pytest.mark.parametrize("name", MODELS)
    def test_fakes_have_the_dtypes_of_real_tensors(self, name: str) -> None:
        def dtypes() -> list[torch.dtype]:
            seen: list[torch.dtype] = []
            model = MODELS[name]()
            for module in model.modules():
                module.register_forward_hook(
                    lambda module, args, output: seen.append(output.dtype) if isinstance(output, Tensor) else None
                )
            with amp.autocast("cpu"):
                model(torch.zeros_like(TOKENS))
            return seen

        real = dtypes()
        assert set(real) == {BF16, FP32}
        with fake_mode():
            assert dtypes() == real


class TestTools:
    @pytest.mark.parametrize("way", ["region", "decorator", "identity", "self-cleaning"])
    def test_grad_scaler(self, way: str) -> None:
        def train(way: str) -> list[Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
            if way == "decorator":
                amp.autocast("cpu", dtype=BF16)(model)
            elif way == "identity":
                amp.to_amp(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            regions: dict[str, Any] = {
                "torch": torch.autocast("cpu", dtype=BF16),
                "region": amp.autocast("cpu", dtype=BF16),
                "self-cleaning": amp.autocast("cpu", dtype=BF16, self_cleaning=True),
            }
            for _ in range(3):
                with regions.get(way, torch.enable_grad()):
                    y = model(torch.ones(4, 8))
                scaler.scale(y.float().pow(2).mean()).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [p.detach() for p in model.parameters()]

        assert all(map(torch.equal, train(way), train("torch")))

    @pytest.mark.parametrize("region", [amp.autocast, torch.autocast])
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpoint_in_a_region(self, region: Any, use_reentrant: bool) -> None:
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        x = torch.ones(2, 4, requires_grad=True)
        with region("cpu"):
            y = checkpoint(block, x, use_reentrant=use_reentrant)
        y.float().sum().backward()
        found = [x.grad, *(p.grad for p in block.parameters())]
        block.zero_grad()
        z = x.detach().requires_grad_()
        with region("cpu"):
            y = block(z)
        y.float().sum().backward()
        assert all(map(torch.equal, found, [z.grad, *(p.grad for p in block.parameters())]))

    def test_decorator_runs_in_the_threads_of_data_parallel(self) -> None:
        seen = []

        @amp.autocast("cpu")
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(super().forward(x).dtype)
                return super().forward(x)

        with ThreadPoolExecutor(2) as pool:  # the threads of parallel_apply() need devices
            results = list(pool.map(lambda model: model(torch.ones(1, 2)), [Net(2, 2), Net(2, 2)]))
        assert seen == [BF16, BF16]
        assert [r.dtype for r in results] == [FP32, FP32]

    def test_instance_keeps_its_decorator_when_it_is_replicated(self) -> None:
        replica = amp.autocast("cpu")(nn.Linear(2, 2))._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.ones(2, 2), torch.ones(2)
        assert replica(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]

    def test_threads_have_their_own_self_cleaning_regions(self) -> None:
        model = nn.Linear(2, 2)

        def run(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
            with amp.autocast("cpu", self_cleaning=True):
                y = model(x)
            return y.dtype, torch.mm(y, torch.ones(2, 2)).dtype

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(run, [torch.ones(1, 2)] * 20)) == {(BF16, FP32)}

    @pytest.mark.parametrize("self_cleaning", [False, True])
    @pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
    def test_without_gradients(self, block: Any, self_cleaning: bool) -> None:
        model, region = nn.Linear(2, 2), amp.autocast("cpu", self_cleaning=self_cleaning)
        with block(), region:
            assert model(torch.ones(1, 2)).dtype is BF16
        with region, block():
            y = model(torch.ones(1, 2))
        assert (y.dtype, amp.is_amp(y)) == (BF16, self_cleaning)
        with block():
            assert amp.autocast("cpu")(model)(torch.ones(1, 2)).dtype is FP32
            assert torch.relu(y).dtype is (FP32 if self_cleaning else BF16)

    @pytest.mark.parametrize("self_cleaning", [False, True])
    def test_torch_func_in_a_region(self, self_cleaning: bool) -> None:
        model, x = nn.Linear(3, 3), torch.ones(2, 3)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (x,)).float().pow(2).sum()

        for region in (torch.autocast("cpu"), amp.autocast("cpu", self_cleaning=self_cleaning)):
            with region:
                gradients = torch.func.grad(loss)(parameters, x)
                each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
            if isinstance(region, torch.autocast):
                wanted, wanted_each = gradients, each
        assert all(map(torch.equal, gradients.values(), wanted.values()))
        assert all(map(torch.equal, each.values(), wanted_each.values()))

    @pytest.mark.parametrize("self_cleaning", [False, True])
    def test_deferred_init_of_a_model_whose_constructor_autocasts(self, self_cleaning: bool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)
                with amp.autocast("cpu", self_cleaning=self_cleaning), torch.no_grad():
                    self.register_buffer("table", self.layer(torch.rand(2, 4)))
                    self.register_buffer("total", self.layer.weight.sum())
                self.layer.weight.data.mul_(2)

        torch.manual_seed(0)
        eager = Net()
        torch.manual_seed(0)
        deferred = deferred_init(Net)
        materialize_module(deferred)
        for (name, found), wanted in zip(deferred.state_dict().items(), eager.state_dict().values(), strict=True):
            assert found.dtype is wanted.dtype, name
            assert torch.equal(found, wanted), name
            assert amp.is_amp(found) == amp.is_amp(wanted), name

    def test_copies_of_a_wrapped_model_train_on_their_own(self) -> None:
        model = amp.to_amp(nn.Linear(2, 2))
        twin = copy.deepcopy(model)
        twin(torch.ones(1, 2)).float().sum().backward()
        assert model.weight.grad is None
        assert twin.weight.grad.dtype is FP32

    @pytest.mark.cuda
    def test_trains_on_cuda_as_torch_autocast_does(self) -> None:
        def train(way: str) -> list[Tensor]:
            torch.manual_seed(0)
            model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).cuda()
            if way == "identity":
                amp.to_amp(model)
            elif way == "decorator":
                amp.autocast(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda")
            regions: dict[str, Any] = {"torch": torch.autocast("cuda"), "region": amp.autocast()}
            regions["self-cleaning"] = amp.autocast(self_cleaning=True)
            for _ in range(3):
                with regions.get(way, torch.enable_grad()):
                    y = model(torch.ones(2, 8, 32, device="cuda"))
                scaler.scale(y.float().pow(2).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [p.detach() for p in model.parameters()]

        wanted = train("torch")
        for way in ("region", "decorator", "identity", "self-cleaning"):
            for found, expected in zip(train(way), wanted, strict=True):
                torch.testing.assert_close(found, expected)
