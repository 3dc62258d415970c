"""Autocast: operators choose the precision in which they run, on PyTorch's own `Autocast*` keys and kernels.

There are four ways to use it: the context manager `autocast()`; the decorators `autocast`, `full_precision` and
`lower_precision`; AmpTensors, which `to_amp()` returns; and self-cleaning regions, `autocast(self_cleaning=True)`.
docs/how_to/autocast.md compares them. `register_policy()` makes operators of other libraries autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from .. import _C
from ..internals.arguments import renamed_names
from ..internals.calls import Call, Way, call_in_way
from .amp_tensor import AmpTensor, is_amp, to_amp, to_normal

__all__ = [
    "AmpTensor",
    "autocast",
    "full_precision",
    "is_amp",
    "lower_precision",
    "policy",
    "register_policy",
    "to_amp",
    "to_normal",
]


# ---- Decorators for autocast and for one precision, of functions, methods, modules and autograd functions


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


# ---- Autocast: operators choose the precision in which they run, on PyTorch's own `Autocast*` keys and kernels


if not TYPE_CHECKING:
    __getattr__ = renamed_names(
        __name__, float="full_precision", half="lower_precision", wrap="to_amp", unwrap="to_normal"
    )


def __dir__() -> list[str]:
    return __all__


class autocast(_C.AutocastRegion):  # noqa: N801 - a function to its users, as torch.autocast is
    """A region in which operators autocast: `with autocast(): ...`.

    It sets the same thread-local state as `torch.autocast`, so both report and respect each other's settings. Regions
    nest, including disabled regions in enabled ones and regions of different dtypes. One object can be entered any
    number of times, on any thread. When the last region of the thread ends, PyTorch drops the cached casts of weights.
    Enabling autocast for a device type that this machine lacks has no effect on tensors on other devices.

    Running `backward()` in an enabled region warns once for each source line.

    As a decorator, `@autocast` or `@autocast("cuda", dtype=...)`, it runs a function in such a region. If operators do
    not autocast for the device type outside of the call, the floating point tensors that the function returns, in any
    container that `torch.utils._pytree` handles, are cast to float32. Otherwise they are returned unchanged. Methods,
    generators, `async def` functions, modules and their classes, and classes of autograd functions can be decorated.
    The `backward` of an autograd function runs as its `forward` did.

    Args:
        device_type: The device type, as in `tensor.device.type`. Default: the accelerator in use (the fake one inside
            `fake_mode(gpu=...)`), or the CPU.
        dtype: The lower precision, `torch.bfloat16` or `torch.float16`. Default: the result of
            `torch.get_autocast_dtype(device_type)`. Other dtypes disable the region, with a warning, on all devices
            except CUDA.
        enabled: Whether operators autocast.
        cache_enabled: Whether the casts of weights are cached, so that each weight is cast once. Default: as outside of
            the region; True outside of all regions.
        self_cleaning: Whether the results of operators in the region are AmpTensors (`is_amp()`). The next operator
            that does not autocast casts them to float32: its results are ordinary tensors, and no operator gets a
            mixture of dtypes. Views of an AmpTensor are AmpTensors. So are tensors written in place, which keep their
            dtype.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The device type does not exist.

    Example:
        >>> with autocast("cpu"):
        ...     torch.ones(2, 2) @ torch.ones(2, 2)
        tensor([[2., 2.],
                [2., 2.]], dtype=torch.bfloat16)
    """

    __slots__ = ()

    def __call__(self, function: T) -> T:
        """Decorate `function`."""
        return decorate(function, Autocasting(self))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_region, self._arguments()

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache_enabled, self_cleaning = self._arguments()
        return f"autocast({device_type!r}, {dtype=}, {enabled=}, {cache_enabled=}, {self_cleaning=})"


def _make_region(
    device_type: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, self_cleaning: bool
) -> autocast:
    return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled, self_cleaning=self_cleaning)


def full_precision(function: T) -> T:
    """Run a function in full precision: without autocast, on float32, with float32 results. A decorator.

    The floating point tensors among the arguments and the results, in any container that `torch.utils._pytree` handles,
    are cast. float64 tensors and other objects are passed unchanged.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`). Parameters of modules are not arguments, and are not cast.

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InFloat32())


def lower_precision(function: T) -> T:
    """Cast the floating point arguments of a function to the lower precision of the region around the call.

    Use it for kernels that do not autocast, because PyTorch's dispatcher does not call them. float64 arguments are not
    cast, and neither are arguments on devices for which operators do not autocast.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`).

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InLowerPrecision())


