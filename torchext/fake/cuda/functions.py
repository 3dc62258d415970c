"""The functions of `torch.cuda` on a machine without CUDA devices, while a thread is in a `fake_mode(gpu=...)`.

The other half of NOTE [Fake CUDA], csrc/extensions/cuda/fake_cuda.h. The functions are replaced while any thread is
in such a block, and answer for the fake devices on those threads only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.accelerator import _utils as accelerator

from ... import _C
from ...descriptions import FakeGPU, as_fake_gpu
from ...internals.leases import while_fakes_live
from ...internals.patching import Function, once
from .builds import refuse_tuning
from .devices import QUERIES, answers, forget_answers, forget_program, while_devices_exist
from .libraries import NO_POOLS, refusing_call, settings
from .streams import GRAPHS, FakeEvent, FakeGraph, FakePool, FakeStream, current_stream, set_stream

__all__ = ["apply_default_type", "fake_cuda", "forget_default_type", "leave_default_type", "same_devices"]


# ---- Random number generators


class _DefaultGenerators(Sequence[torch.Generator]):
    """`torch.cuda.default_generators`, with the generators of fake devices on threads that have them."""

    def __init__(self, original: tuple[torch.Generator, ...]) -> None:
        self._original = original

    def _current(self) -> tuple[torch.Generator, ...]:
        return tuple(map(_C.default_fake_cuda_generator, range(_C.fake_cuda_devices()))) or self._original

    def __len__(self) -> int:
        return len(self._current())

    def __getitem__(self, index: Any) -> Any:
        return self._current()[index]

    def __eq__(self, other: object) -> bool:
        return self._current() == (other._current() if isinstance(other, _DefaultGenerators) else other)

    def __hash__(self) -> int:
        return hash(self._current())

    def __repr__(self) -> str:
        return repr(self._current())


def _declare_generators() -> None:
    while_devices_exist.patch(torch.cuda, "default_generators", _DefaultGenerators, "looks for real CUDA devices")


while_devices_exist.declare(_declare_generators)


# ---- `torch.set_default_tensor_type()` with a CUDA type, which PyTorch without CUDA rejects
#
# It sets the default dtype and the default device. A device that the program has set by `torch.set_default_device()`
# takes precedence, as in PyTorch. The exception is the constructor `torch.Tensor(...)`, which ignores both and stays on
# the CPU.
#
# As in PyTorch the type holds for all threads. PyTorch's default devices are thread-local, so other threads get theirs
# when they enter a block of fake CUDA devices.


class _Thread(threading.local):
    context: Any = None  # the default device that a CUDA type has set on this thread


_thread = _Thread()
_dtypes: list[torch.dtype] = []  # the previous default dtype while a CUDA type is the default


@while_devices_exist.replaces(torch, "set_default_tensor_type", reason="rejects CUDA types")
def _set_default_tensor_type(original: Function, t: Any, /) -> None:
    name = t if isinstance(t, str) else f"{getattr(t, '__module__', '')}.{getattr(t, '__name__', '')}"
    is_on_cuda = name.startswith("torch.cuda.") and _C.fake_cuda_devices() > 0
    before = torch.get_default_dtype()
    original(f"torch.{name.rpartition('.')[2]}" if is_on_cuda else t)  # rejects types that are not floating-point
    if not is_on_cuda:
        _dtypes.clear()
        leave_default_type()
    else:
        if not _dtypes:
            _dtypes.append(before)
        apply_default_type()


def _default_device() -> Any:
    """Return the context of `torch.set_default_device()` on this thread."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def apply_default_type() -> None:
    """Make CUDA the default device of this thread if the default type is a CUDA type."""
    if _dtypes and _default_device() is None:
        torch.set_default_device("cuda")
        _thread.context = _default_device()


def leave_default_type() -> None:
    """Make the CPU the default device of this thread again, unless the program has set another one."""
    context, _thread.context = _thread.context, None
    if context is not None and _default_device() is context:
        torch.set_default_device(None)


def forget_default_type() -> None:
    """Restore the default dtype from before the CUDA type."""
    if _dtypes:
        torch.set_default_dtype(_dtypes.pop())


# ---- Blocks of fake devices, and the replaced functions


@contextmanager
def fake_cuda(gpu: bool | int | str | FakeGPU) -> Iterator[None]:
    """Give this thread fake CUDA devices in the block. On a machine with CUDA devices it keeps these.

    Args:
        gpu: The number of devices (True is one), or their description.

    Raises:
        TypeError: `gpu` is of another type.
        RuntimeError: The devices are described, but this machine has CUDA devices, or TunableOp is enabled.
        ValueError: The number is out of range, or the model is unknown.
    """
    described = as_fake_gpu(gpu)
    with _block(described.count if described is not None else 0, None if isinstance(gpu, int) else described):
        yield


@contextmanager
def _block(count: int, gpu: FakeGPU | None) -> Iterator[None]:
    """Implement `fake_cuda()`. Without `gpu` the devices are described as around the block, if they are."""
    if count:
        from . import kernels  # noqa: F401  # its rules describe the allocations of kernels
    block = _C.enter_fake_cuda(count) if count else None
    if block is None:
        if gpu is not None and count:
            raise RuntimeError(
                f"{gpu.name} describes fake CUDA devices, but this machine has real ones "
                f'({torch.cuda.device_count()}), and fakes on "cuda" use those. To simulate others, hide them: start '
                "Python with CUDA_VISIBLE_DEVICES= (empty) in its environment."
            )
        yield
        return
    if gpu is not None:
        _describe(gpu)
    _replace_backward()
    try:
        refuse_tuning()
        with while_devices_exist.hold():
            forget_answers()
            apply_default_type()
            try:
                yield
            finally:
                forget_answers()
    finally:
        if not while_devices_exist.is_active:  # the last block ends the devices, like a process
            forget_program()
            settings.clear()
            forget_default_type()
        _C.leave_fake_cuda(block)  # raises on another thread
        if not _C.fake_cuda_devices():
            leave_default_type()


