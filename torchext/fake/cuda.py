"""The functions of `torch.cuda` on a machine without CUDA devices, while a thread is in a `fake_mode(fake_cuda=...)`.

The other half of NOTE [CUDA without CUDA], csrc/fake/cuda/fake_cuda.h. The functions are replaced while any thread is
in such a block, and answer for the fake devices on those threads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.accelerator._utils import _get_device_index

from .. import _C
from ..tools.leases import Lease, while_fakes_live
from ..tools.once import once
from ..tools.patching import patching_lock
from .cuda_devices import DEVICES
from .cuda_graphs import GRAPHS, FakeGraph, FakePool
from .cuda_libraries import NO_POOLS, patch_libraries, refusing
from .cuda_memory import ACCELERATOR_MEMORY, MEMORY, forget_raw_memory, pinning_numbers
from .cuda_parallel import patch_comm
from .cuda_random import RANDOM, generators_by_thread
from .cuda_streams import FakeEvent, FakeStream, current_stream, default_stream, set_stream, set_stream_by_id
from .default_type import apply_default_type, forget_default_type, leave_default_type, setting_default_type
from .gpus import FakeGPU

__all__ = ["fake_cuda", "same_devices"]

MAX_DEVICES = 64  # of `c10::DeviceIndex` PyTorch itself uses no more (C10_COMPILE_TIME_MAX_GPUS)

# What the devices of `fake_cuda=True` are like: the last generation of which every PyTorch release here has kernels.
DEFAULT = FakeGPU("torchext fake CUDA device", memory=80 * 2**30)


@contextmanager
def fake_cuda(devices: bool | int | FakeGPU) -> Iterator[None]:
    """Lets this thread see CUDA devices in the block; where there are real ones, it sees these.

    Args:
        devices: Their number, or what they are like; True is one.

    Raises:
        RuntimeError: They are described, but there are real ones, which are like they are.
        ValueError: There cannot be so many.
    """
    gpu = devices if isinstance(devices, FakeGPU) else None
    count = gpu.count if gpu is not None else int(devices)  # type: ignore[arg-type]
    if not 0 <= count <= MAX_DEVICES:
        raise ValueError(
            f"`fake_cuda` is True, False, a number of devices up to {MAX_DEVICES} or a FakeGPU, but it is {devices!r}."
        )
    with _block(count, gpu):
        yield


@contextmanager
def _block(count: int, gpu: FakeGPU | None) -> Iterator[None]:
    """The same, for checked arguments. Without `gpu` the devices are like those around the block, if there are any."""
    block = _C.enter_fake_cuda(count) if count else None
    if block is None:
        if gpu is not None and count:
            raise RuntimeError(
                f"{gpu.name} was described for fake CUDA devices, but this machine has real ones "
                f'({torch.cuda.device_count()}), to which fakes on "cuda" belong. Hide them to simulate others: start '
                "Python with CUDA_VISIBLE_DEVICES= (nothing) in its environment."
            )
        yield
        return
    if gpu is not None:
        _describe(gpu)
    _replace_backward()
    try:
        with _while_devices_exist.hold(), _functions_of_cuda_builds():
            # Remembers what the accelerator is (`functools.cache`).
            torch.get_device_module.cache_clear()
            apply_default_type()
            try:
                yield
            finally:
                torch.get_device_module.cache_clear()
    finally:
        if not _while_devices_exist.is_active:  # they end with the last block, as with a process
            forget_raw_memory()
            forget_default_type()
        _C.leave_fake_cuda(block)  # raises on another thread
        if not _C.fake_cuda_devices():
            leave_default_type()


# What a build for CPUs does not have, and PyTorch's own Python code (graphs) and libraries with kernels of their own
# (bitsandbytes, when it is imported) take from `torch._C`.
OF_CUDA_BUILDS: dict[str, Callable[..., Any]] = {
    "_cuda_getCurrentRawStream": _C.current_fake_stream,
    "_host_emptyCache": lambda: None,
}
_added: list[str] = []
_adding = 0


@contextmanager
def _functions_of_cuda_builds() -> Iterator[None]:
    """Adds to `torch._C` what it does not have of these, while any thread is in such a block."""
    global _adding
    with patching_lock:
        _adding += 1
        for name in OF_CUDA_BUILDS.keys() - vars(torch._C).keys():
            setattr(torch._C, name, OF_CUDA_BUILDS[name])
            _added.append(name)
    try:
        yield
    finally:
        with patching_lock:
            _adding -= 1
            while not _adding and _added:
                delattr(torch._C, _added.pop())


def _describe(gpu: FakeGPU) -> None:
    _C.describe_fake_gpu(
        gpu.name,
        gpu.memory,
        gpu.context,
        gpu.capability,
        gpu.multiprocessors,
        gpu.max_threads_per_multiprocessor,
        gpu.shared_memory_per_block_optin,
        gpu.l2_cache,
    )


def _accelerator_stream(device: Any = None, /) -> Any:
    return current_stream(_get_device_index(device, optional=True))


def _set_accelerator_stream(stream: Any) -> None:
    set_stream(stream)


STREAMS: dict[str, Callable[..., Any]] = {
    "_set_stream_by_id": lambda stream_id, device_index, device_type: set_stream_by_id(stream_id, device_index),
    "current_stream": current_stream,
    "default_stream": default_stream,
}

# `torch.accelerator` must not have the same functions as `torch.cuda`: Dynamo asserts that each has one name.
ACCELERATOR_STREAMS: dict[str, Callable[..., Any]] = {
    "current_stream": _accelerator_stream,
    "set_stream": _set_accelerator_stream,
}

ANSWERS = DEVICES | STREAMS | MEMORY | RANDOM | GRAPHS


def _making(original: Callable[..., Any], fake: type) -> Callable[..., Any]:
    """Makes a `fake` on threads that see fake devices, and what `original` makes on others."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _C.fake_cuda_devices() and not issubclass(cls, fake):
            return fake(*args, **kwargs)
        return original(cls, *args, **kwargs)

    return __new__


