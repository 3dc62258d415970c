"""Programs of several processes that save and load deferred modules, sharded by PyTorch's engines."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import main, program
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from torchext.checkpoint import load_checkpoint, save_safetensors
from torchext.deferred_init import deferred_init, is_deferred, materialize_module


class Net(nn.Module):
    """Rows that do not divide evenly, a tie, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.randn(5))


def construct(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def by_fully_shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def by_tensors(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_both(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all processes."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def check_is(model: nn.Module, wanted: nn.Module) -> None:
    found = whole(model)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found[name], tensor), name


def check_saved_alike(shard: Any) -> None:
    with shared_folder() as folder:
        model = shard(deferred_init(construct))
        dcp.save(model.state_dict(), checkpoint_id=folder / "deferred")
        assert is_deferred(model)
        dcp.save(shard(construct()).state_dict(), checkpoint_id=folder / "eager")
        for path in (folder / "eager").glob("*.distcp"):
            assert (folder / "deferred" / path.name).read_bytes() == path.read_bytes()
        check_loaded(folder / "deferred", shard)


def check_loaded(path: Path, shard: Any) -> None:
    """Check loading into a deferred model of another seed."""
    other = shard(deferred_init(construct, 1))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    materialize_module(other)
    check_is(other, construct())


@program()
def shards_of_two_processes_are_saved_alike() -> None:
    check_saved_alike(by_fully_shard)
    check_saved_alike(by_tensors)


@program(4)
def one_sharding_is_saved_and_another_loaded() -> None:
    check_saved_alike(by_both)
    with shared_folder() as folder:
        dcp.save(by_both(deferred_init(construct)).state_dict(), checkpoint_id=folder / "both")
        check_loaded(folder / "both", by_fully_shard)
        check_loaded(folder / "both", by_tensors)


@program()
def writer_of_hugging_face_has_the_same_files() -> None:
    with shared_folder() as folder:
        for name, model in ("deferred", deferred_init(construct)), ("eager", construct()):
            state = by_fully_shard(model).state_dict()
            del state["head.weight"]  # safetensors stores one of several tensors that share memory
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / name), save_distributed=True))
        names = sorted(path.relative_to(folder / "eager") for path in (folder / "eager").rglob("*.safetensors"))
        assert names
        for name in names:
            assert content(folder / "deferred" / name) == content(folder / "eager" / name)


def content(path: Path) -> tuple[Any, bytes]:
    """Return the header, whose metadata safetensors writes in any order, and the rest."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def check_file_is_loaded(shard: Any) -> None:
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            save_safetensors(deferred_init(construct), folder / "model.safetensors")
        dist.barrier()
        model = shard(deferred_init(construct, 1))
        load_checkpoint(model, folder / "model.safetensors")
        assert not is_deferred(model)
        check_is(model, construct())


@program()
def each_of_two_processes_reads_its_part_of_a_file() -> None:
    check_file_is_loaded(by_fully_shard)
    check_file_is_loaded(by_tensors)


@program(4)
def placements_divide_files_as_they_divide_tensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(70.0).view(14, 5)
    strided = _StridedShard(0, split_factor=2)
    for placements in (
        [strided, Shard(0)],
        [Replicate(), strided],
        [Shard(0), Replicate()],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
    ):
        wanted = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        for data in (
            whole,
            distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None),
            distribute_tensor(whole, mesh, placements, src_data_rank=None),
        ):
            zeros = deferred_init(torch.zeros, 14, 5)
            module = nn.ParameterDict({"w": distribute_tensor(zeros, mesh, placements, src_data_rank=None)})
            load_checkpoint(module, {"w": data})
            assert torch.equal(module["w"].to_local(), wanted.to_local()), (placements, type(data))


@program(4)
def each_of_four_processes_reads_its_part_of_a_file() -> None:
    check_file_is_loaded(by_both)


if __name__ == "__main__":
    main()
