"""Autocast regions in traced code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from .. import _C, amp
from ..amp import casts, decorators
from .entered import Guard, enter, leave
from .results import results_of
from .variables import FunctionOfOurs, GuardClass, break_graph, guard_attributes, guard_class, inline

__all__ = ["BY_OBJECT", "BY_TYPE"]

Translator = Any

ARGUMENTS = ("device_type", "dtype", "enabled", "cache_enabled", "self_cleaning")


class RegionVariable(ContextWrappingVariable):
    """A region. It is really open while Dynamo traces, so that reads of the autocast state are correct.

    In the graph it is `torch.amp._enter_autocast()`, which backends and `torch.export` support.
    """

    def __init__(self, region: _C.AutocastRegion, **options: Any) -> None:
        super().__init__(target_values=region._arguments(), **options)
        self.region = region
        self.open: list[_OpenRegion] = []

    def enter(self, tx: Translator) -> VariableTracker:
        """Enter the region."""
        self.open.append(_OpenRegion(tx, self.region))
        return self

    def exit(self, tx: Translator, *args: VariableTracker) -> VariableTracker:
        """Leave the innermost region."""
        self.open.pop().close(tx)
        return ConstantVariable.create(None)

    def call_function(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Decorate a function that the traced code has made."""
        is_enabled = ConstantVariable.create(self.region.enabled)
        return inline(tx, decorators.in_region, [self, is_enabled, *args], kwargs)

    def is_outermost(self, tx: Translator) -> VariableTracker:
        """Return the result of `region._is_outermost()`. Dynamo guards the state that it depends on."""
        return ConstantVariable.create(self.region._is_outermost())

    def python_type(self) -> type:
        """Return the type of the region."""
        return type(self.region)

    def module_name(self) -> str:
        """Return the module from which Dynamo recreates the region after a graph break."""
        return "torchext.amp"

    def fn_name(self) -> str:
        """Return the function that recreates the region from `target_values`."""
        return "_make_region"


_amp: Any = torch.amp  # graphs use these functions although they are not exported


class _OpenRegion:
    """A region that is open in the graph, and while Dynamo traces."""

    def __init__(self, tx: Translator, region: _C.AutocastRegion) -> None:
        results = results_of(tx.output)  # restores the state after errors
        if region.self_cleaning:
            _check_not_exported(tx)
            results.call_operators("enters a self-cleaning region")
        device_type = region.device_type or _C.autocast_device_type_in_use()
        around = torch.get_autocast_dtype(device_type)
        self._leave: Callable[[], None] | None = lambda: region.__exit__(None, None, None)
        region.__enter__()
        tx.output.add_cleanup_hook(self._close_in_earnest)
        state = State(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        self._exit: Callable[..., None] | None = None
        if region.self_cleaning:
            self._node, self._exit = _call(tx, enter_self_cleaning, *state), leave
        elif _has_device_type(device_type):
            self._node, self._exit = _call(tx, _amp._enter_autocast, *state), _amp._exit_autocast
        # Like the region: NOTE [Autocast regions]. PyTorch's region would reuse the casts of the surrounding dtype.
        self._forgets_casts = state.dtype is not around and not tx.output.export
        self._forget_casts(tx)

    def close(self, tx: Translator) -> None:
        self._close_in_earnest()
        if self._exit is not None:
            _call(tx, self._exit, self._node)
            self._forget_casts(tx)

    def _close_in_earnest(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _forget_casts(self, tx: Translator) -> None:
        if self._forgets_casts:
            _call(tx, torch.clear_autocast_cache)


class State(NamedTuple):
    """The arguments of `torch.autocast`, in order."""

    device_type: str
    dtype: torch.dtype
    is_enabled: bool
    is_caching: bool


def enter_self_cleaning(device_type: str, dtype: torch.dtype, is_enabled: bool, is_caching: bool) -> Guard:
    """Enters a self-cleaning region, in a graph that no backend compiles."""
    return enter(
        _C.AutocastRegion(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching, self_cleaning=True)
    )


def _check_not_exported(tx: Translator) -> None:
    if tx.output.export:
        break_graph(
            "self-cleaning region in torch.export",
            "An exported program has no AmpTensors: export it with amp.autocast(), and cast the tensors that leave the "
            "region.",
        )


def _call(tx: Translator, function: Callable[..., object], *args: Any) -> Any:
    return tx.output.create_node("call_function", function, args, {})


def _has_device_type(device_type: str) -> bool:
    """Return true if the machine has the device type. Otherwise `torch.autocast` warns, and no tensors can be there."""
    return device_type != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available()


class RegionClass(GuardClass):
    """The class `torchext.amp.autocast`."""

    def variable(self, guard: _C.AutocastRegion) -> VariableTracker:
        """Return the variable for a region."""
        return RegionVariable(guard)


def _wrap_region(builder: Any, value: _C.AutocastRegion) -> VariableTracker:
    guard_attributes(builder, ARGUMENTS)
    return RegionVariable(value, source=builder.source)


def _wrap_class(builder: Any, value: type) -> VariableTracker:
    guard_class(builder)
    return RegionClass(value, source=builder.source)


def _device_type_in_use(tx: Translator) -> VariableTracker:
    return ConstantVariable.create(_C.autocast_device_type_in_use())


def _can_autocast(tx: Translator, device_type: VariableTracker) -> VariableTracker:
    return ConstantVariable.create(casts.can_autocast(device_type.as_python_constant()))


class AmpTensorClass(UserDefinedClassVariable):
    """The class `AmpTensor`. For Dynamo a tensor is an instance of its type, which is not AmpTensor."""

    def as_python_constant(self) -> Any:
        """Raise a graph break: `isinstance()` calls this."""
        break_graph("isinstance() of AmpTensor", "Dynamo does not call AmpTensor.__instancecheck__(): call is_amp().")


def _wrap_amp_tensor_class(builder: Any, value: type) -> VariableTracker:
    guard_class(builder)
    return AmpTensorClass(value, source=builder.source)


def _is_amp(tx: Translator, tensor: VariableTracker) -> VariableTracker:
    if not isinstance(tensor, TensorVariable):
        break_graph("is_amp() of an object other than a tensor", "The program raises an error there.")
    return ConstantVariable.create(_C.is_amp(tensor.as_proxy().node.meta["example_value"]))


BY_TYPE: dict[type, Any] = {amp.autocast: _wrap_region, _C.AutocastRegion: _wrap_region}
BY_OBJECT = [
    (amp.autocast, _wrap_class),
    (_C.AutocastRegion, _wrap_class),
    (decorators.is_outermost, FunctionOfOurs.wrap(lambda tx, region: region.is_outermost(tx))),
    (amp.AmpTensor, _wrap_amp_tensor_class),
    (_C.is_amp, FunctionOfOurs.wrap(_is_amp)),
    (casts.can_autocast, FunctionOfOurs.wrap(_can_autocast)),
    (_C.autocast_device_type_in_use, FunctionOfOurs.wrap(_device_type_in_use)),
]
