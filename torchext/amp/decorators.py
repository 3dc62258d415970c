"""Decorators for autocast and for one precision, of functions, methods, modules and autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from ..internals.calls import Call, Way, call_in_way

__all__ = [
    "Autocasting",
    "InFloat32",
    "InLowerPrecision",
    "can_autocast",
    "decorate",
    "in_region",
    "is_outermost",
    "to_float32",
    "to_lower_precision",
]

T = TypeVar("T", bound=Callable[..., Any])
StateOfDevice = tuple[str, bool, torch.dtype]
State = tuple[StateOfDevice, StateOfDevice]

is_outermost: Callable[[_C.AutocastRegion], bool] = _C.AutocastRegion._is_outermost


class Autocasting:
    """Run functions in `region`, and cast their results to float32 for callers without autocast."""

    def __init__(self, region: _C.AutocastRegion) -> None:
        self.region = region
        self._is_enabled = region.enabled

    def __call__(self) -> Call:
        """Return the parts of one call."""
        return Call(self._where_needed, cast_out=self._cast_out) if self._is_enabled else Call(lambda: self.region)

    def plain(self, function: T) -> T:
        """Return the wrapper of a plain function, which needs no object for each call."""
        return in_region(self.region, self._is_enabled, function)

    def _where_needed(self) -> AbstractContextManager[object]:
        return self.region if is_outermost(self.region) else nullcontext()

    def _cast_out(self, results: Any) -> Any:
        return to_float32(results) if is_outermost(self.region) else results


def in_region(region: _C.AutocastRegion, is_enabled: bool, function: T) -> T:
    """Return a function that runs the plain function `function` in `region`.

    Args:
        region: The region.
        is_enabled: `region.enabled`.
        function: The function. `torch.compile` traces into this function and into the one that it returns.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_enabled and not is_outermost(region):
            return function(*args, **kwargs)
        with region:
            result = function(*args, **kwargs)
        return to_float32(result) if is_enabled else result

    return cast("T", run)


class InFloat32:
    """Run functions without autocast on float32, with float32 results."""

    def __call__(self) -> Call:
        """Return the parts of one call."""
        return Call(_no_autocast, cast_in=to_float32, cast_out=to_float32)

    def plain(self, function: T) -> T:
        """Return the wrapper of a plain function, which needs no object for each call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _OFF_ON_CPU, _OFF_IN_USE:
                args, kwargs = to_float32((args, kwargs))
                result = function(*args, **kwargs)
            return to_float32(result)

        return cast("T", run)


class InLowerPrecision:
    """Run functions in the lower precision, where operators autocast."""

    def __call__(self) -> Call:
        """Return the parts of one call."""
        return Call(cast_in=to_lower_precision)


def decorate(target: T, way: Way) -> T:
    """Return `target`, decorated to run in the given way.

    Args:
        target: A function of any kind; or a module, a class of modules, or a class of autograd functions, which are
            changed in place.
        way: The way to run it.

    Raises:
        TypeError: `target` is of another type.
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise TypeError("torchext.amp does not decorate scripted modules: decorate their callers.")
    if isinstance(target, nn.Module):
        _decorate_module(target, way)
        return target
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        _decorate_autograd_function(target, way)
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = decorate(target.forward, way)
        initialized = getattr(target, "cls_to_become", None)
        if initialized is not None:  # the class of an initialized lazy module
            target.cls_to_become = _class_of_one(initialized, (way,))  # type: ignore[attr-defined]
        return target
    if isinstance(target, type) or not (callable(target) or isinstance(target, classmethod)):
        what = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        raise TypeError(
            "torchext.amp decorates functions, methods, modules, and classes that derive from torch.nn.Module or "
            f"torch.autograd.Function, but this is {what}."
        )
    if isinstance(target, staticmethod | classmethod):
        return type(target)(decorate(target.__func__, way))
    return call_in_way(way, target, getattr(way, "plain", None))


def _decorate_module(module: nn.Module, way: Way) -> None:
    """Give `module` its own class, as `torch.nn.utils.parametrize` does.

    A `forward` in its `__dict__` would stay bound to it: copies, and the replicas of DataParallel, copy the `__dict__`
    and would run on the original.
    """
    if "forward" in vars(module):
        module.forward = decorate(module.forward, way)
        return
    cls = type(module)
    original, ways = vars(cls).get("_amp_original", (cls, ()))
    module.__class__ = _class_of_one(original, (*ways, way))