# ---- The autocast policies of operators


# In the order of `CastPolicy` of csrc/extensions/amp/policies.h.
POLICIES = ("lower_precision", "float32", "promote", "fallthrough")
DEVICE_TYPES = ("cpu", "cuda")

Operator = str | OpOverload | OpOverloadPacket | CustomOpDef


def register_policy(op: Operator, policy: str, device_types: Iterable[str] = DEVICE_TYPES) -> None:
    """Register an operator for autocast: in a region its floating point arguments are cast before it runs.

    For operators that `torch.library` or `TORCH_LIBRARY` define, until the process ends. float64 tensors, and tensors
    on other devices, are not cast. Gradients flow through the casts.

    Args:
        op: The operator, as `torch.ops.mylib.op`, the result of `torch.library.custom_op`, or its name, "mylib::op".
            All overloads, unless one is given: `torch.ops.mylib.op.default`, "mylib::op.overload".
        policy: "lower_precision" casts to the dtype of the region; "float32" casts to float32; "promote" casts to the
            widest dtype among the arguments (float32 for bfloat16 and float16); "fallthrough" casts nothing.
        device_types: The device types of the tensors: "cpu", "cuda".

    Raises:
        TypeError: `op` is not an operator, or `device_types` are not names.
        ValueError: The operator, policy or device type does not exist; or the operator writes into an argument or
            returns a view of one; or it has a policy already, from PyTorch, `torch.library.register_autocast` or this
            function. Nothing is registered then.
    """
    if policy not in POLICIES:
        raise ValueError(f"There is no policy {policy!r}. Choose one of {', '.join(POLICIES)}.")
    if not isinstance(device_types, Iterable):
        raise TypeError(f"`device_types` names devices, as ('cpu', 'cuda'), but it is a {type(device_types).__name__}.")
    types = list(dict.fromkeys([device_types] if isinstance(device_types, str) else device_types))
    for device_type in types:
        _check_device_type(device_type)
    _C.register_policy(_overloads(op), POLICIES.index(policy), list(map(torch.device, types)))


def policy(op: Operator, device_type: str) -> str:
    """Return the autocast policy of an operator, from PyTorch or from `register_policy()`.

    The policy is measured by calling PyTorch's kernel, not read from a list: csrc/extensions/amp/policies.h.

    Args:
        op: The operator, as for `register_policy()`. Without an overload, its default overload if it has one.
        device_type: The device type of the tensors: "cpu" or "cuda".

    Returns:
        "lower_precision", "float32", "promote", "fallthrough", or "banned" if the operator raises an error. An operator
        that falls through may call others that do not.

    Raises:
        TypeError: `op` is not an operator.
        ValueError: The operator or the device type does not exist, or its overloads have different policies.

    Example:
        >>> policy(torch.ops.aten.mm.default, "cpu")
        'lower_precision'
    """
    _check_device_type(device_type)
    numbers = {overload: _C.policy(name, overload, torch.device(device_type)) for name, overload in _overloads(op)}
    found = {overload: (*POLICIES, "banned")[number] for overload, number in numbers.items()}
    if "" in found:
        return found[""]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{overload or 'default'}: {found[overload]}" for overload in found)
        raise ValueError(f"The overloads of {op} are treated differently on {device_type!r}: {listed}. Name one.")
    return next(iter(found.values()))


def _check_device_type(device_type: Any) -> None:
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"Policies are for the device types {DEVICE_TYPES}, but {device_type!r} was given.")


def _overloads(op: Any) -> list[tuple[str, str]]:
    """Return the name of the operator with each of its overloads."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return [(op._schema.name, op._schema.overload_name)]
    if isinstance(op, OpOverloadPacket):
        return [(op._qualified_op_name, "" if name == "default" else name) for name in op.overloads()]
    if not isinstance(op, str):
        raise TypeError(
            "`op`: expected an operator, such as torch.ops.aten.mm, or a name, such as 'aten::mm', got "
            f"{type(op).__name__}: {op!r}."
        )
    name, _, overload = op.partition(".")
    if overload or "::" not in name:
        return [(name, "" if overload == "default" else overload)]
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return [(name, schema.overload_name) for schema in schemas] or [(name, "")]
