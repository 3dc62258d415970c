"""`torch.nn.parallel.comm.scatter()` on fake CUDA devices, by operators, as comm.cpp of a CUDA build does it.

`DataParallel` begins with it, also on one device, and a build for CPUs does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.cuda._utils import _get_device_index
from torch.nn.parallel import comm

from ..tools.leases import Lease

__all__ = ["patch_comm"]


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


def patch_comm(lease: Lease, answering: Callable[..., Any]) -> None:
    """Declares what answers for the fake devices.

    Args:
        lease: Is held while there are such devices.
        answering: Given the original and `answer`, chooses between them by what the thread sees.
    """
    make = partial(answering, answer=_scatter)
    lease.patch(comm, "scatter", make, "calls a function that a build for CPUs does not have", is_traced=True)
