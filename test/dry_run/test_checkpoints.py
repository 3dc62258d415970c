"""Distributed checkpoints in a world: plans, reads, and writes, which do not happen."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparisons import metadata
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._pytree import tree_leaves

from torchext import _C
from torchext.dry_run import world

pytestmark = pytest.mark.usefixtures("empty_devices")

SIZE = 64


def sharded() -> nn.Module:
    model = nn.Linear(256, 256, device="cuda")
    fully_shard(model, mesh=init_device_mesh("cuda", (SIZE,)))
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", [0, 5])
def test_save_plans_the_writes_of_this_rank(rank: int, tmp_path: Path) -> None:
    with world(SIZE, rank, values="assume") as job:
        metadata = dcp.save({"model": sharded().state_dict()}, checkpoint_id=tmp_path)
    weight = metadata.state_dict_metadata["model.weight"]
    assert isinstance(weight, TensorStorageMetadata)
    (chunk,) = weight.chunks
    assert weight.size == torch.Size([256, 256])
    assert (chunk.offsets, chunk.sizes) == (torch.Size([4 * rank, 0]), torch.Size([4, 256]))
    assert not list(tmp_path.iterdir())
    assert [(value.operator, value.answer) for value in job.values] == [("checkpoint.save", "not written")]


def test_save_in_a_world_changes_no_existing_checkpoint(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"step": 3, "weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    real = torch.zeros(2)
    with world(4, 2, values="assume") as job:
        dcp.save({"step": 5, "weight": real}, checkpoint_id=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert [value.operator for value in job.values] == ["checkpoint.save"]


@pytest.mark.ci
def test_save_in_the_background_plans_as_well(tmp_path: Path) -> None:
    with world(SIZE, 5, values="assume") as job:
        future: Any = dcp.async_save({"model": sharded().state_dict()}, checkpoint_id=tmp_path)
        assert future.result() is not None
    assert [value.operator for value in job.values] == ["checkpoint.save"]
    assert not list(tmp_path.iterdir())


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.*assuming the intent is to save in a single process")
@pytest.mark.parametrize("rank", [0, 5])
def test_real_checkpoint_is_loaded_into_the_shards_of_this_rank(rank: int, tmp_path: Path) -> None:
    dcp.save({"model": nn.Linear(256, 256).state_dict(), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    with world(SIZE, rank):
        state: dict[str, Any] = {"model": sharded().state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=tmp_path)
        assert state["step"] == 3
        assert _C.is_fake(state["model"]["weight"].to_local())


def of_fsdp1(*, device: str = "cuda") -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    if device == "cpu":
        return model
    return FullyShardedDataParallel(model.cuda(), use_orig_params=True)


def stepped(model: nn.Module, make: Callable[..., torch.optim.Optimizer], device: str) -> torch.optim.Optimizer:
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(torch.randn(4, 3, device=device)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_optimizer_of_fsdp1_has_the_state_of_an_unsharded_one_on_each_rank(
    rank: int, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """Each rank has elements of some parameters only."""
    plain = of_fsdp1(device="cpu")
    states = stepped(plain, make, "cpu").state_dict()["state"]
    names = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    wanted = {
        name: {key: torch.as_tensor(value).shape for key, value in states[i].items()} for i, name in enumerate(names)
    }
    with world(4, rank, values="assume"):
        model = of_fsdp1()
        optimizer = stepped(model, make, "cuda")
        found = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        shapes = {
            name: {key: torch.as_tensor(value).shape for key, value in state.items()}
            for name, state in found["state"].items()
        }
        assert shapes == wanted
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found))


def with_small_units(*, device: str = "cuda") -> nn.Module:
    """Two of four ranks have no element of the first unit."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 4)).to(device)
    if device == "cpu":
        return model
    model[0] = FullyShardedDataParallel(model[0], use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("rank", range(4))
def test_state_of_a_unit_without_own_elements_is_that_of_other_units(rank: int) -> None:
    with world(4, rank, values="assume"):
        model = with_small_units()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 1, device="cuda")).sum().backward()
        optimizer.step()
        found = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        for name, shape in {"0.weight": (1, 1), "0.bias": (1,), "1.weight": (4, 1), "1.bias": (4,)}.items():
            assert {key: tuple(value.shape) for key, value in found[name].items()} == {
                "step": (),
                "exp_avg": shape,
                "exp_avg_sq": shape,
            }


