"""Fake tensors: what a program would do on a device, on any machine and without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

from .. import _C
from ..errors import DataDependentError, UnsupportedOperatorError
from ..tools.leases import while_fakes_live
from . import cuda, patches  # noqa: F401  (declares what is replaced)
from .copying import FakeCopy
from .fake_tensor_mode import fakes_on_this_thread
from .gpus import FakeGPU
from .threads import carry_blocks, carry_blocks_to_threads
from .transformers import transformers_see_fakes
from .triton_kernels import triton_launches_nothing

__all__ = [
    "CacheInfo",
    "DataDependentError",
    "FakeGPU",
    "UnsupportedOperatorError",
    "cache_clear",
    "cache_info",
    "carry_blocks",
    "carry_blocks_to_threads",
    "fake_like",
    "fake_mode",
    "is_fake",
    "meta_like",
]

T = TypeVar("T")


@contextmanager
def fake_mode(*, fake_cuda: bool | int | FakeGPU = False) -> Iterator[None]:
    """Makes every tensor that is constructed in the block fake.

    A fake tensor has a shape, strides, a dtype, a device and autograd's state, but no data. Operators on fake tensors
    compute these and nothing else. Blocks nest, and each thread has its own: `carry_blocks()` takes them to another.
    Where blocks of PyTorch's `FakeTensorMode` nest with them, the innermost decides.

    Args:
        fake_cuda: On a machine without CUDA devices, their number in the block (True is one) or what they are like
            (`FakeGPU("H100-80GB", count=8)`): fake tensors may be on them, and the functions of `torch.cuda` answer for
            them on this thread, those about memory as PyTorch's allocator would. A fake stays usable after the block.
            Where there are CUDA devices, fakes are on these, and a number has no effect.

    Raises:
        RuntimeError: Devices are described, but there are real ones.
        ValueError: `fake_cuda` is not a possible number of devices.

    Example:
        >>> with fake_mode():
        ...     torch.ones(4, 4)
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', fake=True)
    """
    with ExitStack() as block:
        block.enter_context(while_fakes_live.hold())
        block.enter_context(transformers_see_fakes())
        block.enter_context(triton_launches_nothing())
        block.enter_context(cuda.fake_cuda(fake_cuda))
        block.enter_context(fakes_on_this_thread())
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns true if `tensor` is fake.

    Args:
        tensor: Any tensor. One that was fake and has been materialized is not fake any more.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_fake() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_fake(tensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor with the properties of `fake`.

    Args:
        fake: A fake tensor.

    Returns:
        A tensor on the meta device with the shape, strides and dtype of `fake`. Like the result of `detach()` it is not
        part of the autograd graph.

    Raises:
        TypeError: `fake` is not a tensor.
        ValueError: `fake` is a real tensor.
        NotImplementedError: `fake` is sparse.
    """
    if not is_fake(fake):
        raise ValueError("`fake` was expected to be a fake tensor, but it is a real one: use `fake.to('meta')`.")
    return _C.meta_like(fake)


def fake_like(obj: T, device: torch.device | str | int | None = None) -> T:
    """Returns what `obj` is, with fake tensors in place of its tensors. `obj` is left as it is.

    Classes, `requires_grad`, `grad`, attributes and lazy conjugation are kept. What is one tensor in `obj` is one in
    the result; tensors that share a storage share one there, with the same offsets and strides, and storages have the
    same sizes. A view is a view of a fake base (`fake._base`) unless one of the two requires a gradient.

    Every tensor of the result is a leaf of autograd and belongs to no graph: one that was computed from others keeps
    its `requires_grad` and loses its `grad_fn`, as after `detach().requires_grad_()`. A deferred tensor becomes a fake
    that cannot be materialized, a FakeTensor of PyTorch's a plain fake, or a Parameter.

    Args:
        obj: A strided or sparse tensor, real or fake, or a module, or an optimizer, or a container of them that
            `torch.utils._pytree` knows: list, tuple, dict, what `state_dict()` returns, a registered dataclass. Modules
            and optimizers are copied with `copy.deepcopy()`, with everything attached to them but hooks of tensors.
            Other objects in containers are passed through. Give `(model, optimizer)` to keep the two together; the
            counts of steps in an optimizer keep their values, because its `step()` reads them.
        device: Where the fakes are; by default, each where its original is. A CUDA device on a machine without one
            is possible inside `fake_mode(fake_cuda=True)`.

    Returns:
        A copy of `obj`, for whose tensors no memory is allocated.

    Raises:
        TypeError: `obj` is something else, or holds a module that cannot be copied.
        ValueError: `device` is the meta device, whose tensors need not be faked.
        RuntimeError: There is no such `device`.
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
            f"fake_like() takes a tensor, a module, an optimizer, or a container of them that torch.utils._pytree "
            f"knows, but `obj` is a {type(obj).__name__}."
        )
    with while_fakes_live.hold():
        result: T = FakeCopy(None if device is None else _device_to_fake(device)).tree(obj)
    return result


def _is_plain(obj: object) -> bool:
    """Returns true if `obj` is a tensor with nothing attached that a copy would have to keep."""
    return (
        type(obj) is torch.Tensor
        and not torch._C._functorch.is_functorch_wrapped_tensor(obj)
        and obj.layout is torch.strided
        and not (obj._is_view() or obj.is_quantized or obj.is_nested or obj.__dict__)
        and obj.is_leaf
        and obj.grad is None
    )


def _device_to_fake(device: torch.device | str | int) -> torch.device:
    """The device that `device` names on this machine, with an index."""
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError(
            "fake_like() cannot put fakes on the meta device: a meta tensor has no data anyway. Use `.to('meta')`, or "
            "torchext.fake.meta_like() for a fake tensor."
        )
    try:
        with fake_mode():
            return torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            f"fake_like() cannot put fakes on `{device}`, because this PyTorch or this machine has no such device. For "
            "a CUDA device, call it inside fake_mode(fake_cuda=True)."
        ) from error


class CacheInfo(NamedTuple):
    """What the cache of metadata has done since the process began or it was cleared.

    Attributes:
        hits: Calls whose results were remembered.
        misses: Calls whose results had to be computed.
        uncacheable: Those of the misses that cannot be remembered, for example because they change the metadata of
            their arguments.
        currsize: How many calls are remembered now.
        maxsize: How many can be. The least recently used are forgotten first.
    """

    hits: int
    misses: int
    uncacheable: int
    currsize: int
    maxsize: int


def cache_info() -> CacheInfo:
    """Returns the statistics of the cache of metadata, which all threads share.

    What a call on fake tensors returns depends on the operator, the metadata of its arguments and a few settings of the
    process. The answer is remembered, so that only the first such call runs PyTorch's Meta kernel.
    """
    return CacheInfo(*_C.cache_info())


def cache_clear() -> None:
    """Empties the cache of metadata, and sets its statistics to zero."""
    _C.cache_clear()
