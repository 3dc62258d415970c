"""Programs for `test_engines.py`: PyTorch's parallel engines, applied to deferred and to eager modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from common import BuiltOn, build_both, has_same_bits, too_large_to_copy
from processes import main, program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from torchext import RanksDifferError
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor, recording

Build: TypeAlias = Callable[[], nn.Module]
Engine: TypeAlias = Callable[[nn.Module], nn.Module]

VOCABULARY = 13
WIDTH = 8
HEAD_WIDTH = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # A process of tensor parallelism has some of the heads.
        layers = self.query, self.key, self.value
        heads = [layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for layer in layers]
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """A small language model, with a buffer, and with initializers that draw in several ways.

    The default sizes do not divide evenly by two or four processes.
    """

    def __init__(self, layers: int = 2, tied: bool = False, hidden: int = 10, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 1)
        self.layers = nn.ModuleDict({str(i): Block(hidden) for i in range(layers)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=0.5)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Use the layers that a pipeline stage has kept."""
        x = self.embedding(x) * self.scale if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the next tokens."""
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def assert_same_bits(found: Tensor, wanted: Tensor, name: str) -> None:
    assert not is_deferred(found), name
    assert has_same_bits(found, wanted), name


def slice_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this process's part of `whole`.

    Chunks of chunks: strided shards come last, because the dimensions of the mesh to their right, which shard the same
    dimension, came first.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for i, placement in sorted(enumerate(placements), key=lambda item: isinstance(item[1], _StridedShard)):
        if isinstance(placement, Shard | _StridedShard):
            chunks = whole.chunk(mesh.size(i), placement.dim)
            part = coordinate[i]
            whole = chunks[part] if part < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def assert_has_values(tensor: Tensor, whole: Tensor, name: str) -> None:
    if isinstance(tensor, DTensor):
        assert_same_bits(tensor.to_local(), slice_of(whole, tensor.device_mesh, tensor.placements), name)
        assert_same_bits(tensor.full_tensor(), whole, name)
    else:
        assert_same_bits(tensor, whole, name)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names before a wrapper such as DistributedDataParallel."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name.removeprefix("module."): tensor for name, tensor in named}


def assert_module_has_values(module: nn.Module, values: dict[str, Tensor]) -> None:
    found = tensors_of(module)
    assert found.keys() == values.keys()
    for name, tensor in found.items():
        assert_has_values(tensor, values[name], name)
    for name, tensor in found.items():  # ties are kept
        assert [n for n, t in found.items() if t is tensor] == [n for n, t in values.items() if t is values[name]]


def losses(module: nn.Module, seed: int) -> list[Tensor]:
    """Return the losses of five steps, on data of the seed."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    found = []
    for _ in range(5):
        tokens, target = batch(seed)
        loss = cross_entropy(module(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert found[-1] < found[0]
    return found


def assert_trains_like(module: nn.Module, expected: nn.Module, seed: int) -> None:
    for found, wanted in zip(losses(module, seed), losses(expected, seed), strict=True):
        assert_same_bits(found, wanted, "loss")


def check(
    build: Build,
    engine: Engine,
    seed: int = 0,
    construct_from: int = 0,
    values: dict[str, Tensor] | None = None,
) -> nn.Module:
    """Apply an engine to the deferred and the eager result of `build`, and compare values and training.

    Args:
        build: Constructs the module.
        engine: Distributes it.
        seed: Seed of this process's data.
        construct_from: The seed with which this process constructs the module.
        values: Expected parameters and buffers. By default, those that process 0 constructs from the seed 0.

    Returns:
        The result of the engine for the deferred module.
    """
    values = values or values_from(build, 0)
    eager, deferred = build_both(build, construct_from)
    expected = engine(eager)
    module = engine(deferred)
    assert is_deferred(module)
    materialize_module(module)
    assert not is_deferred(module)
    assert_module_has_values(module, values)
    assert_module_has_values(expected, values)
    assert_trains_like(module, expected, seed)
    return module


def values_from(build: Build, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return tensors_of(build())


# Fully sharded data parallelism.


def shard_layers(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    return module


def shard_nested(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in module.layers.values():
        fully_shard([layer.attention_norm, layer.attention], mesh=mesh)
        fully_shard(layer.feed_forward, mesh=mesh)
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)
    return module


def shard_but_for_norms(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    norms = {p for m in module.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    sharded = shard_layers(module, mesh, ignored_params=norms)
    assert not any(isinstance(norm, DTensor) for norm in norms)
    return sharded


def shard_columns(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def last_of_matrices(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.size(1) % mesh.size() == 0 else None

    return shard_layers(module, mesh, shard_placement_fn=last_of_matrices)


@program()
def fully_shard() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(Decoder, partial(shard_layers, mesh=mesh, mp_policy=mixed), rank)
    check(Decoder, partial(shard_layers, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), rank)
    check(partial(Decoder, tied=True), partial(shard_layers, mesh=mesh), rank)
    check(Decoder, partial(shard_nested, mesh=mesh), rank)
    check(Decoder, partial(shard_but_for_norms, mesh=mesh), rank)
    check(Decoder, partial(shard_columns, mesh=mesh), rank)


@program()
def fully_shard_that_trains_deferred() -> None:
    """FSDP copies its shards to real memory before it gathers them, which computes them."""
    mesh = init_device_mesh("cpu", (2,))
    eager, deferred = (shard_layers(module, mesh) for module in build_both(Decoder))
    wanted, found = (losses(module, dist.get_rank()) for module in (eager, deferred))
    assert is_deferred(deferred)
    materialize_module(deferred)
    for loss, wanted_loss in zip(found, wanted, strict=True):
        assert_same_bits(materialize_tensor(loss), wanted_loss, "loss")
    for name, tensor in tensors_of(deferred).items():
        expected = tensors_of(eager)[name]
        assert_has_values(tensor, expected.full_tensor() if isinstance(expected, DTensor) else expected, name)


@program(4)
def fully_shard_hybrid() -> None:
    """Sharded within two groups, each with the whole module."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = check(partial(Decoder, tied=True), partial(shard_layers, mesh=mesh), dist.get_rank())
    assert module.head.weight.placements == (Replicate(), Shard(0))


def fsdp1(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )


@program(4)
def fsdp1_hybrid() -> None:
    """Unlike other engines, FSDP1 materializes a module itself."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from torchext.compat import install_as_torchdistx

    install_as_torchdistx()
    values = values_from(Decoder, 0)
    eager, deferred = build_both(Decoder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module, expected = fsdp1(deferred, mesh), fsdp1(eager, mesh)
    assert not is_deferred(module)
    with FullyShardedDataParallel.summon_full_params(module):
        found = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in tensors_of(module).items()}
        assert found.keys() == values.keys()
        for name, tensor in found.items():
            assert_same_bits(tensor, values[name], name)
    assert_trains_like(module, expected, dist.get_rank())


# Tensor parallelism.


def parallelize(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    """Tensor parallelism with sequence parallelism between the matrices, like torchtitan's plan."""
    layer = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        **{f"layers.*.{name}": style for name, style in layer.items()},
    }
    return parallelize_module(module, mesh, plan, src_data_rank=src_data_rank)


def parallelize_embedding_by_columns(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    plan = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "head": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(module, mesh, plan, src_data_rank=src_data_rank)


def assert_parallelizes(src_data_rank: int | None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for engine in (parallelize, parallelize_embedding_by_columns):
        check(Decoder, partial(engine, mesh=mesh, src_data_rank=src_data_rank))


@program()
def tensor_parallel() -> None:
    assert_parallelizes(src_data_rank=None)


@program()
def tensor_parallel_from_rank_0() -> None:
    assert_parallelizes(src_data_rank=0)


@program()
def tensor_parallel_from_another_rank_0() -> None:
    """Tensors that are not sent keep the process's own values: here a buffer."""
    values = values_from(Decoder, 0)
    values["scale"] = values_from(Decoder, dist.get_rank())["scale"]
    engine = partial(parallelize, mesh=init_device_mesh("cpu", (2,)), src_data_rank=0)
    check(Decoder, engine, construct_from=dist.get_rank(), values=values)


def parallelize_and_shard(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Module:
    parallelize(module, mesh["tensor"], src_data_rank)
    return shard_layers(module, mesh["data"])


def mesh_of_data_and_tensor() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def assert_parallelizes_and_shards(src_data_rank: int | None) -> None:
    mesh = mesh_of_data_and_tensor()
    engine = partial(parallelize_and_shard, mesh=mesh, src_data_rank=src_data_rank)
    module = check(Decoder, engine, mesh.get_local_rank("data"))
    assert module.head.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert module.layers["0"].attention.out.weight.placements == (Shard(0), Shard(1))


@program(4)
def tensor_parallel_and_fully_shard() -> None:
    assert_parallelizes_and_shards(src_data_rank=None)


@program(4)
def tensor_parallel_from_rank_0_and_fully_shard() -> None:
    assert_parallelizes_and_shards(src_data_rank=0)


# Replicated data parallelism.


def data_parallel(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


@program()
def data_parallel_of_materialized() -> None:
    values = values_from(Decoder, 0)
    eager, deferred = build_both(Decoder, seed=dist.get_rank())
    materialize_module(deferred)
    module, expected = data_parallel(deferred), data_parallel(eager)
    assert_module_has_values(module, values)
    assert_trains_like(module, expected, dist.get_rank())


@program()
def data_parallel_of_deferred() -> None:
    check(Decoder, data_parallel, dist.get_rank())
    check(partial(Decoder, tied=True), data_parallel, dist.get_rank())


@program()
def data_parallel_of_deferred_from_another_rank_0() -> None:
    check(Decoder, data_parallel, dist.get_rank(), construct_from=dist.get_rank())


@program()
def data_parallel_without_broadcast() -> None:
    check(Decoder, partial(nn.parallel.DistributedDataParallel, init_sync=False), dist.get_rank())


# Pipelines.


class WithBroken(Decoder):
    """Has a submodule that can no longer be computed once `outside` has changed."""

    def __init__(self, outside: Tensor) -> None:
        super().__init__(layers=4)
        self.unused = BuiltOn(outside)


def cut(module: nn.Module, stage: int) -> list[nn.Module]:
    """Keep one of two stages of a decoder, and return the rest."""
    dropped = [module.layers.pop(name) for name in (["2", "3"] if stage == 0 else ["0", "1"])]
    for name in ["norm", "head", "unused"] if stage == 0 else ["embedding", "unused"]:
        dropped.append(getattr(module, name))
        setattr(module, name, None)
    return dropped


@program()
def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = dist.get_rank()
    outside = too_large_to_copy()
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        eager, deferred = build_both(partial(WithBroken, outside))
        cut(eager, stage)
        dropped = cut(deferred, stage)
        stages = [PipelineStage(module, stage, 2, torch.device("cpu")) for module in (deferred, eager)]
        outside.add_(1)
        materialize_module(deferred)
        assert all(is_deferred(p) for part in dropped for p in part.parameters())
        with pytest.raises(RuntimeError, match="changed"):
            materialize_module(dropped[-1])
        assert_module_has_values(deferred, tensors_of(eager))
        runs = [stage_losses(schedule_class(s, n_microbatches=4, loss_fn=cross_entropy), s.submod) for s in stages]
        for loss, wanted in zip(*runs, strict=True):
            assert_same_bits(loss, wanted, "loss")
        assert_module_has_values(deferred, tensors_of(eager))  # includes the stage without losses


def stage_losses(schedule: Any, module: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    found: list[Tensor] = []
    for _ in range(5):
        tokens, target = batch(0)
        if dist.get_rank() == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=target, losses=found)
        optimizer.step()
        optimizer.zero_grad()
    return found


# Experts.


class Experts(nn.Module):
    """All experts process every token, weighted. A process computes the results of its experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 5))
        self.down = nn.Parameter(torch.empty(count, 5, WIDTH))
        nn.init.xavier_uniform_(self.down)
        self.mesh: DeviceMesh | None = None
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        weights = self.gate(x).softmax(-1)
        if self.mesh is not None:
            x, weights = (
                DTensor.from_local(t, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
                for t in (x, weights)
            )
        weights = weights[..., self.first : self.first + up.size(0)]
        hidden = functional.silu(torch.einsum("btw,ewh->bteh", x, up))
        out = torch.einsum("bteh,ehw,bte->btw", hidden, down, weights)
        return out if self.mesh is None else DTensor.from_local(out, self.mesh, [Partial()]).full_tensor()


class MixtureOfExperts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = Experts(count)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(self.embedding(x)))


def replace_experts(module: nn.Module, mesh: DeviceMesh, part_of: Callable[[nn.Parameter], Tensor]) -> nn.Module:
    experts = module.experts
    chunks = torch.arange(experts.up.size(0)).chunk(mesh.size())
    experts.mesh, experts.first = mesh, int(chunks[mesh.get_local_rank()][0])
    whole = [experts.up, experts.down]
    experts.up, experts.down = (nn.Parameter(part_of(w)) for w in whole)
    return module


def slice_of_rank(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    count = whole.size(0) // mesh.size()
    first = count * mesh.get_local_rank()
    return whole[first : first + count]


@program()
def expert_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))

    build = partial(MixtureOfExperts, 4)
    by_hand = partial(replace_experts, mesh=mesh, part_of=lambda whole: slice_of_rank(whole, mesh).detach().clone())
    values = values_from(build, 0)
    for name in ("experts.up", "experts.down"):
        values[name] = slice_of_rank(values[name], mesh)
    check(build, by_hand, values=values)

    def as_dtensor(whole: Tensor) -> Tensor:
        return DTensor.from_local(slice_of_rank(whole, mesh).detach().clone(), mesh, [Shard(0)])

    check(build, partial(replace_experts, mesh=mesh, part_of=as_dtensor))

    def distributed(whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    check(partial(MixtureOfExperts, 5), partial(replace_experts, mesh=mesh, part_of=distributed))


@program()
def expert_parallel_from_rank_0() -> None:
    mesh = init_device_mesh("cpu", (2,))
    part_of = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    check(partial(MixtureOfExperts, 5), partial(replace_experts, mesh=mesh, part_of=part_of))


@program()
def slices_of_a_deferred_tensor_leave_it_deferred() -> None:
    """A process that needs only its slice never has the whole tensor."""
    mesh = init_device_mesh("cpu", (2,))
    eager, deferred = build_both(partial(torch.randn, 4, 3, 5))
    part = slice_of_rank(deferred, mesh).clone()
    shard = distribute_tensor(deferred, mesh, [Shard(0)], src_data_rank=None)
    for tensor in (part, shard):
        materialize_tensor(tensor)
    assert is_deferred(deferred)
    assert_same_bits(part, slice_of_rank(eager, mesh), "part")
    assert_has_values(shard, eager, "shard")


# Distributed tensors.

ON_A_LINE: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
ON_A_GRID: list[list[Placement]] = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(1)],
    [_StridedShard(0, split_factor=2), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
]


def matrix() -> Tensor:
    """Return a matrix with an even and an uneven size: PyTorch does not scatter strided shards unevenly."""
    return torch.randn(8, 5).mul_(3)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))


def assert_distributes(
    mesh: DeviceMesh, placements: list[Placement], src_data_rank: int | None, construct_from: int | None = None
) -> None:
    torch.manual_seed(0)
    whole = matrix()
    eager, deferred = build_both(matrix, construct_from or 0)
    wanted = distribute_tensor(eager, mesh, placements, src_data_rank=src_data_rank)
    found = distribute_tensor(deferred, mesh, placements, src_data_rank=src_data_rank)
    assert is_deferred(found) == (construct_from is None)  # nothing is sent if all processes have equal recordings
    materialize_tensor(found)
    assert_has_values(found, whole, str(placements))
    assert found.to_local().stride() == wanted.to_local().stride()
    materialize_tensor(deferred)
    assert_same_bits(deferred, eager, "what was distributed")  # a broadcast writes it


def assert_all_distribute(mesh: DeviceMesh, src_data_rank: int | None, construct_from: int | None = None) -> None:
    for placements in ON_A_LINE if mesh.ndim == 1 else ON_A_GRID:
        assert_distributes(mesh, placements, src_data_rank, construct_from)


@program(4)
def distributed_tensors() -> None:
    assert_all_distribute(init_device_mesh("cpu", (4,)), src_data_rank=None)
    assert_all_distribute(grid(), src_data_rank=None)


@program(4)
def distributed_tensors_from_rank_0() -> None:
    assert_all_distribute(init_device_mesh("cpu", (4,)), src_data_rank=0)
    assert_all_distribute(grid(), src_data_rank=0)


@program(4)
def distributed_tensors_from_another_rank_0() -> None:
    assert_all_distribute(init_device_mesh("cpu", (4,)), src_data_rank=0, construct_from=dist.get_rank())
    assert_all_distribute(grid(), src_data_rank=0, construct_from=dist.get_rank())


@program()
def distribution_of_real_and_deferred_tensors() -> None:
    recording.PATIENCE = timedelta(seconds=1)
    mesh = init_device_mesh("cpu", (2,))
    for placements in ON_A_LINE * 2:
        torch.manual_seed(dist.get_rank())
        mine = matrix() if dist.get_rank() == 0 else deferred_init(matrix)
        found = distribute_tensor(mine, mesh, placements)
        torch.manual_seed(0)
        assert_has_values(found, matrix(), str(placements))


def sharded_two(initialize: Callable[[nn.Sequential], object], seed: int = 0) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Sequential:
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        initialize(module)
        return module

    torch.manual_seed(seed)
    with deferred_init(trace=True):
        module = build()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


REAL = torch.ones(3)


@program()
def ranks_that_are_compared() -> None:
    rank = dist.get_rank()
    module = sharded_two(lambda module: nn.init.normal_(module[1].weight[1:]))
    materialize_module(module, check_ranks=True)
    assert not is_deferred(module)
    materialize_module(module, check_ranks=True)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    materialize_module(sharded_two(nn.Module.float, seed=rank), check_ranks=alone)

    others: dict[str, Callable[[], nn.Module]] = {
        r"`0.weight` comes from aten::uniform_ of \[7, 5\] at .* other random numbers": lambda: sharded_two(
            nn.Module.float, seed=rank
        ),
        r"`1.weight` comes from aten::normal_ of \[3, 7\] at .*engine_programs.py.* in rank 1, .*": lambda: sharded_two(
            lambda module: module[1].weight.data.normal_(0, 1 + rank)
        ),
        r"`1.bias` comes from nothing in rank 0 of the group, but from a real tensor .* in rank 1": lambda: sharded_two(
            lambda module: module[1].bias.data.add_(REAL) if rank == 1 else None
        ),
        r"`1.extra` is deferred in rank 1 of the group, and not in rank 0": lambda: sharded_two(
            lambda module: module[1].register_buffer("extra", torch.zeros(2)) if rank == 1 else None
        ),
    }
    for message, build in others.items():
        module = build()
        with pytest.raises(RanksDifferError, match=message):
            materialize_module(module, check_ranks=True)
        assert all(is_deferred(parameter) for parameter in module.parameters())


@program(3)
def ranks_without_elements_that_are_compared() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (3,))
    for sizes in [(4, 1), (1, 4), (5, 7), (0, 3)]:  # none or fewer elements in the last rank
        torch.manual_seed(0)
        module = deferred_init(nn.Linear, *sizes)
        fully_shard(module, mesh=mesh)
        materialize_module(module, check_ranks=True)
        assert not is_deferred(module)
    torch.manual_seed(dist.get_rank())
    module = deferred_init(nn.Linear, 4, 2)
    fully_shard(module, mesh=mesh)
    with pytest.raises(RanksDifferError, match=r"`weight` comes from .* in rank 0 of the group, but .* in rank 1"):
        materialize_module(module, check_ranks=True)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))


def distribute(module: nn.Module, mesh: DeviceMesh, partition: Callable[..., None] | None) -> nn.Module:
    return distribute_module(
        module,
        mesh,
        partition,
        lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs),
        lambda _, output, mesh: output.redistribute(placements=[Replicate()]).to_local(),
    )


def shard_parameters(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    dim = 1 if isinstance(module, nn.Embedding) else 0
    for key, parameter in module.named_parameters(recurse=False):
        shard = distribute_tensor(parameter, mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(shard))


@program()
def distributed_module() -> None:
    check(perceptron, partial(distribute, mesh=init_device_mesh("cpu", (2,)), partition=shard_parameters))


@program()
def distributed_module_from_rank_0() -> None:
    check(perceptron, partial(distribute, mesh=init_device_mesh("cpu", (2,)), partition=None))


def assert_redistributes(
    mesh: DeviceMesh, start: list[Placement], use: Callable[[DTensor], Tensor], stays_deferred: bool = False
) -> None:
    found, wanted = (
        use(distribute_tensor(tensor, mesh, start, src_data_rank=None)) for tensor in reversed(build_both(matrix))
    )
    assert is_deferred(found) or not stays_deferred
    materialize_tensor(found)
    if isinstance(wanted, DTensor):
        assert found.placements == wanted.placements
        found, wanted = found.to_local(), wanted.to_local()
    assert_same_bits(found, wanted, str(start))


def redistributed(placements: list[Placement]) -> Callable[[DTensor], Tensor]:
    return lambda tensor: tensor.redistribute(placements=placements)


@program(4)
def redistribution_without_communication() -> None:
    for placements in ON_A_LINE:
        assert_redistributes(init_device_mesh("cpu", (4,)), [Replicate()], redistributed(placements), True)
    for placements in ON_A_GRID:
        if not isinstance(placements[0], _StridedShard):
            assert_redistributes(grid(), [Replicate(), Replicate()], redistributed(placements), True)


@program(4)
def redistribution() -> None:
    for start in ON_A_LINE:
        for placements in ON_A_LINE:
            assert_redistributes(init_device_mesh("cpu", (4,)), start, redistributed(placements))
    for start in ON_A_GRID:
        assert_redistributes(grid(), start, redistributed([Replicate(), Replicate()]))


@program(4)
def full_tensors() -> None:
    for start in ON_A_LINE:
        assert_redistributes(init_device_mesh("cpu", (4,)), start, DTensor.full_tensor)
        assert_redistributes(init_device_mesh("cpu", (4,)), start, lambda tensor: tensor.sum(0).full_tensor())
    for start in ON_A_GRID:
        assert_redistributes(grid(), start, DTensor.full_tensor)


# State dicts.


def assert_loads_and_saves(build: Build, engine: Engine) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    other = values_from(build, 17)
    for from_rank_0 in (False, True):
        module = engine(build_both(build)[1])
        given = {} if from_rank_0 and dist.get_rank() > 0 else {name: t.detach().clone() for name, t in other.items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        set_model_state_dict(module, given, options=options)
        assert is_deferred(module)
        materialize_module(module)
        assert_module_has_values(module, other)

    values = values_from(build, 0)
    module = engine(build_both(build)[1])
    shards = get_model_state_dict(module)
    assert all(is_deferred(tensor) for tensor in shards.values())
    materialize_module(module)
    for name, tensor in shards.items():
        assert_has_values(tensor, values[name], name)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    assert whole.keys() == values.keys()
    for name, tensor in whole.items():
        assert_same_bits(tensor, values[name], name)

    module = engine(build_both(build)[1])
    set_model_state_dict(module, shards)
    materialize_module(module)
    assert_module_has_values(module, values)


@program()
def state_dicts_of_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert_loads_and_saves(Decoder, partial(parallelize, mesh=mesh, src_data_rank=None))


@program(4)
def state_dicts_of_tensor_parallel_and_fully_shard() -> None:
    """Even sizes, because PyTorch does not scatter uneven strided shards."""
    engine = partial(parallelize_and_shard, mesh=mesh_of_data_and_tensor(), src_data_rank=None)
    assert_loads_and_saves(partial(Decoder, hidden=12, vocabulary=16), engine)


@program()
def full_state_dicts_of_deferred() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    values = values_from(Decoder, 0)
    module = shard_layers(build_both(Decoder)[1], init_device_mesh("cpu", (2,)))
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    for name, tensor in whole.items():
        materialize_tensor(tensor)
        assert_same_bits(tensor, values[name], name)


if __name__ == "__main__":
    main()
