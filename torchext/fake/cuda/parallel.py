"""`torch.nn.parallel.comm` on fake CUDA devices, composed of operators like comm.cpp of a CUDA build.

`DataParallel` calls it, even for one device. A build for CPUs does not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.cuda._utils import _get_device_index
from torch.nn.parallel import comm

from ... import _C
from ...internals.patching import Function
from .answers import answers, while_devices_exist

__all__: list[str] = []


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[Any] | None = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    if out is not None:
        return _scatter_out(tensor, out, devices, chunk_sizes, dim)
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got len(devices) = "
            f"{len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    made = []
    for i, (chunk, device) in enumerate(zip(chunks, devices, strict=False)):  # there may be fewer chunks
        stream = streams[i] if streams is not None and i < len(streams) else None
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            made.append(chunk.to(torch.device("cuda", _get_device_index(device)), non_blocking=True))
    return tuple(made)


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], devices: object, chunk_sizes: object, dim: int
) -> tuple[torch.Tensor, ...]:
    for name, value in (("devices", devices), ("chunk_sizes", chunk_sizes)):
        if value is not None:
            raise RuntimeError(f"'{name}' must not be specified when 'out' is specified, but got {name}={value}")
    for part, chunk in zip(out, tensor.split([part.shape[dim] for part in out], dim), strict=True):
        part.copy_(chunk, non_blocking=True)
    return tuple(out)


def _broadcast(
    tensor: torch.Tensor, devices: Sequence[Any] | None = None, *, out: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    if out is not None:
        for other in out:
            other.copy_(tensor, non_blocking=True)
        return tuple(out)
    return tuple(tensor.to(_cuda(device), non_blocking=True) for device in devices or ())


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = 10485760
) -> list[list[torch.Tensor]]:
    first = _cuda(devices[0])
    if any(tensor.device != first for tensor in tensors):
        raise RuntimeError("All tensors must be on devices[0]: " + str(first.index))
    return [list(tensors), *([tensor.to(_cuda(device)) for tensor in tensors] for device in devices[1:])]


def _gather(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    destination: Any = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if out is not None and destination is not None:
        raise RuntimeError(
            f"'destination' must not be specified when 'out' is specified, but got destination={destination}"
        )
    if out is not None:
        for part, tensor in zip(out.split([tensor.shape[dim] for tensor in tensors], dim), tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        return out
    index = _get_device_index(destination, allow_cpu=True, optional=True)
    device = torch.device("cpu") if index == -1 else torch.device("cuda", index)
    return torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors], dim)


def _cuda(device: Any) -> torch.device:
    return torch.device("cuda", _get_device_index(device))


answers(
    comm,
    {
        "broadcast": _broadcast,
        "broadcast_coalesced": _broadcast_coalesced,
        "gather": _gather,
        "scatter": _scatter,
    },
    reason="calls a function that CPU builds do not have",
    is_traced=True,
)
# `comm.reduce_add()` adds the gradients of replicas, with operators where NCCL is unavailable.
answers(
    torch.cuda.nccl,
    {"is_available": lambda tensors: False},
    reason="would reduce by NCCL, which reads memory",
    is_traced=True,
)


# By name, because the attribute of the package is the function.
@while_devices_exist.replaces(
    "torch.nn.parallel.parallel_apply", "parallel_apply", reason="calls the replicas on new threads"
)
def _parallel_apply(
    original: Function,
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Any] | None = None,
    devices: Any = None,
) -> Any:
    """Run the replicas on this thread, which has the fake devices, instead of new threads."""
    count = len(modules)
    parts = [None if part is None else list(part) for part in (kwargs_tup, devices)]
    are_wrong = len(inputs) != count or any(part is not None and len(part) != count for part in parts)
    if not _C.fake_cuda_devices() or are_wrong:
        return original(modules, inputs, kwargs_tup, devices)
    outputs = []
    for i in range(count):
        one = [None if part is None else [part[i]] for part in parts]
        outputs += original([modules[i]], [inputs[i]], *one)
    return outputs
