"""Functions of `torch._C` that only builds for CUDA have, on threads with fake devices.

PyTorch's own Python code (`torch.cuda`, `torch.backends`) calls them, and so do libraries with their own kernels. A
build for CPUs gets all of them while fake devices exist. In a build for CUDA those are replaced that would call the
driver; its own settings stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda._utils import _get_device_index
from torch.nn.parallel import comm

from ... import _C
from ...internals.patching import Function
from .devices import DEVICES, MEMORY, answers, while_devices_exist
from .libraries import LIBRARIES, NO_KERNELS, NO_POOLS, cudart, refusing_call, settings
from .streams import STREAMS, is_capturing

__all__ = ["ADDED", "REFUSED", "REPLACED", "SETTINGS", "TUNING", "refuse_tuning"]

NO_NCCL = (
    "Communicators of torch.cuda.nccl are not simulated on fake CUDA devices. Use torch.distributed: a dry run "
    "simulates its collectives."
)
NO_TUNING = (
    "TunableOp measures kernels, which fake CUDA devices do not run, and its buffers would not be counted. Call "
    "torch.cuda.tunable.tuning_enable(False) first, or leave it disabled. If the environment has "
    "PYTORCH_TUNABLEOP_ENABLED=1, unset it, or set PYTORCH_TUNABLEOP_TUNING=0."
)
NO_ANNOTATIONS = "Snapshots of fake CUDA devices have no annotations. Use torch.cuda.memory._set_memory_metadata()."
REFUSED: dict[str, list[str]] = {
    NO_ANNOTATIONS: ["_cuda_annotateMemory"],
    NO_KERNELS: [
        "_FastCudaLauncher",
        "_StaticCudaLauncher",
        "_cuda_jiterator_compile_and_launch_kernel",
    ],
    NO_NCCL: [
        "_nccl_all_gather",
        "_nccl_all_reduce",
        "_nccl_broadcast",
        "_nccl_init_rank",
        "_nccl_reduce",
        "_nccl_reduce_scatter",
        "_nccl_unique_id",
    ],
    NO_POOLS: [
        "_CUDAPluggableAllocator",
        "_construct_CUDA_Tensor_From_Storage_And_Metadata",
        "_cuda_CUDAAllocator_AllocatorState",
        "_cuda_beginAllocateCurrentStreamToPool",
        "_cuda_changeCurrentAllocator",
        "_cuda_checkPoolLiveAllocations",
        "_cuda_cudaHostAllocator",
        "_cuda_customAllocator",
        "_cuda_getAllocator",
        "_cuda_getCheckpointState",
        "_cuda_setCheckpointPoolState",
    ],
}

CUDA_VERSION = 13000  # `CUDA_VERSION` and NCCL's version in PyTorch 2.14
NCCL_VERSION = (2 << 32) + (27 << 16) + 5


def _setting(
    getter: str, setter: str, default: Any, stored: Callable[[Any], Any] = lambda value: value
) -> dict[str, Callable[..., Any]]:
    """Return the two functions of a setting without effect on results and memory.

    The setter accepts values of the type of the default only, and keeps what `stored` returns for them.
    """

    def set_value(value: Any, *others: object) -> None:
        if type(value) is not type(default):
            raise RuntimeError(f"{setter[1:]} expects a {type(default).__name__}, but got {type(value).__name__}")
        settings[getter] = stored(value)

    return {getter: lambda: settings.get(getter, default), setter: set_value}


def _sync_debug_mode(mode: int) -> int:
    if mode not in (0, 1, 2):
        raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
    return mode


def _at_least_zero(value: int) -> int:
    return max(value, 0)


# A build for CUDA initializes the driver for these.
TUNING = {
    **_setting("_cuda_get_sync_debug_mode", "_cuda_set_sync_debug_mode", 0, _sync_debug_mode),
    **_setting("_cuda_record_untuned_is_enabled", "_cuda_record_untuned_enable", False),
    **_setting(
        "_cuda_tunableop_get_cublaslt_requested_algo_count", "_cuda_tunableop_set_cublaslt_requested_algo_count", 8
    ),
    **_setting("_cuda_tunableop_get_filename", "_cuda_tunableop_set_filename", ""),
    **_setting(
        "_cuda_tunableop_get_max_tuning_duration", "_cuda_tunableop_set_max_tuning_duration", 30, _at_least_zero
    ),
    **_setting(
        "_cuda_tunableop_get_max_tuning_iterations", "_cuda_tunableop_set_max_tuning_iterations", 100, _at_least_zero
    ),
    **_setting(
        "_cuda_tunableop_get_rotating_buffer_size", "_cuda_tunableop_set_rotating_buffer_size", 52428800, _at_least_zero
    ),
    **_setting("_cuda_tunableop_is_enabled", "_cuda_tunableop_enable", False),
    **_setting("_cuda_tunableop_tuning_is_enabled", "_cuda_tunableop_tuning_enable", True),
}
SETTINGS = {
    **_setting("_cuda_get_conv_benchmark_empty_cache", "_cudnn_set_conv_benchmark_empty_cache", True),
    **_setting("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", 10),
    **_setting("_get_cublaslt_prefer_grouped_gemm", "_set_cublaslt_prefer_grouped_gemm", False),
}


def _are_tunable_ops_enabled() -> bool:
    # As in PyTorch, a program cannot disable what the environment enables.
    return os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1" or TUNING["_cuda_tunableop_is_enabled"]()


def _may_tune() -> bool:
    return os.environ.get("PYTORCH_TUNABLEOP_TUNING") != "0"


def _is_tuning_enabled() -> bool:
    return _may_tune() and TUNING["_cuda_tunableop_tuning_is_enabled"]()


def refuse_tuning() -> None:
    """Raise an error if matrix products would be tuned.

    Raises:
        RuntimeError: The environment or the program enables TunableOp, and its tuning.
    """
    if _are_tunable_ops_enabled() and _is_tuning_enabled():
        raise RuntimeError(NO_TUNING)


def _enable_tunable_ops(are_enabled: bool) -> None:
    if are_enabled and _is_tuning_enabled():
        raise RuntimeError(NO_TUNING)
    TUNING["_cuda_tunableop_enable"](are_enabled)


def _enable_tuning(is_tuned: bool) -> None:
    if is_tuned and _may_tune() and _are_tunable_ops_enabled():
        raise RuntimeError(NO_TUNING)
    TUNING["_cuda_tunableop_tuning_enable"](is_tuned)


def _validators() -> tuple[tuple[str, str], ...]:
    properties = torch.cuda.get_device_properties()
    device = f"{properties.major}.{properties.minor}:{properties.name}"
    return ("PT_VERSION", torch.__version__), ("CUDA_DEVICE", device)


REPLACED: dict[str, Callable[..., Any]] = {
    **DEVICES,
    **STREAMS,
    **MEMORY,
    **LIBRARIES,
    **TUNING,
    "_cuda_isCurrentStreamCapturing": is_capturing,
    "_cuda_tunableop_enable": _enable_tunable_ops,
    "_cuda_tunableop_get_results": lambda: (),
    "_cuda_tunableop_get_validators": _validators,
    "_cuda_tunableop_is_enabled": _are_tunable_ops_enabled,
    "_cuda_tunableop_read_file": lambda filename="": False,
    "_cuda_tunableop_set_numerical_check_tolerances": lambda are_checked, atol=1e-5, rtol=1e-5: None,
    "_cuda_tunableop_tuning_enable": _enable_tuning,
    "_cuda_tunableop_tuning_is_enabled": _is_tuning_enabled,
}

# In a build for CUDA these do not need a device.
ADDED: dict[str, Callable[..., Any]] = {
    **SETTINGS,
    **{name: refusing_call(message) for message, names in REFUSED.items() for name in names},
    "_CudaDeviceProperties": SimpleNamespace,
    "_cuda_getArchFlags": lambda: "sm_{}{}".format(*torch.cuda.get_device_capability()),
    "_cuda_getCompiledVersion": lambda: CUDA_VERSION,
    "_cuda_getHipblasltVersion": lambda: None,
    "_cudnn_clear_dropout_state": lambda: None,
    "_nccl_version": lambda: NCCL_VERSION,
    "_nccl_version_suffix": lambda: b"",
}

REASON = "is not in builds for CPUs"


def _declare_runtime() -> None:
    while_devices_exist.patch(torch._C, "_cudart", lambda original: cudart(), REASON, is_added=True)


_missing = {name: answer for name, answer in ADDED.items() if not hasattr(torch._C, name)}
answers(torch._C, REPLACED | _missing, reason=REASON, is_added=True)
if not hasattr(torch._C, "_cudart"):
    while_devices_exist.declare(_declare_runtime)


# ---- `torch.nn.parallel.comm`, composed of operators like comm.cpp of a CUDA build
#
# `DataParallel` calls it, even for one device. Builds for CPUs do not have the functions that it calls.


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
