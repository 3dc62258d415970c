"""Applies PyTorch's engines of parallelism to a module, as a training program does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ENGINES", "apply_engine", "initialize_meta"]

ENGINES = ("fsdp2", "hsdp", "tp", "ddp", "none")
TENSOR_PARALLEL = "tp"
"""The name of the mesh dimension of tensor parallelism."""

Plan = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] | None


def apply_engine(module: nn.Module, mesh: DeviceMesh, engine: str, plan: Plan) -> nn.Module:
    """Return `module` sharded or replicated on `mesh`.

    Args:
        module: A module: real, deferred or on the device `meta`.
        mesh: Tensor parallelism uses the dimension `tp`, or the only one for the engine `tp`. The engine uses the
            others.
        engine: One of `ENGINES`.
        plan: The plan of tensor parallelism: a dict for `parallelize_module()`, or a function that returns it for the
            module. Default: `module.tp_plan`, as models of transformers have it.

    Raises:
        ValueError: The mesh has the wrong dimensions for the engine, or there is no plan that PyTorch can apply.
    """
    names = list(mesh.mesh_dim_names or ())
    if engine == "none":
        return module
    is_only_one = engine == "tp" and len(names) == 1
    tensor_dim = names[0] if is_only_one else TENSOR_PARALLEL
    others = [name for name in names if name != tensor_dim]
    _check_dimensions(engine, names, others, tensor_dim)
    if tensor_dim in names:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh[tensor_dim], _styles(plan(module) if callable(plan) else plan, module))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(module, process_group=mesh[others[0]].get_group())
    if engine != "tp":
        _shard(module, mesh[others[0]] if len(others) == 1 else mesh[tuple(others)])
    return module


def _check_dimensions(engine: str, names: list[str], others: list[str], tensor_dim: str) -> None:
    expected = {"fsdp2": (1, 2), "hsdp": (2,), "tp": (0,), "ddp": (1,)}[engine]
    if len(others) not in expected or (engine == "tp" and tensor_dim not in names):
        needs = {
            "fsdp2": "one dimension to shard, or one to replicate and one to shard,",
            "ddp": "one dimension",
            "hsdp": "one dimension to replicate and one to shard",
            "tp": "no dimension",
        }[engine]
        raise ValueError(f"The engine {engine} needs {needs} besides `tp`, but the mesh has {', '.join(names)}.")


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the entries of the outermost module lists, then to the root."""
    from torch.distributed.fsdp import fully_shard

    def shard_blocks(parent: nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                for block in child.children():
                    fully_shard(block, mesh=mesh)
            else:
                shard_blocks(child)

    shard_blocks(module)
    fully_shard(module, mesh=mesh)


def _styles(plan: Mapping[str, Any] | None, module: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found = plan if plan is not None else getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not found:
        raise ValueError(
            f"Tensor parallelism of {type(module).__name__} needs a plan: pass `plan`, a dict for parallelize_module()."
        )
    known = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    for name, style in found.items():
        if isinstance(style, str) and style not in known:
            raise ValueError(
                f"The plan of {type(module).__name__} has the style {style!r} for `{name}`, which has no equal in "
                "torch.distributed.tensor.parallel: pass `plan`, or shard the module in the function."
            )
    return {name: known[style]() if isinstance(style, str) else style for name, style in found.items()}


def initialize_meta(module: nn.Module, initialize: Callable[[nn.Module], object] | None) -> None:
    """Give the tensors of `module` that are on the device `meta` memory on the CPU, and initialize them.

    Args:
        module: The sharded module. If it has no such tensors, only a given `initialize` is called.
        initialize: A function for the module. Default: its method `init_weights()`, or the method
            `reset_parameters()` of each of its submodules.

    Raises:
        ValueError: A submodule has parameters of its own, but no such method.
    """
    has_meta = any(one.is_meta for one in (*module.parameters(), *module.buffers()))
    if has_meta:
        module.to_empty(device="cpu")
    with torch.no_grad():
        if initialize is not None:
            initialize(module)
        elif has_meta and _takes_nothing(method := getattr(module, "init_weights", None)):
            method()
        elif has_meta:
            for name, part in module.named_modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
                elif next(part.parameters(recurse=False), None) is not None:
                    raise ValueError(
                        f"`{name}` ({type(part).__name__}) is on the meta device and has no reset_parameters(): pass "
                        "`initialize`, a function that initializes the sharded module."
                    )


def _takes_nothing(method: Any) -> bool:
    if not callable(method):
        return False
    return all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        for one in inspect.signature(method).parameters.values()
    )
