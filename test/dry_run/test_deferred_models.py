"""Deferred models in a dry run: materializing gives counted fakes on the simulated device, and computes nothing."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparisons import metadata
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.dry_run import world
from torchext.fake import fake_mode, is_fake
from torchext.memory import track_memory

WIDTH = 256


def test_thread_outside_of_the_world_computes_values(tmp_path: Path) -> None:
    def run() -> None:
        model = materialize_module(deferred_init(nn.Linear, 2, 2))
        save_safetensors(model, tmp_path / "model.safetensors")
        found.append(is_fake(model.weight))

    found: list[bool] = []
    with world(2, 0):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [False]
    assert load_file(tmp_path / "model.safetensors")["weight"].shape == (2, 2)


class Tied(nn.Module):
    """A model with tied weights, a buffer that is a view, integers, and a plain attribute."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH, device=device)
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 100, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("row", self.embedding.weight.detach()[3:5].t())
        self.scale = torch.ones(WIDTH, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embedding(tokens)) * self.scale)
        return found


def sharded(module: nn.Module) -> nn.Module:
    for part in module.body:
        fully_shard(part)
    fully_shard(module)
    return module


def made_on_the_gpu() -> nn.Module:
    return Tied("cuda")


def deferred_on_the_gpu() -> nn.Module:
    return materialize_module(deferred_init(Tied, "cuda"))


def deferred_under_a_device() -> nn.Module:
    with torch.device("cuda"):
        return materialize_module(deferred_init(Tied))


def moved() -> nn.Module:
    module = Tied().cuda()
    module.scale = module.scale.cuda()
    return module


def deferred_and_moved() -> nn.Module:
    return materialize_module(deferred_init(moved))


def materialized_on_the_gpu() -> nn.Module:
    module = materialize_module(deferred_init(Tied), device="cuda")
    module.scale = module.scale.cuda()
    return module


def peak_of_training(make: Callable[[], nn.Module]) -> tuple[int, int]:
    gc.collect()
    with world(4, 1), track_memory():
        module = make()
        assert not is_deferred(module)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(2):
            module(torch.zeros(7, dtype=torch.int64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (deferred_on_the_gpu, made_on_the_gpu),
        (deferred_under_a_device, made_on_the_gpu),
        (materialized_on_the_gpu, made_on_the_gpu),
        (deferred_and_moved, moved),
    ],
)
def test_training_has_the_peak_of_the_model_that_is_not_deferred(
    make: Callable[[], nn.Module], wanted: Callable[[], nn.Module]
) -> None:
    assert peak_of_training(make) == peak_of_training(wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_shards_of_a_deferred_model_have_the_peak_of_those_of_the_meta_device(device: Any) -> None:
    def on_meta() -> nn.Module:
        return sharded(Tied("meta").requires_grad_()).to_empty(device="cuda")

    def deferred() -> nn.Module:
        module = sharded(deferred_init(Tied))
        assert is_deferred(module)
        materialize_module(module, device=device, check_ranks=True)
        module.scale = module.scale.cuda()
        return module

    def placed(make: Callable[[], nn.Module]) -> nn.Module:
        module = make()
        module.scale = torch.ones(WIDTH, device="cuda")
        return module

    assert peak_of_training(deferred)[1] == peak_of_training(lambda: placed(on_meta))[1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_have_the_metadata_of_real_ones(dtype: torch.dtype | None) -> None:
    real = materialize_module(deferred_init(Tied), dtype=dtype)
    with world(4, 1):
        module = deferred_init(Tied)
        parameters = list(module.parameters())
        materialize_module(module, dtype=dtype)
        assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
        assert module.head.weight is module.embedding.weight
        assert module.row.untyped_storage()._cdata == module.embedding.weight.untyped_storage()._cdata
        found, wanted = dict(module.state_dict(keep_vars=True)), dict(real.state_dict(keep_vars=True))
        for name in wanted:
            assert is_fake(found[name])
            assert metadata(found[name]) == metadata(wanted[name]), name


def test_constants_keep_their_values() -> None:
    def make() -> nn.Module:
        module = nn.Module()
        for name, value in {"scale": torch.tensor(2.0), "order": torch.arange(4), "rows": torch.eye(3)[1:]}.items():
            module.register_buffer(name, value)
        module.count = torch.tensor(3)
        return module

    with world(4, 1):
        for device in (None, "cuda"):
            module = materialize_module(deferred_init(make), device=device)
            assert module.scale.item() == 2
            assert module.order.tolist() == [0, 1, 2, 3]
            assert module.rows.tolist() == [[0, 1, 0], [0, 0, 1]]
            assert len(torch.arange(10)[: module.count]) == 3


def test_fakes_stay_as_they_are() -> None:
    with world(4, 1):
        fake = torch.ones(3)
        assert materialize_tensor(fake) is fake
        mixed = nn.Module()
        mixed.a, mixed.b = nn.Linear(2, 2), deferred_init(nn.Linear, 2, 2)
        materialize_module(mixed, device="cuda")
        assert [mixed.a.weight.device.type, mixed.b.weight.device.type] == ["cpu", "cuda"]


def test_values_are_computed_again_after_the_dry_run() -> None:
    module = deferred_init(nn.Linear, 2, 2)
    with world(4, 1):
        pass
    with fake_mode(gpu=True):
        materialize_module(module)
    assert not is_fake(module.weight)


@pytest.mark.parametrize("make", [lambda: deferred_init(nn.Linear, 4, 4), lambda: nn.Linear(4, 4, device="cuda")])
def test_checkpoint_is_not_written_in_a_world(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    with world(1, 0) as job:
        save_safetensors(make(), tmp_path / "new" / "model.safetensors")
    assert [(value.operator, value.answer) for value in job.values] == [("checkpoint.save_safetensors", "not written")]
    assert not list(tmp_path.iterdir())


@pytest.mark.cases(1)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_checkpoint_is_loaded_as_fakes(device: str | None, tmp_path: Path) -> None:
    """Large tensors are not read: the file is a hole. Small ones keep their values."""
    size, small = 1 << 30, torch.tensor([3, 4])
    header = json.dumps(
        {
            "weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
            "steps": {"dtype": "I64", "shape": [2], "data_offsets": [size, size + 16]},
        }
    ).encode()
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(8 + len(header) + size)
        file.write(small.numpy().tobytes())

    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(size // 4))
        module.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        return module

    with world(1, 0), track_memory() as memory:
        module = deferred_init(make)
        load_checkpoint(module, tmp_path / "large.safetensors", device=device)
        assert is_fake(module.weight)
        assert not is_deferred(module.weight)
        assert module.weight.device.type == module.steps.device.type == (device or "cpu")
        assert module.steps.tolist() == small.tolist()
        assert memory.peak_allocated("cuda:0" if device else "cpu").allocated >= size