def _describe(gpu: FakeGPU) -> None:
    _C.describe_fake_gpu(
        (
            gpu.name,
            gpu.memory,
            gpu.has_limit,
            gpu.context,
            *gpu.capability,
            gpu.multiprocessors,
            gpu.max_threads_per_multiprocessor,
            gpu.shared_memory_per_block_optin,
            gpu.l2_cache,
        )
    )


def _accelerator_stream(device: Any = None, /) -> Any:
    return current_stream(accelerator._get_device_index(device, optional=True))


def _set_accelerator_stream(stream: Any) -> None:
    set_stream(stream.stream_id, stream.device_index, stream.device_type)


REASON = "looks for real CUDA devices"
answers(torch.cuda, QUERIES | GRAPHS, reason=REASON, is_traced=True)

# `torch.accelerator` must not share functions with `torch.cuda`: Dynamo asserts that each function has one name. Nor
# may it call them: Dynamo calls it at each graph break, and would trace the call.
answers(
    torch.accelerator,
    {"current_stream": _accelerator_stream, "set_stream": _set_accelerator_stream},
    reason=REASON,
    is_traced=True,
)
# PyTorch's own kernels stand in for those of cuDNN.
answers(torch.backends.cudnn, {"is_acceptable": lambda tensor: False}, reason=REASON, is_traced=True)
# Builds without CUDA do not have it.
_is_missing = not hasattr(torch.cuda.Stream, "priority_range")
answers(torch.cuda.Stream, {"priority_range": FakeStream.priority_range}, reason=REASON, is_added=_is_missing)


def _construct(fake: type, original: Function, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """Construct a `fake` on threads with fake devices, and call `original` on others."""
    if _C.fake_cuda_devices() and not issubclass(cls, fake):
        return fake(*args, **kwargs)
    return original(cls, *args, **kwargs)


_classes = [(torch.cuda.Stream, FakeStream), (torch.cuda.Event, FakeEvent), (torch.cuda.CUDAGraph, FakeGraph)]
# A build for CUDA makes pools in C, before `MemPool.__init__()` could replace them.
if "__new__" in vars(torch.cuda.MemPool.__base__):
    _classes.append((torch.cuda.MemPool, FakePool))
else:
    answers(torch.cuda.MemPool, {"__init__": refusing_call(NO_POOLS)}, reason=REASON)
for _owner, _fake in _classes:
    while_devices_exist.replaces(_owner, "__new__", reason=REASON)(partial(_construct, _fake))


def _construct_legacy(original: Function, cls: Any, /, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """Construct `torch.cuda.FloatTensor(...)` and similar types from the arguments of a tensor's `new()`."""
    if not _C.fake_cuda_devices():
        return original(cls, *args, **({} if device is None else {"device": device}), **kwargs)
    device = torch.device("cuda") if device is None else torch.device(device)
    if device.type != "cuda":
        raise RuntimeError(f"legacy constructor expects device type: cuda but device type: {device.type} was passed")
    return torch.empty(0, dtype=cls.dtype, device=device).new(*args, **kwargs)


for _cls in torch._tensor_classes:
    if _cls.is_cuda and not _cls.is_sparse and not _cls.is_sparse_csr:
        while_devices_exist.replaces(_cls, "__new__", reason=REASON)(_construct_legacy)


# ---- Backward passes of fakes


@once
def _replace_backward() -> None:
    """Give the backward pass of fakes their devices, also after the end of the block that created them."""
    owner = torch._C._ImperativeEngine  # Megatron calls it directly
    while_fakes_live.replaces(owner, "run_backward", reason="looks for the devices of fakes")(_run_backward)


def _run_backward(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    outputs = args[1] if len(args) > 1 else kwargs.get("tensors")
    if not isinstance(outputs, (tuple, list)) or not any(map(_may_be_fake, outputs)):
        return original(*args, **kwargs)
    # Hooks and recomputed forwards may call torch.cuda, even after the block has ended.
    with _latest_devices():
        return _C.call_backward(original, *args, **kwargs)


@contextmanager
def _latest_devices() -> Iterator[None]:
    """Give a thread without fake devices the largest number that any thread has had, with the latest description."""
    if _C.fake_cuda_devices():
        yield
        return
    with same_devices(_C.largest_fake_cuda_devices(), _C.fake_gpu()):
        yield


@contextmanager
def same_devices(count: int, gpu: _C.GpuFields) -> Iterator[None]:
    """Give this thread the fake devices of another: their number, and their description (`_C.fake_gpu()`)."""
    with _block(count, None):
        if count:
            _C.describe_fake_gpu(gpu)
        yield


def _may_be_fake(output: Any) -> bool:
    """Return true if `output` is or contains a fake, or is on a fake device.

    In `torch.func` the backward pass starts at a wrapper, and with `loss_parallel()` at a DTensor. The compiler passes
    tensors of PyTorch's `FakeTensorMode`.
    """
    if not isinstance(output, torch.Tensor):
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(output):
        output = torch._C._functorch.get_unwrapped(output)
    if _C.is_fake(output) or (output.is_cuda and _C.fake_cuda_devices()):
        return True
    inner = getattr(output, "__tensor_flatten__", None)
    if inner is None:
        return False
    parts = (getattr(output, name) for name in inner()[0])
    return any(_may_be_fake(part) for part in parts if isinstance(part, torch.Tensor))  # a DTensor also lists its mesh
