"""PyTorch's engines of parallelism, applied to a module as a training program does, and its initialization."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..descriptions import ENGINES

__all__ = ["Plan", "apply_engine", "check_engine", "initialize_meta"]

TENSOR_PARALLEL = "tp"
"""The name of the mesh dimension of tensor parallelism."""

Plan = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] | None


def check_engine(engine: str, names: Sequence[str]) -> None:
    """Check that an engine exists and can use a mesh with dimensions of these names.

    Raises:
        ValueError: It cannot.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    counts, needs = ENGINES[engine]
    if counts and len(_split(engine, names)[1]) not in counts:
        raise ValueError(f"the engine {engine} needs {needs} besides `tp`, but the mesh has {', '.join(names)}")


def _split(engine: str, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the mesh dimension of tensor parallelism, and the others."""
    tensor_dim = names[0] if engine == "tp" and len(names) == 1 else TENSOR_PARALLEL
    return tensor_dim if tensor_dim in names else None, [name for name in names if name != tensor_dim]


def apply_engine(module: nn.Module, mesh: DeviceMesh, engine: str, plan: Plan) -> nn.Module:
    """Return `module` sharded or replicated on `mesh`.

    Args:
        module: A module: real, deferred or on the device `meta`.
        mesh: A mesh for which `check_engine` raises no error.
        engine: One of `ENGINES`.
        plan: The plan of tensor parallelism: a dict for `parallelize_module()`, or a function that returns it for the
            module. Default: `module.tp_plan`, as models of transformers have it.

    Raises:
        ValueError: There is no plan, or it has a style of transformers without an equal in PyTorch.
    """
    if engine == "none":
        return module
    tensor_dim, others = _split(engine, mesh.mesh_dim_names or ())
    if tensor_dim is not None:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh[tensor_dim], _styles(plan(module) if callable(plan) else plan, module))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(module, process_group=mesh[others[0]].get_group())
    if others:
        _shard(module, mesh[others[0]] if len(others) == 1 else mesh[tuple(others)])
    return module


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the entries of the outermost module lists, then to the root."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _blocks(parent: nn.Module) -> Iterator[nn.Module]:
    lists = (nn.ModuleList, nn.ModuleDict)
    for child in parent.children():
        if isinstance(parent, lists) and not isinstance(child, lists):
            yield child
        else:
            yield from _blocks(child)


def _styles(plan: Mapping[str, Any] | None, module: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found = plan if plan is not None else getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not found:
        raise ValueError(
            f"Tensor parallelism of {type(module).__name__} needs a plan: pass `plan`, a dict for parallelize_module()."
        )
    known: dict[str, Callable[[], Any]] = {
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


def initialize_meta(module: nn.Module, initialize: Callable[[nn.Module], object] | None, *, filler: int = 0) -> None:
    """Give the tensors of `module` that are on the device `meta` memory on the CPU, and initialize them.

    Args:
        module: The sharded module. If it has no such tensors, only a given `initialize` is called.
        initialize: A function for the module. Default: its method `init_weights()`, or the method
            `reset_parameters()` of each of its submodules.
        filler: The value that they have before they are initialized.

    Raises:
        ValueError: A submodule with parameters or buffers has no such method.
    """
    method: Any = getattr(module, "init_weights", None)
    has_meta = any(one.is_meta for one in chain(module.parameters(), module.buffers()))
    if has_meta:
        module.to_empty(device="cpu")
    with torch.no_grad():
        for one in chain(module.parameters(), module.buffers()) if has_meta else ():
            one.fill_(filler)
        if initialize is not None:
            initialize(module)
        elif has_meta and _takes_nothing(method):
            method()
        elif has_meta:
            for name, part in module.named_modules():
                reset: Any = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False))):
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