def _of_legacy_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.cuda.FloatTensor(...)` and its like take what `new()` of a tensor of that type takes."""

    def __new__(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not _C.fake_cuda_devices():
            return original(cls, *args, **({} if device is None else {"device": device}), **kwargs)
        device = torch.device("cuda") if device is None else torch.device(device)
        if device.type != "cuda":
            raise RuntimeError(
                f"legacy constructor expects device type: cuda but device type: {device.type} was passed"
            )
        return torch.empty(0, dtype=cls.dtype, device=device).new(*args, **kwargs)

    return __new__


def _replaced_functions() -> None:
    """What answers for the fake devices."""
    reason = "asks for CUDA devices that are not there"
    found: set[int] = set()  # modules have functions of others by name
    for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random):
        for name, answer in ANSWERS.items():
            function = vars(module).get(name)
            if function is not None and id(function) not in found:
                found.add(id(function))
                _while_devices_exist.patch(module, name, partial(_answering, answer=answer), reason, is_traced=True)
    classes = [(torch.cuda.Stream, FakeStream), (torch.cuda.Event, FakeEvent), (torch.cuda.CUDAGraph, FakeGraph)]
    # A build for CUDA makes pools in C, before `MemPool.__init__()` can make others in their place.
    if "__new__" in vars(torch.cuda.MemPool.__base__):
        classes.append((torch.cuda.MemPool, FakePool))
    else:
        _while_devices_exist.patch(torch.cuda.MemPool, "__init__", refusing(NO_POOLS), reason)
    for owner, fake in classes:
        _while_devices_exist.patch(owner, "__new__", partial(_making, fake=fake), reason)
    for cls in torch._tensor_classes:
        if cls.is_cuda and not cls.is_sparse and not cls.is_sparse_csr:
            _while_devices_exist.patch(cls, "__new__", _of_legacy_type, reason)
    for name, answer in ACCELERATOR_STREAMS.items():
        _while_devices_exist.patch(torch.accelerator, name, partial(_answering, answer=answer), reason, is_traced=True)
    for name, answer in ACCELERATOR_MEMORY.items():
        _while_devices_exist.patch(
            torch.accelerator.memory, name, partial(_answering, answer=answer), reason, is_traced=True
        )
    _while_devices_exist.patch(torch, "set_default_tensor_type", setting_default_type, "refuses types of CUDA")
    _while_devices_exist.patch(torch.cuda, "default_generators", generators_by_thread, reason)
    _while_devices_exist.patch(torch, "tensor", pinning_numbers, "pins real memory, with the Fake key excluded")
    patch_libraries(_while_devices_exist, _answering)
    patch_comm(_while_devices_exist, _answering)
    # PyTorch's own kernels stand for those of cuDNN.
    make = partial(_answering, answer=lambda tensor: False)
    _while_devices_exist.patch(torch.backends.cudnn, "is_acceptable", make, reason, is_traced=True)


_while_devices_exist = Lease("a block of fake_mode(fake_cuda=...) is open")
_while_devices_exist.declare(_replaced_functions)


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `answer` on threads that see fake devices, and `original` on others."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return (answer if _C.fake_cuda_devices() else original)(*args, **kwargs)

    return function


@once
def _replace_backward() -> None:
    """Lets the backward pass of fakes see their devices, also of those that outlive the block that made them."""
    reason = "looks for the devices of fakes"
    while_fakes_live.patch(torch._C._ImperativeEngine, "run_backward", _seeing_fakes, reason)  # Megatron calls it, too


def _seeing_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outputs = args[1] if len(args) > 1 else kwargs.get("tensors")
        if not isinstance(outputs, (tuple, list)) or not any(map(_may_be_fake, outputs)):
            return original(*args, **kwargs)
        # Hooks and recomputed forwards may ask torch.cuda, also where the block has ended.
        with _latest_devices():
            return _C.call_backward(original, *args, **kwargs)

    return run_backward


@contextmanager
def _latest_devices() -> Iterator[None]:
    """Lets a thread that sees no devices see as many as any has seen, described as they were last."""
    if _C.fake_cuda_devices():
        yield
        return
    with same_devices(_C.largest_fake_cuda_devices(), _C.fake_gpu_number()):
        yield


@contextmanager
def same_devices(count: int, gpu: int) -> Iterator[None]:
    """Lets this thread see the devices that another has seen: their number, and that of their description."""
    with _block(count, None):
        if count:
            _C.describe_fake_gpu_again(gpu)
        yield


def _may_be_fake(output: Any) -> bool:
    """Looks into wrappers as well: `loss_parallel()` has a backward pass begin at a distributed tensor."""
    if not isinstance(output, torch.Tensor) or _C.is_fake(output):
        return True
    inner = getattr(output, "__tensor_flatten__", None)
    if inner is None:
        return False
    parts = (getattr(output, name) for name in inner()[0])
    return any(_may_be_fake(part) for part in parts if isinstance(part, torch.Tensor))  # a DTensor names its mesh
