"""Programs of two processes for `test_fsdp.py`: `python fsdp_programs.py NAME` runs one, and fails if it fails."""

from __future__ import annotations

import shutil
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
from common import build_both
from processes import main, program
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchext.compat import install_as_torchdistx
from torchext.deferred_init import defer_again, is_deferred, materialize_module, materialize_tensor, summary

WORLD_SIZE = 2


class Model(nn.Module):
    """Sizes that do not divide evenly by two processes, a buffer, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.norm = nn.BatchNorm1d(7)
        self.table = nn.Embedding(3, 7)
        self.last = nn.Linear(7, 3)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def build_the_same() -> tuple[Model, Model]:
    return build_both(Model)


def assert_trains_like(module: nn.Module, eager: nn.Module) -> None:
    """Every process has the same input, so the mean of the gradients equals that of one process."""
    x = torch.linspace(-1, 1, 20).view(4, 5)
    for model in (module, eager):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(module(x), eager(x))


def wrap(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def assert_wraps_alike(module: nn.Module, eager: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped, expected = wrap(module), wrap(eager)
    assert not is_deferred(wrapped)
    with FullyShardedDataParallel.summon_full_params(wrapped), FullyShardedDataParallel.summon_full_params(expected):
        found, wanted = dict(wrapped.named_parameters()), dict(expected.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, wanted[name]), name
        buffers = dict(expected.named_buffers())
        for name, buffer in wrapped.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
    assert_trains_like(wrapped, expected)


def assert_finds_torchext() -> None:
    install_as_torchdistx()
    eager, deferred = build_the_same()
    assert_wraps_alike(deferred, eager)


@program()
def fsdp1() -> None:
    assert "torch.distributed.fsdp" not in sys.modules
    assert_finds_torchext()


@program()
def fsdp1_that_was_imported_before() -> None:
    import torch.distributed.fsdp._init_utils as fsdp

    assert not fsdp._TORCHDISTX_AVAIL
    assert_finds_torchext()


@program()
def fully_shard() -> None:
    eager, deferred = build_the_same()
    shard(deferred)
    assert is_deferred(deferred)
    assert all(is_deferred(parameter) for parameter in deferred.parameters())
    assert "DTensor" not in str(summary(deferred))
    assert str(summary(deferred)).splitlines()[0].split() == ["module", "class", "parameters", "bytes", "of", "state"]
    materialize_tensor(deferred.last.bias)
    parameters = list(deferred.parameters())
    materialize_module(deferred, retain_graph=True)
    defer_again_but_for(deferred, deferred.last)
    assert is_deferred(deferred)
    materialize_module(deferred)

    assert not is_deferred(deferred)
    assert all(a is b for a, b in zip(deferred.parameters(), parameters, strict=True))
    assert deferred.last.weight is deferred.table.weight
    wanted = dict(eager.named_parameters())
    for name, parameter in deferred.named_parameters():
        whole = wanted[name].detach()
        chunks = whole.chunk(WORLD_SIZE)
        shard_of_rank = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else whole[:0]
        assert torch.equal(parameter.to_local(), shard_of_rank), name
        assert torch.equal(parameter.full_tensor(), whole), name
    assert_trains_like(deferred, eager)


def shard(module: Model) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard_in_place

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    shard_in_place(module.first, mesh=mesh)
    shard_in_place(module, mesh=mesh)


def defer_again_but_for(module: nn.Module, spared: nn.Module) -> None:
    for child in module.children():
        if child is not spared:
            defer_again(child)


@program()
def fully_sharded_parts_stay_on_their_mesh() -> None:
    _, deferred = build_the_same()
    shard(deferred)
    for placement in ({"dtype": torch.float16}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="of a DTensor"):
            materialize_module(deferred, **placement)
    assert all(is_deferred(parameter) for parameter in deferred.parameters())
    materialize_module(deferred, device="cpu", dtype=torch.float32)
    assert not is_deferred(deferred)


def assert_has_values(module: nn.Module, values: dict[str, Tensor]) -> None:
    assert is_deferred(module)
    materialize_module(module)
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, values[name]), name


def other_values() -> dict[str, Tensor]:
    torch.manual_seed(17)
    return Model().state_dict()


@program()
def sharded_modules_load_whole_state_dicts() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = other_values()
    for from_rank_0 in (False, True):
        _, deferred = build_the_same()
        shard(deferred)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        given = {} if from_rank_0 and dist.get_rank() > 0 else dict(values)
        set_model_state_dict(deferred, given, options=options)
        assert_has_values(deferred, values)


@program()
def sharded_modules_load_checkpoints() -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    values = other_values()
    saved = Model()
    saved.load_state_dict(values)
    shard(saved)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder[0])

    _, deferred = build_the_same()
    shard(deferred)
    state = {"model": get_model_state_dict(deferred)}
    checkpoint.load(state, checkpoint_id=folder[0])
    set_model_state_dict(deferred, state["model"])
    assert_has_values(deferred, values)

    eager, deferred = build_the_same()
    values = eager.state_dict()
    shard(deferred)
    checkpoint.save({"model": get_model_state_dict(deferred)}, checkpoint_id=f"{folder[0]}/deferred")
    assert is_deferred(deferred)
    state = {"model": get_model_state_dict(saved)}
    checkpoint.load(state, checkpoint_id=f"{folder[0]}/deferred")
    for name, value in state["model"].items():  # loaded in place
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, values[name]), name
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


if __name__ == "__main__":
    main()
