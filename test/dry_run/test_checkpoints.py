"""Distributed checkpoints in a world: plans, reads, and writes, which do not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