def _class_of_one(original: type[nn.Module], ways: tuple[Way, ...]) -> type[nn.Module]:
    forward = original.forward
    for way in ways:
        forward = decorate(forward, way)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        make, args, *rest = cast("tuple[Any, ...]", original.__reduce_ex__(self, protocol))
        return _remake_one, (ways, *(original if part is type(self) else part for part in (make, *args))), *rest

    members: dict[str, Any] = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_amp_original": (original, ways),
    }
    initialized = getattr(original, "cls_to_become", None)
    if initialized is not None:  # the class of an initialized lazy module
        members["cls_to_become"] = _class_of_one(initialized, ways)
    return type(original.__name__, (original,), members)


def _remake_one(ways: tuple[Way, ...], make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    module = make(*args)
    for way in ways:
        _decorate_module(module, way)
    return module


def _decorate_autograd_function(cls: type[torch.autograd.Function], way: Way) -> None:
    """Run backward as forward: with the same autocast state, and with arguments cast in the same way."""
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    forward, setup_context = cls.forward, cls.setup_context
    # PyTorch raises for functions that have both.
    backward_name = "backward" if cls.vjp is torch.autograd.Function.vjp else "vjp"
    backward = getattr(cls, backward_name)

    def recorded() -> Call:
        """Return a call that casts in grad mode, so that saved tensors can be differentiated twice."""
        call = way()
        return Call(call.guard, torch.enable_grad()(call.cast_in), call.cast_out)

    @wraps(forward)
    def wrapped_forward(*args: Any, **kwargs: Any) -> Any:
        if has_context:
            args[0]._amp_state = _autocast_state()
        return forward(*args, **kwargs)

    @wraps(setup_context)
    def wrapped_setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        call = recorded()
        with call.guard():
            ctx._amp_state = _autocast_state()
            inputs = call.cast_in(inputs)
        return setup_context(ctx, inputs, output)

    @wraps(backward)
    def wrapped_backward(ctx: Any, *grads: Any) -> Any:
        with _in_state(ctx._amp_state):
            return backward(ctx, *way().cast_in(grads))

    cls.forward = staticmethod(call_in_way(recorded, wrapped_forward))  # type: ignore[method-assign]
    setattr(cls, backward_name, staticmethod(wrapped_backward))
    if not has_context:
        cls.setup_context = staticmethod(wrapped_setup_context)  # type: ignore[method-assign]


# Of the CPU, and of the accelerator in use when the region is entered.
_OFF_ON_CPU = _C.AutocastRegion("cpu", enabled=False)
_OFF_IN_USE = _C.AutocastRegion(enabled=False)


@contextmanager
def _no_autocast() -> Iterator[None]:
    with _OFF_ON_CPU, _OFF_IN_USE:
        yield


def _autocast_state() -> State:
    """Return the autocast state of the CPU and of the accelerator in use."""
    in_use = _C.autocast_device_type_in_use()
    return _state_for("cpu"), _state_for(in_use)


def _state_for(device_type: str) -> StateOfDevice:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


@contextmanager
def _in_state(state: State) -> Iterator[None]:
    with _region_of(state[0]), _region_of(state[1]):
        yield


def _region_of(state: StateOfDevice) -> _C.AutocastRegion:
    device_type, is_enabled, dtype = state
    return _C.AutocastRegion(device_type, dtype=dtype, enabled=is_enabled)


# ---- Casts of the arguments and the results of a function


R = TypeVar("R")


def to_float32(tree: R) -> R:
    """Return `tree` with its floating point tensors in float32. Autocast does not cast float64 tensors."""
    if isinstance(tree, Tensor):  # the common case
        is_cast = tree.dtype is not torch.float32 and tree.dtype is not torch.float64 and tree.is_floating_point()
        return tree.float() if is_cast else tree  # type: ignore[return-value]
    return _map(tree, lambda tensor: torch.float32)


def to_lower_precision(tree: R) -> R:
    """Return `tree` with its floating point tensors in the dtype to which operators cast them now.

    float64 tensors, and tensors on devices without autocast, do not change.
    """
    return _map(tree, _lower_dtype)


def _lower_dtype(tensor: Tensor) -> torch.dtype:
    device_type = tensor.device.type
    if can_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return tensor.dtype


def can_autocast(device_type: str) -> bool:
    """Return True if `device_type` has autocast. A separate function, because `torch.compile` treats it specially."""
    return torch.amp.is_autocast_available(device_type)


def _map(tree: R, dtype_of: Callable[[Tensor], torch.dtype]) -> R:
    def cast(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype is torch.float64:
            return leaf
        dtype = dtype_of(leaf)
        return leaf if leaf.dtype is dtype else leaf.to(dtype)

    if isinstance(tree, Tensor):
        return cast(tree)  # type: ignore[return-value]
    leaves, structure = pytree.tree_flatten(tree)
    done = [cast(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(done, leaves, strict=True)):
        return tree  # the same object, with its identity and everything in it besides the leaves
    result: R = pytree.tree_unflatten(done, structure)
    return result
