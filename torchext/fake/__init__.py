"""Fake tensors: run a program for any device on any machine, without memory for the values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..descriptions import FakeGPU, PeakRates
from ..errors import DataDependentError, UnsupportedOperatorError
from ..internals.arguments import renamed_keywords, renamed_names
from ..internals.calls import Block
from ..internals.document import Document, Table
from ..internals.leases import while_fakes_live

# Most of these modules declare patches.
from . import fake_tensor_mode, higher_order, meta_overrides, python_functions, storage_patches, tensor_patches  # noqa: F401
from .copying import FakeCopy
from .cuda import compiler as compiler
from .cuda import functions
from .cuda.libraries import skip_triton_launches
from .fake_tensor_mode import fakes_on_this_thread, inherit_blocks, threads_inherit_blocks

__all__ = [
    "CacheInfo",
    "DataDependentError",
    "FakeGPU",
    "PeakRates",
    "UnsupportedOperatorError",
    "cache_clear",
    "cache_info",
    "fake_like",
    "fake_mode",
    "inherit_blocks",
    "is_fake",
    "meta_like",
    "threads_inherit_blocks",
]

if not TYPE_CHECKING:
    __getattr__ = renamed_names(
        __name__, carry_blocks="inherit_blocks", carry_blocks_to_threads="threads_inherit_blocks"
    )


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T")


@renamed_keywords(fake_cuda="gpu")
def fake_mode(*, gpu: bool | int | str | FakeGPU = False) -> Block:
    """Make every tensor that is constructed in the block fake.

    A fake tensor has a shape, strides, a dtype, a device and autograd state, but no data. Operators on fake tensors
    compute these and nothing else. Blocks nest. Each thread has its own; `inherit_blocks()` opens them on another
    thread. If `FakeTensorMode` blocks (PyTorch) nest with them, the innermost block decides. Also a decorator of
    functions, except generators and coroutines: open the block inside of these.

    Args:
        gpu: The fake CUDA devices of the block: their number (True is one), the name of a model (`"H100"`), or a
            description (`FakeGPU("H100-80GB", count=8)`). A number means devices without a memory limit. Fake tensors
            can be on them. The functions of `torch.cuda` answer for them on this thread; those about memory answer as
            PyTorch's allocator would. A fake tensor stays usable after the block. On a machine with CUDA devices, fake
            tensors are on these, and a number has no effect.

    Raises:
        RuntimeError: A model is given, but this machine has CUDA devices.
        TypeError: `gpu` is of another type.
        ValueError: The model is unknown, or the number is out of range.

    Example:
        >>> with fake_mode():
        ...     torch.ones(4, 4)
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True)
    """
    return Block("fake_mode", partial(_fake_mode, gpu), is_resumable=False)


@contextmanager
def _fake_mode(gpu: bool | int | str | FakeGPU) -> Iterator[None]:
    skip_triton_launches()
    with while_fakes_live.hold(), functions.fake_cuda(gpu), fakes_on_this_thread():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is fake.

    Args:
        tensor: Any tensor. A materialized tensor is not fake.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_fake() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_fake(tensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the properties of `fake`.

    Args:
        fake: A fake tensor.

    Returns:
        A tensor on the meta device with the shape, strides and dtype of `fake`. Like the result of `detach()`, it is
        not part of the autograd graph.

    Raises:
        TypeError: `fake` is not a tensor.
        ValueError: `fake` is a real tensor.
        NotImplementedError: `fake` is sparse.
    """
    if not is_fake(fake):
        raise ValueError("meta_like() expected a fake tensor, got a real one. Use `tensor.to('meta')`.")
    return _C.meta_like(fake)


