"""Training steps with PyTorch's parallel engines, for `test_engines.py`: each trains a small model for a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
)
from torch.distributed.pipelining import pipeline as trace_pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from torchext.dry_run import World

Step: TypeAlias = Callable[[World, str], nn.Module]

VOCABULARY, WIDTH, HEADS, HIDDEN, SEQUENCE, BATCH = 64, 64, 8, 128, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Use the layers that a pipeline stage has kept."""
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


def tokens(device: str) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), device=device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(model: nn.Module, device: str, clip: bool = True, **kwargs: Any) -> nn.Module:
    """Run a step, and the forward pass of the next."""
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    for _ in range(2):
        batch = tokens(device)
        cross_entropy(model(batch), batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def shard(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def fsdp2(world: World, device: str, optimizer: dict[str, Any] | None = None, **kwargs: Any) -> nn.Module:
    mesh = init_device_mesh(device, (world.size,), mesh_dim_names=("dp",))
    model = Llama().to("cpu" if "offload_policy" in kwargs else device)
    return train(shard(model, mesh, **kwargs), device, **optimizer or {})


def fsdp2_without_mesh(world: World, device: str) -> nn.Module:
    model = Llama().to(device)
    for layer in model.layers.values():
        fully_shard(layer)
    return train(fully_shard(model), device)


def fsdp2_from_meta(world: World, device: str) -> nn.Module:
    with torch.device("meta"):
        model = Llama()
    shard(model, init_device_mesh(device, (world.size,)))
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return train(model, device)


def fsdp2_with_prefetch(world: World, device: str) -> nn.Module:
    model = Llama(3).to(device)
    shard(model, init_device_mesh(device, (world.size,)))
    layers = list(model.layers.values())
    for this, following in pairwise(layers):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    model.set_requires_gradient_sync(False)
    batch = tokens(device)
    model(batch).sum().backward()
    model.set_requires_gradient_sync(True)
    return train(model, device)


def fsdp2_with_checkpointing(world: World, device: str) -> nn.Module:
    model = Llama()
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer)
    return train(shard(model.to(device), init_device_mesh(device, (world.size,))), device)


def hsdp(world: World, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (world.size // 4, 4), mesh_dim_names=("replicate", "shard"))
    return train(shard(Llama().to(device), mesh), device)


def fsdp1(world: World, device: str, **kwargs: Any) -> nn.Module:
    model = Llama() if kwargs.get("cpu_offload") else Llama().to(device)
    for name, layer in model.layers.items():
        model.layers[name] = FullyShardedDataParallel(layer, device_id=_device_id(device), **kwargs)
    wrapped = FullyShardedDataParallel(model, device_id=_device_id(device), **kwargs)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for _ in range(2):
        batch = tokens(device)
        cross_entropy(wrapped(batch), batch).backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


def _device_id(device: str) -> torch.device:
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def ddp(world: World, device: str, no_sync: bool = False, **kwargs: Any) -> nn.Module:
    parallel = DistributedDataParallel(Llama().to(device), **kwargs)
    if no_sync:
        with parallel.no_sync():
            parallel(tokens(device)).sum().backward()
    return train(parallel, device)


def ddp_with_hook(world: World, device: str) -> nn.Module:
    parallel = DistributedDataParallel(Llama().to(device))
    parallel.register_comm_hook(None, bf16_compress_hook if device == "cuda" else fp16_compress_hook)
    return train(parallel, device)


def ddp_with_mixed_precision(
    world: World, device: str, reduce_dtype: torch.dtype | None = None, **kwargs: Any
) -> nn.Module:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    parallel = DistributedDataParallel(Llama().to(device), mixed_precision=precision, **kwargs)
    return train(parallel, device)


def tensor_parallel_plan(model: Llama, sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for i in model.layers:
        plan |= {f"layers.{i}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {f"layers.{i}.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        layouts = {"output_layouts": Shard(1)} if sequence else {}
        plan[f"layers.{i}.attention.out"] = RowwiseParallel(**layouts)
        plan[f"layers.{i}.feed_forward.down"] = RowwiseParallel(**layouts)
        if sequence:
            plan[f"layers.{i}.attention_norm"] = plan[f"layers.{i}.feed_forward_norm"] = SequenceParallel()
            gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            plan[f"layers.{i}.attention"] = plan[f"layers.{i}.feed_forward"] = PrepareModuleInput(**gather)
    if sequence:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return plan


def tensor_parallel(world: World, device: str, sequence: bool = False) -> nn.Module:
    mesh = init_device_mesh(device, (world.size // 8, 8), mesh_dim_names=("dp", "tp"))
    model = Llama().to(device)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, sequence))
    return train(model, device, clip=False, foreach=False)


def tensor_parallel_loss(world: World, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (world.size // 8, 8), mesh_dim_names=("dp", "tp"))
    model = Llama().to(device)
    plan = tensor_parallel_plan(model, True)
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with loss_parallel():
        batch = tokens(device)
        loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
    optimizer.step()
    return model


def tensor_parallel_and_fsdp2(world: World, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (world.size // 8, 8), mesh_dim_names=("dp", "tp"))
    model = Llama().to(device)
    plan = tensor_parallel_plan(model, True)
    parallelize_module(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(model, mesh["dp"], mp_policy=policy), device)


def stages_of(
    world: World, device: str, pp: int, per_rank: int = 1, mesh: DeviceMesh | None = None, is_v_shaped: bool = False
) -> list[Any]:
    rank = world.rank % pp if mesh is None else mesh.get_local_rank()
    group = None if mesh is None else mesh.get_group()
    count = pp * per_rank
    hidden = torch.empty(1, SEQUENCE, WIDTH, device="meta", requires_grad=True)
    ids = torch.empty(1, SEQUENCE, dtype=torch.int64, device="meta")
    logits = torch.empty(1, SEQUENCE, VOCABULARY, device="meta", requires_grad=True)
    stages = []
    for index in (rank, count - 1 - rank) if is_v_shaped else range(rank, count, pp):
        model = Llama(count)
        model.layers = nn.ModuleDict({str(index): model.layers[str(index)]})
        if index > 0:
            model.embedding = None
        if index < count - 1:
            model.norm = model.head = None
        is_first, is_last = index == 0, index == count - 1
        stages.append(
            PipelineStage(
                model.to(device),
                index,
                count,
                torch.device(device),
                input_args=(ids if is_first else hidden,),
                output_args=(logits if is_last else hidden,),
                group=group,
            )
        )
    return stages


def pipeline(world: World, device: str, schedule: Any, per_rank: int = 1, is_v_shaped: bool = False) -> nn.Module:
    mesh = init_device_mesh(device, (world.size // 4, 4), mesh_dim_names=("dp", "pp"))
    stages = stages_of(world, device, 4, per_rank, mesh["pp"], is_v_shaped)
    return run_schedule(schedule, stages, mesh["pp"], device)


def traced_pipeline(world: World, device: str) -> nn.Module:
    """PyTorch splits the model into stages, and moves the rank's stage to its device."""
    mesh = init_device_mesh(device, (world.size // 4, 4), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[FeedForward() for _ in range(4)])
    model.append(nn.Linear(WIDTH, VOCABULARY))
    starts = {str(index): SplitPoint.BEGINNING for index in (2, 3, 4)}
    pipe = trace_pipeline(model, mb_args=(tokens("cpu")[:1],), split_spec=starts)
    stage = pipe.build_stage(mesh["pp"].get_local_rank(), torch.device(device), mesh["pp"].get_group())
    return run_schedule(ScheduleGPipe, [stage], mesh["pp"], device)


def run_schedule(schedule: Any, stages: list[Any], mesh: DeviceMesh, device: str) -> nn.Module:
    modules = nn.ModuleList(stage.submod for stage in stages)
    given = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
    running = schedule(given, n_microbatches=BATCH, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(modules.parameters())
    batch = tokens(device)
    args = (batch,) if any(stage.is_first for stage in stages) else ()
    kwargs = {"target": batch, "losses": []} if any(stage.is_last for stage in stages) else {}
    running.step(*args, **kwargs)
    optimizer.step()
    return modules


def three_dimensions(world: World, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (2, world.size // 8, 4), mesh_dim_names=("pp", "dp", "tp"))
    stages = stages_of(world, device, 2, 1, mesh["pp"])
    for stage in stages:
        model = stage.submod
        plan = {k: v for k, v in tensor_parallel_plan(model, False).items() if k.split(".")[1] in model.layers}
        parallelize_module(model, mesh["tp"], plan)
        shard(model, mesh["dp"], reshard_after_forward=False)
    return run_schedule(Schedule1F1B, stages, mesh["pp"], device)


def expert_parallel(world: World, device: str) -> nn.Module:
    """Tokens are sent to the experts of all ranks and back."""
    model = nn.ModuleDict({"router": nn.Linear(WIDTH, world.size), "expert": FeedForward()}).to(device)
    x = torch.randn(BATCH * world.size, WIDTH, device=device)
    sent = x * model["router"](x).max(-1, keepdim=True).values
    received = all_to_all_single_autograd(sent, None, None, dist.group.WORLD)
    returned = all_to_all_single_autograd(model["expert"](received), None, None, dist.group.WORLD)
    returned.sum().backward()
    torch.optim.AdamW(model.parameters(), foreach=True).step()
    return model


def recomputing(world: World, device: str) -> nn.Module:
    parallel = DistributedDataParallel(nn.Sequential(Checkpointed(), nn.Linear(WIDTH, 1)).to(device), static_graph=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(torch.ones(2, WIDTH, device=device)).sum().backward()
    optimizer.step()
    return parallel


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def with_grad_scaler(world: World, device: str) -> nn.Module:
    model = DistributedDataParallel(Llama().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device)
    batch = tokens(device)
    with torch.autocast(device, torch.float16):
        loss = cross_entropy(model(batch), batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return model


def context_parallel_attention(world: World, device: str) -> nn.Module:
    """Each rank has a part of the sequence, and gathers the keys and values of the others."""
    mesh = init_device_mesh(device, (world.size,), mesh_dim_names=("cp",))
    model = nn.Linear(WIDTH, 3 * WIDTH).to(device, torch.bfloat16)
    x = torch.randn(BATCH, 2 * world.size, WIDTH, device=device, dtype=torch.bfloat16)
    with context_parallel(mesh, buffers=(x,), buffer_seq_dims=(1,), no_restore_buffers={x}):
        assert x.shape[1] == 2
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in model(x).chunk(3, -1))
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    return model


def synchronized_batch_norm(world: World, device: str) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers).to(device))
    model(torch.randn(2, 3, 8, 8, device=device)).sum().backward()
    assert model.module[1].weight.grad is not None
    return model


def zero_redundancy(world: World, device: str) -> nn.Module:
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(world.size)]).to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model(torch.randn(2, WIDTH, device=device)).sum().backward()
    optimizer.step()
    return model


def initialized_when_sharded(world: World, device: str) -> nn.Module:
    """Like torchtitan: on the meta device, then sharded, then initialized."""
    with torch.device("meta"):
        model = nn.Linear(WIDTH, WIDTH)
    fully_shard(model, mesh=init_device_mesh(device, (world.size,)))
    model.to_empty(device=device)
    nn.init.trunc_normal_(model.weight, std=0.02)
    nn.init.kaiming_uniform_(model.weight)
    nn.init.zeros_(model.bias)
    model(torch.randn(2, WIDTH, device=device)).sum().backward()
    return model


def loaded_from_rank_0(world: World, device: str) -> nn.Module:
    model = nn.Sequential(FeedForward(), FeedForward()).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (world.size,)))
    whole = {}
    if world.rank == 0:
        whole = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    model(torch.randn(2, WIDTH, device=device)).sum().backward()
    assert get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

STEPS: dict[str, Step] = {
    "fsdp2": fsdp2,
    "fsdp2_mixed": partial(fsdp2, mp_policy=BF16),
    "fsdp2_no_reshard": partial(fsdp2, reshard_after_forward=False),
    "fsdp2_reshard_to_4": partial(fsdp2, reshard_after_forward=4),
    "fsdp2_fused": partial(fsdp2, optimizer={"fused": True}),
    "fsdp2_loop": partial(fsdp2, optimizer={"foreach": False}),
    "fsdp2_offload": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2_offload_pinned": partial(fsdp2, offload_policy=CPUOffloadPolicy()),
    "fsdp2_without_mesh": fsdp2_without_mesh,
    "fsdp2_from_meta": fsdp2_from_meta,
    "fsdp2_prefetch": fsdp2_with_prefetch,
    "fsdp2_checkpointing": fsdp2_with_checkpointing,
    "hsdp": hsdp,
    "fsdp1": partial(fsdp1, use_orig_params=True),
    "fsdp1_flat": fsdp1,
    "fsdp1_sync": partial(fsdp1, sync_module_states=True),
    "fsdp1_offload": partial(fsdp1, cpu_offload=CPUOffload(offload_params=True)),
    "fsdp1_grad_op": partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "ddp": ddp,
    "ddp_no_sync": partial(ddp, no_sync=True),
    "ddp_static": partial(ddp, static_graph=True),
    "ddp_unused": partial(ddp, find_unused_parameters=True),
    "ddp_view": partial(ddp, gradient_as_bucket_view=True),
    "ddp_hook": ddp_with_hook,
    "ddp_mixed": ddp_with_mixed_precision,
    "ddp_mixed_float32": partial(ddp_with_mixed_precision, reduce_dtype=torch.float32),
    "ddp_mixed_views": partial(ddp_with_mixed_precision, gradient_as_bucket_view=True),
    "ddp_mixed_static_views": partial(
        ddp_with_mixed_precision, reduce_dtype=torch.float32, static_graph=True, gradient_as_bucket_view=True
    ),
    "ddp_recomputing": recomputing,
    "grad_scaler": with_grad_scaler,
    "tp": tensor_parallel,
    "tp_sequence": partial(tensor_parallel, sequence=True),
    "tp_loss": tensor_parallel_loss,
    "tp_fsdp2": tensor_parallel_and_fsdp2,
    "gpipe": partial(pipeline, schedule=ScheduleGPipe),
    "1f1b": partial(pipeline, schedule=Schedule1F1B),
    "interleaved": partial(pipeline, schedule=ScheduleInterleaved1F1B, per_rank=2),
    "zero_bubble": partial(pipeline, schedule=ScheduleInterleavedZeroBubble, per_rank=2),
    "zero_bubble_v": partial(pipeline, schedule=ScheduleZBVZeroBubble, per_rank=2, is_v_shaped=True),
    "traced_pipeline": traced_pipeline,
    "pp_dp_tp": three_dimensions,
    "expert_parallel": expert_parallel,
    "context_parallel": context_parallel_attention,
    "sync_batch_norm": synchronized_batch_norm,
    "zero_redundancy": zero_redundancy,
    "initialized_when_sharded": initialized_when_sharded,
    "loaded_from_rank_0": loaded_from_rank_0,
}
