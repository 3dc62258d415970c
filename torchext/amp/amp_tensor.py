"""AmpTensors: tensors whose operators autocast everywhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from .. import _C
from ..errors import TorchextWarning
from ..internals import dispatch_keys  # noqa: F401  (declares patches of both features)
from ..internals.events import users_frame
from ..internals.held_tensors import reachable_tensors, tensors_in
from ..internals.leases import while_autocasting, while_marks_live
from ..internals.patching import DIFFERENCES, Concerns, Function

__all__ = ["AmpTensor", "is_amp", "to_amp", "to_normal"]

T = TypeVar("T", bound=Tensor | nn.Module)
U = TypeVar("U", bound=Tensor | nn.Module | Optimizer)


class _AmpTensorMeta(torch._C._TensorMeta):
    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805 - ruff does not recognize PyTorch's metaclass
        return isinstance(instance, Tensor) and _C.is_amp(instance)


class AmpTensor(Tensor, metaclass=_AmpTensorMeta):
    """The tensors for which `is_amp()` is True, for `isinstance(x, AmpTensor)`.

    It has no direct instances: an AmpTensor keeps its class, because being an AmpTensor is a property of a tensor, like
    `requires_grad`. `to_amp()` turns any tensor into one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AmpTensor:
        """Raise TypeError."""
        raise TypeError("AmpTensor cannot be instantiated: use torchext.amp.to_amp(tensor).")


def to_amp(obj: T) -> T:
    """Turn a tensor, or each parameter of a module, into an AmpTensor, in place.

    Every operator with an AmpTensor among its arguments autocasts to `torch.get_autocast_dtype(device_type)`, and its
    floating point and complex results are AmpTensors. So the whole forward pass of a wrapped module autocasts, without
    a region. Inside a region, also a disabled one, the region decides.

    Views, `detach()`, `copy.deepcopy()`, `state_dict()` and gradients of AmpTensors are AmpTensors. Unpickled tensors
    are not, and neither is an ordinary tensor that an AmpTensor is written into, in place or as `out=`. The operators
    of a backward pass do not autocast. Buffers are not wrapped: operators on them also get a parameter or one of its
    results. Neither is the state of optimizers; state that they create later for a wrapped parameter is an AmpTensor.

    Args:
        obj: A tensor, real, fake or deferred, or a module.

    Returns:
        `obj`.

    Raises:
        TypeError: `obj` is of another type, or a tensor that is neither floating point nor complex.
        RuntimeError: A tensor has metadata of a backend (`c10::BackendMeta`), where the mark is stored; nothing is
            wrapped then. Or another library uses the dispatch key of marked tensors.
    """
    if isinstance(obj, Tensor):
        _check_dtype(obj)
        _wrap([obj])
    elif isinstance(obj, nn.Module):
        _wrap(list(_castable_parameters(obj)))
        _wrap_when_initialized(obj)
    else:
        raise TypeError(f"to_amp() takes a tensor or a module, but `obj` is a {type(obj).__name__}.")
    return obj


def _wrap(tensors: list[Tensor]) -> None:
    with while_marks_live.hold(), while_autocasting.hold():  # the marks keep holding it
        _C.wrap_amp(tensors)
    _forget_compiled_code()