def fake_like(obj: T, device: torch.device | str | int | None = None) -> T:
    """Return a copy of `obj` with fake tensors in place of its tensors. `obj` does not change.

    Classes, `requires_grad`, `grad`, attributes and lazy conjugation are kept. A tensor that occurs twice in `obj` is
    one tensor in the result. Tensors that share a storage share one there, with the same offsets and strides, and
    storages have the same sizes. A view is a view of a fake base (`fake._base`) unless one of the two requires a
    gradient.

    Every tensor of the result is a leaf of autograd and belongs to no graph. A tensor with a `grad_fn` keeps its
    `requires_grad` and loses its `grad_fn`, as after `detach().requires_grad_()`. A deferred tensor becomes a fake
    tensor that cannot be materialized. A PyTorch FakeTensor becomes a plain fake tensor, or a Parameter.

    Args:
        obj: A strided or sparse tensor, real or fake; a module; an optimizer; or a container of them that
            `torch.utils._pytree` handles: list, tuple, dict, the result of `state_dict()`, a registered dataclass.
            Modules and optimizers are copied with `copy.deepcopy()`, with everything attached to them except hooks of
            tensors. Other objects in containers are passed through. Pass `(model, optimizer)` to keep the two
            connected. The step counts of an optimizer keep their values, because its `step()` reads them.
        device: The device of the fakes. Default: the device of each original. A fake CUDA device is possible inside
            `fake_mode(gpu=True)`.

    Returns:
        A copy of `obj`, whose tensors allocate no memory.

    Raises:
        TypeError: `obj` is of another type, or holds a module that cannot be copied.
        ValueError: `device` is the meta device.
        RuntimeError: `device` does not exist.
        NotImplementedError: A tensor in `obj` is nested or quantized, or a wrapper without
            `__tensor_flatten__`.

    Example:
        >>> fake_like({"weight": torch.ones(4, 4), "step": 3})
        {'weight': tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True), 'step': 3}
    """
    if device is None and _is_plain(obj):
        with while_fakes_live.hold():
            return _C.fake_like(obj)  # type: ignore[arg-type, return-value]
    if pytree.tree_is_leaf(obj) and not isinstance(obj, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
        raise TypeError(
            "fake_like() takes a tensor, a module, an optimizer, or a container of them that torch.utils._pytree "
            f"handles, but `obj` is a {type(obj).__name__}."
        )
    with while_fakes_live.hold():
        result: T = FakeCopy(None if device is None else _device_to_fake(device)).tree(obj)
    return result


def _is_plain(obj: object) -> bool:
    """Return True if `obj` is a tensor without attachments that a copy has to keep."""
    return (
        type(obj) is torch.Tensor
        and not torch._C._functorch.is_functorch_wrapped_tensor(obj)
        and obj.layout is torch.strided
        and not (obj._is_view() or obj.is_quantized or obj.is_nested or obj.__dict__)
        and obj.is_leaf
        and obj.grad is None
    )


def _device_to_fake(device: torch.device | str | int) -> torch.device:
    """Return `device` with its index on this machine."""
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError(
            "fake_like() cannot put fakes on the meta device, whose tensors have no data. Use `.to('meta')`, or "
            "torchext.fake.meta_like() for a fake tensor."
        )
    try:
        with fake_mode():
            return torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            f"fake_like() cannot put fakes on `{device}`, because this PyTorch or this machine has no such device. For "
            "a CUDA device, call it inside fake_mode(gpu=True)."
        ) from error


@dataclass(frozen=True)
class CacheInfo(Document):
    """The statistics of the metadata cache since the process began or the cache was cleared.

    Attributes:
        hits: Calls whose results were found.
        misses: Calls whose results had to be computed.
        uncacheable: The misses that cannot be cached, for example because they change the metadata of their arguments.
        currsize: The number of cached calls.
        maxsize: The largest number of cached calls. The least recently used call is dropped first.
    """

    hits: int
    misses: int
    uncacheable: int
    currsize: int
    maxsize: int

    def _parts(self) -> list[Table]:
        return [Table(("metadata cache", ""), self.to_dict().items())]


def cache_info() -> CacheInfo:
    """Return the statistics of the metadata cache, which all threads share.

    The result of a call on fake tensors depends on the operator, the metadata of its arguments and a few settings of
    the process. It is cached, so only the first such call runs PyTorch's Meta kernel.
    """
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Empty the metadata cache and set its statistics to zero."""
    _C.cache_clear()
