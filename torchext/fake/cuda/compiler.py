"""`torch.compile` on fake CUDA devices: the compiler runs as for a GPU, up to and without its kernels.

Dynamo, AOTAutograd and Inductor trace, partition, fuse and schedule as always. The code that Inductor generates
allocates, reuses and frees buffers and calls operators of libraries, with fakes. So the simulated allocator counts what
a compiled program allocates. Its kernels are not compiled, and compute nothing.

The compiler's own tensors are real or those of PyTorch's `FakeTensorMode`: our dispatch keys are excluded while it
works, except where it notes the keys of the thread in guards, which are compared with those of later calls. Artifacts
refer to kernels that compute nothing, so no cache of the compiler is read or written.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ... import _C
from ...internals.dispatch_keys import with_our_keys, without_our_keys
from ...internals.events import GENERATED, is_observing, is_users, place_of, unobserved, users_frame
from ...internals.patching import TORCH_RELEASE, Function
from ...version import TRITON
from ..addresses import showing_addresses
from .devices import forget_answers, while_devices_exist
from .libraries import note_launch

__all__ = ["BREAK", "GRAPH", "IGNORED", "RECOMPILED", "compile_observers", "why_not_compiled"]


# ---- The compiler at work


def why_not_compiled(backend: object) -> str:
    """Return the reason why `torch.compile()` with this backend cannot run on fake devices; empty if it can."""
    if backend != "inductor":
        return f"the backend {backend!r} generates code for a real GPU"
    wanted = TRITON.get((TORCH_RELEASE[0], TORCH_RELEASE[1]), "")
    found = version("triton") if find_spec("triton") else "none"
    if not wanted or not f"{found}.".startswith(f"{wanted}."):
        return f"it needs Triton {wanted}, found {found}: pip install 'triton=={wanted}.*'"
    return ""


# Called with an event of the compiler (`GRAPH`, `BREAK`, `RECOMPILED`, `IGNORED`) and the line of the program, or for
# `IGNORED` the option.
compile_observers: list[Callable[[str, str], object]] = []
GRAPH, BREAK, RECOMPILED, IGNORED = "graph", "break", "recompiled", "ignored"
HERE = str(Path(_C.__file__).parent) + os.sep


@while_devices_exist.replaces(
    "torch._dynamo.convert_frame", "_compile", reason="makes tensors, and sends kernels to compilers for the device"
)
def _compile_frame(original: Function, code: CodeType, /, *args: Any, **kwargs: Any) -> Any:
    if not _C.fake_cuda_devices():
        return original(code, *args, **kwargs)
    if code.co_filename.startswith(HERE):  # a kernel of fakes in Python, or a replacement
        types = sys.modules["torch._dynamo.types"]
        skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
        return types.ConvertFrameReturn(frame_exec_strategy=skip)
    from torch._inductor import config

    for name in LEFT_OUT:
        if getattr(config, name, False):
            _observe(IGNORED, name)
    sizes = inspect.signature(original).bind(code, *args, **kwargs).arguments["cache_size"]
    if sys.modules["torch._dynamo.cache_size"].is_recompilation(sizes):
        _observe(RECOMPILED, place_of(users_frame()))
    with without_our_keys(), _without_caches(), unobserved():
        return original(code, *args, **kwargs)


@while_devices_exist.replaces(
    "torch._inductor.compile_fx", "compile_fx_inner", reason="compiles backward passes when they first run"
)
def _compile_graph(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    if not _C.fake_cuda_devices():
        return original(*args, **kwargs)
    from torch._inductor import config

    graphs = kwargs.get("cudagraphs")
    for name, is_wanted in (("CUDA graphs", graphs), ("max-autotune", config.max_autotune or config.max_autotune_gemm)):
        if is_wanted:
            _observe(IGNORED, name)
    if graphs is not None:
        kwargs["cudagraphs"] = type(graphs)(False)
    with without_our_keys(), _without_caches(), unobserved(), config.patch(WITHOUT_MEASUREMENTS):
        return original(*args, **kwargs)


WITHOUT_MEASUREMENTS = dict.fromkeys(
    ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"), False
)


@while_devices_exist.replaces(
    "torch._dynamo.variables.optimizer:OptimizerVariable", "call_method", reason="makes the state of an optimizer"
)
def _call_optimizer(original: Function, self: Any, tx: Any, name: str, *args: Any) -> Any:
    """Dynamo calls `_init_group()` of the optimizer of the program."""
    with with_our_keys() if name == "_init_group" and _C.fake_cuda_devices() else nullcontext():
        return original(self, tx, name, *args)


def _observe(event: str, place: str) -> None:
    for observe in compile_observers:
        observe(event, place)


@while_devices_exist.replaces(
    "torch._dynamo.output_graph:OutputGraph", "compile_subgraph", reason="has no hook for graph breaks"
)
def _end_graph(original: Function, self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
    if reason.graph_break and reason.user_stack and _C.fake_cuda_devices():
        stack = [one for one in reason.user_stack if is_users(one.filename)] or reason.user_stack
        _observe(BREAK, f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}")
    return original(self, tx, reason, *args, **kwargs)


@while_devices_exist.replaces(
    "torch._dynamo.output_graph:OutputGraph", "compile_and_call_fx_graph", reason="has no hook for graphs"
)
def _count_graph(original: Function, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    if _C.fake_cuda_devices():
        _observe(GRAPH, place_of(users_frame()))
    return original(self, tx, *args, **kwargs)


# Options that compute or compile on the device.
LEFT_OUT = ("freezing", "cpp_wrapper", "benchmark_fusion", "benchmark_combo_kernel")
CACHES = ("fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache", "autotune_remote_cache")
OPTIONS: dict[str, Any] = {
    **dict.fromkeys((*CACHES, *LEFT_OUT), False),
    "compile_threads": 1,
    "shape_padding": False,  # depends on measurements
}


@contextmanager
def _without_caches() -> Iterator[None]:
    """Read and write no cache of the compiler, and start none of its processes."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    folder = _folder().name
    forget_answers()  # to a thread with other devices
    with ExitStack() as block:
        block.callback(forget_answers)
        block.enter_context(config.patch(OPTIONS))
        block.enter_context(functorch_config.patch(enable_autograd_cache=False))
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            block.callback(_set_variable, name, os.environ.get(name))
            os.environ[name] = folder
        yield


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the generated code, which is removed when the process ends."""
    folder, _, prefix = GENERATED.rpartition(os.sep)
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder)


@while_devices_exist.replaces(
    "torch._dynamo.guards:CheckFunctionManager", "__init__", reason="notes the dispatch keys of the thread"
)
def _note_guards(original: Function, /, *args: Any, **kwargs: Any) -> None:
    if not _C.fake_cuda_devices():
        original(*args, **kwargs)
        return
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["guard_filter_fn"] = partial(_which_hold, bound.arguments.get("guard_filter_fn"))
    with with_our_keys():
        original(*bound.args, **bound.kwargs)


# The dicts of global hooks. A guard on a hook in a dict has a longer name.
HOOKS = re.compile(r"\['__import_torch_dot_nn_dot_modules_dot_module'\]\._global_\w+$")


def _which_hold(choose: Callable[[Any], list[bool]] | None, guards: Any) -> list[bool]:
    """Leave out guards on the keys of global hooks: the compiler has not seen our hooks, but later calls have them."""
    chosen = [True] * len(guards) if choose is None else choose(guards)
    if not is_observing():
        return chosen
    return [is_chosen and not HOOKS.search(one.name) for is_chosen, one in zip(chosen, guards, strict=True)]


@while_devices_exist.replaces(
    "torch._dynamo.eval_frame:OptimizedModule", "_initialize", reason="compiles modules with global hooks in parts"
)
@while_devices_exist.replaces(
    torch.nn.modules.module, "_has_any_global_hook", reason="warns of global hooks in compiled modules"
)
def _call_unobserved(original: Function, /, *args: Any) -> Any:
    with unobserved():
        return original(*args)


@while_devices_exist.replaces(
    "torch._subclasses.fake_tensor:FakeTensorMode", "avoid_device_init", reason="moves constants to the device"
)
def _avoid_device_init(original: Function, self: Any) -> bool:
    return bool(_C.fake_cuda_devices()) or original(self)


@while_devices_exist.replaces(
    "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder",
    "_add_peephole_patterns",
    reason="makes and reads tensors on the device",
)
@while_devices_exist.replaces(
    "torch._inductor.constant_folding:ConstantFolder", "run_node", reason="computes and reads tensors on the device"
)
def _fold(original: Function, self: Any, /, *args: Any) -> Any:
    """Compute on the CPU: the folder needs a few elements. Values that depend on a fake are unknown."""
    if not _C.fake_cuda_devices():
        return original(self, *args)
    try:
        with _OnCpu():  # type: ignore[no-untyped-call]
            return original(self, *args)
    except _UnknownError:
        return self.unknown_value


class _UnknownError(Exception):
    """An operator reads a fake."""


class _OnCpu(TorchDispatchMode):
    """Makes tensors on the CPU that an operator would make on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.device, _cpu_for, (args, kwargs or {}))
        if any(_C.is_fake(one) for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)):
            raise _UnknownError
        return func(*args, **kwargs)