CONTENTS = {
    "known": lambda: torch.arange(3),
    "random": lambda: torch.randn(3, device="cuda"),
    "views": lambda: torch.arange(6.0).view(2, 3).t()[1:],
    "parameter": lambda: nn.Parameter(torch.zeros(2, device="cuda")),
    "nested": lambda: {"loss": torch.tensor(0.5), "list": [torch.ones(2), 3]},
}


@pytest.mark.parametrize("name", CONTENTS)
def test_object_collectives_and_pickles_copy_tensors(name: str) -> None:
    with world(4, 1):
        content = CONTENTS[name]()
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, content)
        sent = [content]
        dist.broadcast_object_list(sent, src=1)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, [content] * 4, src=1)
        for copy in [*gathered, *sent, *scattered, pickle.loads(pickle.dumps(content))]:
            for one, other in zip(tensors_of(copy), tensors_of(content), strict=True):
                assert one is not other
                assert metadata(one) == metadata(other)
                if (values := _C.known_value(other)) is not None:
                    assert one.tolist() == values.tolist()


def tensors_of(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


SAVES_AND_LOADS = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("cpu:gloo,cuda:nccl")
torch.cuda.set_device(dist.get_rank())
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
import torch.distributed.checkpoint as dcp  # after the groups exist

def fsdp2():
    model = nn.Linear(5, 3).cuda()
    fully_shard(model)
    return model, model.state_dict

def fsdp1():
    model = FullyShardedDataParallel(nn.Linear(5, 3).cuda())
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, model.state_dict

def plain():
    model = nn.Linear(5, 3).cuda()
    return model, model.state_dict

def large():
    model = nn.Linear(256, 256).cuda()
    return model, model.state_dict

for make in (fsdp2, fsdp1, plain, large):
    model, state = make()
    dcp.save({"model": state(), "step": 3, "known": torch.arange(4)}, checkpoint_id=make.__name__)
    loaded = {"model": state(), "step": 0, "known": torch.zeros(4, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=make.__name__)
    model.load_state_dict(loaded["model"])
    assert loaded["step"] == 3
    assert loaded["known"].tolist() == [0, 1, 2, 3]
    try:
        dcp.load({"other": torch.zeros(2)}, checkpoint_id=make.__name__)
    except dcp.CheckpointException as error:
        assert "Missing key" in str(error), error
    else:
        raise AssertionError("a missing key was not found")
for make in (fsdp2, plain):
    model, state = make()
    dcp.save(state(), storage_writer=dcp.HuggingFaceStorageWriter(f"hf_{make.__name__}", save_distributed=True))
    dcp.load(state(), storage_reader=dcp.HuggingFaceStorageReader(f"hf_{make.__name__}"))
try:  # plain tensors have the size of the file
    dcp.load({"weight": torch.zeros(2, 5)}, storage_reader=dcp.HuggingFaceStorageReader("hf_plain"))
except dcp.CheckpointException as error:
    assert "Size mismatch" in str(error), error
else:
    raise AssertionError("another size was loaded")
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
dcp.async_save(state(), checkpoint_id="async", async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("rank", [0, 3])  # rank 3 has an empty shard
def test_checkpoint_that_a_rank_has_saved_is_loaded_again(rank: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES_AND_LOADS)
    flags = ["--gpu=H100", "--world-size=4", f"--rank={rank}", "--to-end", "--json=report.json"]
    command = [sys.executable, "-m", "torchext", "dry-run", *flags, "train.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert not list(tmp_path.glob("fsdp*"))
    [report] = json.loads((tmp_path / "report.json").read_text())["ranks"]
    files = {file["path"]: file["bytes"] for file in report["files"]}
    assert str(tmp_path / "fsdp2/.metadata") in files
    assert 256 * 257 * 4 < files[str(tmp_path / f"large/__{rank}_0.distcp")] < 1.1 * 256 * 257 * 4
    assert str(tmp_path / f"async/__{rank}_0.distcp") in files