def to_normal(obj: U) -> U:
    """Turn an AmpTensor, or each one that a module or an optimizer holds, into a normal tensor, in place.

    Gradients become normal with their tensors.

    Args:
        obj: A tensor, AmpTensor or not; a module (its parameters and buffers, and tensors in attributes, containers and
            other objects); or an optimizer (its parameters and its state).

    Returns:
        `obj`.

    Raises:
        TypeError: `obj` is of another type.
    """
    if not isinstance(obj, Tensor | nn.Module | Optimizer):
        raise TypeError(f"to_normal() takes a tensor, a module or an optimizer, but `obj` is a {type(obj).__name__}.")
    for tensor in [obj] if isinstance(obj, Tensor) else reachable_tensors(obj, _C.is_amp):
        _C.unwrap_amp(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            _C.unwrap_amp(tensor.grad)
    if isinstance(obj, nn.Module):
        _forget_to_wrap(obj)
    _forget_compiled_code()
    return obj


def is_amp(tensor: Tensor) -> bool:
    """Return True if `tensor` is an AmpTensor: wrapped, computed from one, or created in a self-cleaning region.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is_amp() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_amp(tensor)


def _forget_compiled_code() -> None:
    """Reset Dynamo before 2.12, which does not check again parameters that are still the same objects."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if DIFFERENCES["dynamo_keeps_parameters"].applies and dynamo is not None:
        dynamo.reset()


def _wrap_when_initialized(module: nn.Module) -> None:
    """Wrap the parameters of lazy modules when they are initialized.

    `UninitializedParameter.materialize()` replaces the data, and with it the mark.
    """
    _forget_to_wrap(module)
    for part in module.modules():
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
            part.register_forward_pre_hook(_wrap_initialized)


def _forget_to_wrap(module: nn.Module) -> None:
    for part in module.modules():
        _remove_hook(part)


def _remove_hook(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _wrap_initialized]:
        del module._forward_pre_hooks[key]


def _wrap_initialized(module: nn.Module, args: Any) -> None:
    """Wrap the parameters, once. Runs after the hook of `LazyModuleMixin`, which was registered before."""
    _wrap(list(_castable_parameters(module, recurse=False)))
    _remove_hook(module)


def _check_dtype(tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"to_amp() takes tensors of floating point and complex dtypes, but `obj` has the dtype {tensor.dtype}."
        )


def _castable_parameters(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters(recurse) if p.is_floating_point() or p.is_complex())


# ---- A warning about backward passes inside autocast regions
#
# The operators of a backward pass run in the dtypes of the forward pass. Inside a region they would also autocast,
# because the autograd engine takes the state of the thread. PyTorch's documentation warns about this; its code does
# not.


_warned: dict[tuple[str, int], object] = {}

# The position of `create_graph` in the arguments of `_engine_run_backward()` after the outputs.
CREATE_GRAPH = 2


@while_autocasting.replaces(
    torch.autograd.graph, "_engine_run_backward", reason="runs no operator when a backward pass begins"
)
def _engine_run_backward(original: Function, /, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if _C.is_in_enabled_region() and not _is_of_a_transform():
        _warn()
    creates_graph = args[CREATE_GRAPH] if len(args) > CREATE_GRAPH else kwargs.get("create_graph", False)
    is_number = isinstance(creates_graph, int)  # the engine raises for other types
    return _C.call_in_backward(is_number and bool(creates_graph), original, outputs, *args, **kwargs)


def _is_of_a_transform() -> bool:
    """Return True if no line of the program runs between forward and backward.

    In `torch.func.grad` they are one call. `torch.compile` traces both when the first one is called.
    """
    is_traced = torch._guards.TracingContext.try_get() is not None
    return is_traced or torch._C._functorch.peek_interpreter_stack() is not None


def _warn() -> None:
    """Warn once for each source line of the user."""
    frame = users_frame()
    if frame is None:
        return  # a thread started by a library
    line = (frame.f_code.co_filename, frame.f_lineno)
    this_call = object()
    if _warned.setdefault(line, this_call) is not this_call:  # of two threads, one is first
        return
    warnings.warn_explicit(
        f"{line[0]}:{line[1]} runs backward() inside an autocast region: the operators of the backward pass run in "
        "the dtypes of the forward pass, unless the region casts them again. Leave the region before it.",
        TorchextWarning,
        *line,
    )


# ---- Functions of PyTorch that have to support AmpTensors
#
# The patches below are installed while a tensor is marked (`torchext.internals.leases`). Every patch passes other
# tensors to the original, and all tensors where `torch.compile` traces, because its tensors are not AmpTensors.


# The dtypes that autocast casts.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


@while_marks_live.replaces(
    torch._C._functorch,
    *("_wrap_for_grad", "_unwrap_for_grad", "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched"),
    reason="copies only PyTorch's own keys",
    concerns=Concerns.MARKS,
)
def _keep_marks(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Mark the wrappers into which transforms of `torch.func` put their arguments, and the results taken out of them.

    A wrapper copies only PyTorch's own keys from its tensor. Without our key, operators would find the marked tensors
    below the transform, after autograd has recorded them in their original dtype.
    """
    result = original(*args, **kwargs)
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    made = result[0] if isinstance(result, tuple) else result  # with the former batch dimension
    if tensor is not None and not is_compiling() and made is not tensor:
        _C.make_amp_like(made, tensor)
    return result


@while_marks_live.replaces(
    nn.RNNBase, "check_input", reason="requires the dtype of the weights outside of autocast regions"
)
def _check_input(original: Function, self: nn.RNNBase, tensor: Tensor, batch_sizes: Tensor | None) -> None:
    if not is_compiling() and isinstance(self, nn.RNNBase) and _will_be_cast(tensor, self._flat_weights[0]):
        tensor = torch.empty(tensor.shape, dtype=self._flat_weights[0].dtype, device="meta")  # type: ignore[union-attr]
    original(self, tensor, batch_sizes)


def _will_be_cast(tensor: Any, weight: Any) -> bool:
    """Return True if autocast casts both. They need not be tensors: any class may define `__torch_function__`."""
    if not (isinstance(tensor, Tensor) and isinstance(weight, Tensor)):
        return False
    is_castable = tensor.dtype in CASTABLE and weight.dtype in CASTABLE
    return is_castable and (_C.is_amp(tensor) or _C.is_amp(weight))


# ---- Checkpoints, which recompute in the backward pass as in the forward pass


RECOMPUTES = "recomputes without the marks of the forward pass"
GENERATOR = "_checkpoint_without_reentrant_generator"


# Since 2.14, the second function calls the first.
@while_marks_live.replaces(
    checkpoint, f"{GENERATOR}_impl" if hasattr(checkpoint, f"{GENERATOR}_impl") else GENERATOR, reason=RECOMPUTES
)
def _checkpoint_generator(original: Function, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    return original(function if is_compiling() else _recomputing(function), *args, **kwargs)


@while_marks_live.replaces(checkpoint.CheckpointFunction, "forward", reason=RECOMPUTES)
def _forward(original: Function, ctx: Any, run_function: Function, *args: Any) -> Any:
    outputs = original(ctx, run_function, *args)
    ctx.run_function = _recomputing(run_function)
    return outputs


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` in the regions of the forward pass. `checkpoint` itself enters PyTorch's regions only."""
    has_region_decided = _C.is_region_deciding()
    is_self_cleaning = _C.is_in_self_cleaning_region()
    held = while_marks_live.token()  # recomputed tensors are marked again

    @wraps(function)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        assert held is not None
        with _self_cleaning_again() if is_self_cleaning else nullcontext():
            return _C.call_recomputing(has_region_decided, function, *args, **kwargs)

    return recompute


def _self_cleaning_again() -> ExitStack:
    """Enter a self-cleaning region with the current autocast state, and a disabled region in it if autocast is off."""
    in_use = _C.autocast_device_type_in_use()
    enabled = [device_type for device_type in (in_use, "cpu") if torch.is_autocast_enabled(device_type)]
    device_type = enabled[0] if enabled else in_use
    dtype, is_caching = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    stack = ExitStack()
    stack.enter_context(_C.AutocastRegion(device_type, dtype=dtype, cache_enabled=is_caching, self_cleaning=True))
    if not enabled:
        stack.enter_context(_C.AutocastRegion(device_type, enabled=False))
    return stack


# ---- Compiled and exported code
#
# Code that AOTAutograd compiles turns autocast off: NOTE [Compiled code in regions].


@while_marks_live.replaces(torch._C._DisableAutocast, "__enter__", reason="turns autocast off in compiled code")
def _enter(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    _C.enter_compiled_code()
    try:
        return original(*args, **kwargs)
    except BaseException:
        _C.leave_compiled_code()
        raise


@while_marks_live.replaces(torch._C._DisableAutocast, "__exit__", reason="turns autocast off in compiled code")
def _exit(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        _C.leave_compiled_code()


@while_marks_live.replaces(
    "torch._decomp.decompositions_for_rng:PhiloxState",
    "reset",
    reason="keeps tensors of the last region that compiled code",
)
def _reset(original: Function, self: Any) -> None:
    """AOTAutograd keeps the tensors of `PhiloxState` after compiling, the last ones permanently."""
    original(self)
    for tensor in (self.seed, self.base_offset):
        _C.unwrap_amp(tensor)  # created in the region that compiles


@while_marks_live.replaces("torch.export._trace", "_export", "_export_for_training", reason="exports without marks")
def _export(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    for leaf in pytree.tree_leaves((args, kwargs)):
        # Tensors in attributes are not checked: a module may not use them.
        held = chain(leaf.parameters(), leaf.buffers()) if isinstance(leaf, nn.Module) else tensors_in(leaf)
        if any(map(_C.is_amp, held)):
            raise NotImplementedError(
                f"torch.export was given AmpTensors, in a {type(leaf).__name__}: an exported program has none. "
                "Call amp.to_normal(), and enter amp.autocast() in the exported module."
            )
    return original(*args, **kwargs)


# ---- Regions in function modes, for non-strict `torch.export`


_torch: Any = torch


def _tell_modes(region: _C.AutocastRegion, begins: bool) -> None:
    """Report a region. The core calls this when a region begins or ends while a function mode is active."""
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None:
        return  # nothing is being exported
    for mode in _torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, module.PreDispatchTorchFunctionMode):
            _trace(mode, region, begins)


def _trace(mode: Any, region: _C.AutocastRegion, begins: bool) -> None:
    if region.self_cleaning:
        raise NotImplementedError(
            "torch.export cannot trace a self-cleaning region: an exported program has no AmpTensors. Export with "
            "amp.autocast(), and cast what leaves the region."
        )
    if begins:
        device_type = region.device_type or _C.autocast_device_type_in_use()
        state = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        mode.__torch_function__(_torch.amp._enter_autocast, (), state)
    else:
        mode.__torch_function__(_torch.amp._exit_autocast, (), ())


_C.provide("notify_modes", _tell_modes)