def _cpu_for(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


@while_devices_exist.replaces(
    "torch._inductor.graph:GraphLowering", "constant_name", reason="moves constants to the device, and reads addresses"
)
def _constant_name(original: Function, /, *args: Any) -> Any:
    if not _C.fake_cuda_devices():
        return original(*args)
    with with_our_keys(), showing_addresses():
        return original(*args)


@while_devices_exist.replaces(
    "torch._dynamo.guards", "get_and_maybe_log_recompilation_reasons", reason="compares dispatch keys again"
)
def _explain(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with with_our_keys() if _C.fake_cuda_devices() else nullcontext():
        return original(*args, **kwargs)


@while_devices_exist.replaces(
    "torch.fx.experimental.proxy_tensor", "unset_fake_temporarily", reason="computes constants on the device"
)
@contextmanager
def _compute(original: Function) -> Iterator[Any]:
    """Compute small fakes, whose values are known."""
    with original() as mode, with_our_keys() if _C.fake_cuda_devices() else nullcontext():
        yield mode


# ---- What generated code calls


@while_devices_exist.replaces(
    "torch._functorch._aot_autograd.runtime_wrappers", "initialize_rng_states", reason="reads seeds that it draws"
)
def _seed(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as block:
        if _C.fake_cuda_devices():
            block.enter_context(torch.random.fork_rng(devices=()))
            block.enter_context(without_our_keys())
        return original(*args, **kwargs)


class _Kernel:
    """A kernel of a fake GPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing. Values that the kernel may write become unknown."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        note_launch(tensors)


@while_devices_exist.replaces(
    "torch._inductor.async_compile:AsyncCompile", "triton", reason="compiles a kernel for the device"
)
def _triton(original: Function, self: Any, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
    return _Kernel(kernel_name) if _C.fake_cuda_devices() else original(self, kernel_name, *args, **kwargs)


@while_devices_exist.replaces(
    "torch._inductor.async_compile:AsyncCompile",
    "cpp_pybinding",
    reason="compiles a kernel that reads and writes addresses",
)
def _cpp(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile kernels of the CPU when they are first called with real tensors."""
    if not _C.fake_cuda_devices():
        return original(self, *args, **kwargs)
    types = args[0] if args else kwargs["argtypes"]

    @cache
    def compiled() -> Any:
        kernel = original(self, *args, **kwargs)
        return kernel.result() if hasattr(kernel, "result") else kernel

    def run(*arguments: Any) -> Any:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if not any(map(_C.is_fake, tensors)):
            return compiled()(*arguments)
        for value, kind in zip(arguments, types, strict=False):
            if isinstance(value, torch.Tensor) and not _C.is_fake(value) and not kind.startswith("const "):
                raise RuntimeError(
                    f"Compiled code writes a real CPU tensor of shape {list(value.shape)} in a kernel that also uses "
                    "fake tensors, so its values would be lost. Make the tensor inside fake_mode(), or do not compile "
                    "the function that writes it."
                )
        return _C.note_foreign_write(tensors)

    return run


@while_devices_exist.replaces(
    "torch._inductor.output_code:CompiledFxGraph", "__call__", reason="allocates buffers without the dispatcher"
)
def _call_graph(original: Function, self: Any, inputs: Any, /) -> Any:
    """Compute graphs of real CPU tensors alone, like operators on them."""
    computes = _C.fake_cuda_devices() and self.device_types <= {"cpu"} and _are_real(inputs)
    with without_our_keys() if computes else nullcontext():
        return original(self, inputs)  # which frees the inputs early


def _are_real(values: Iterable[Any]) -> bool:
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    return bool(tensors) and not any(map(_C.is_fake, tensors))


def _on(device: str, **options: Any) -> Function:
    """Return the replacement of a function that allocates a buffer without the dispatcher."""

    def empty_strided(original: Function, size: Any, stride: Any, dtype: Any) -> Any:
        if not (_C.are_factories_fake() or _C.fake_cuda_devices()):
            return original(size, stride, dtype)
        return torch.empty_strided(size, stride, dtype=dtype, device=device, **options)

    return empty_strided


_guards: Any = torch._C._dynamo.guards
for _name, _allocate in {
    "_empty_strided_cuda": _on("cuda"),
    "_empty_strided_cpu": _on("cpu"),
    "_empty_strided_cpu_pinned": _on("cpu", pin_memory=True),
}.items():
    while_devices_exist.replaces(_guards, _name, reason="allocates without the dispatcher")(_allocate)


# The alignment that Inductor's kernels assume, in bytes.
ALIGNMENT = 16


# Named `copy_misaligned` in 2.12 only.
@while_devices_exist.replaces(_guards, "copy_misaligned", needs="copy_misaligned", reason="reads an address")
@while_devices_exist.replaces(_guards, "copy_if_misaligned", needs="copy_if_misaligned", reason="reads an address")
def _copy_if_misaligned(original: Function, tensor: torch.Tensor) -> Any:
    """Copy a tensor by its offset in its allocation, whose address is a multiple of more bytes."""
    if not _C.is_fake(tensor):
        return original(tensor)
    is_aligned = tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
    return tensor if is_aligned else sys.modules["torch._inductor.utils"].clone_preserve_strides(tensor)


@while_devices_exist.replaces("torch._inductor.utils", "copy_misaligned_inputs", reason="reads addresses")
def _copy_misaligned_inputs(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with showing_addresses():
        return original(*args, **kwargs)


@while_devices_exist.replaces(_guards, "assert_alignment", reason="reads an address")
def _assert_alignment(original: Function, tensor: torch.Tensor, *args: Any) -> None:
    if not _C.is_fake(tensor):
        original(tensor, *args)
