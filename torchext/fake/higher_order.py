"""Higher-order operators (`torch.cond`, `scan`, `while_loop`, `flex_attention`, ...) on fake and deferred tensors.

They are Python functions, which choose among the implementations that they were given by the highest dispatch key
(`HigherOrderOperator.dispatch`). Ours is found there for all of them, those that are defined later included:

- values are read where they exist, so with deferred tensors the implementation for real ones runs, and what it calls is
  recorded;
- of fakes it is told what `FakeTensorMode` is told. An operator has a function for that, which calls operators, or, if
  it decides by a value, one of the rules below.

Called eagerly, most of them go through `torch.compile` first, whose graphs hold neither fakes nor recordings. That is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch._higher_order_ops.utils as hop_utils
from torch import Tensor, _ops
from torch.compiler import set_stance
from torch.utils import _pytree as pytree

from .. import _C
from ..errors import DataDependentError
from ..tools.dispatch_keys import is_constructing, making_fakes
from ..tools.higher_order_keys import pass_by
from ..tools.leases import while_fakes_live
from .flex_attention import KERNEL_OF, attends_by_kernel, call_kernel

__all__ = ["install"]

_torch: Any = torch._C
_parse: Callable[[str], Any] = _torch._parse_dispatch_key
_FAKE: Any = _parse("Fake")
_AUTOGRAD: Any = _parse("AutogradFunctionality")


def install() -> None:
    """Installs the patches."""
    pass_by(while_fakes_live)
    while_fakes_live.patch(
        _ops.HigherOrderOperator, "dispatch", _meeting_ours, "chooses by the highest key, and knows none of ours"
    )
    if hasattr(hop_utils, "_hop_compile_and_call"):
        while_fakes_live.patch(hop_utils, "_hop_compile_and_call", _not_compiling, "compiles what is called eagerly")
    # Of those that call `torch.compile` themselves, as flex_attention.
    while_fakes_live.patch(hop_utils, "setup_compilation_env", _eager_on_our_thread, "prepares for compilation")


def _meeting_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Any, dispatch_key: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_met_at(dispatch_key):
            return original(self, dispatch_key, *args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        if not any(map(_C.is_fake, tensors)) and (dispatch_key != _FAKE or not _C.are_factories_fake()):
            return original(self, dispatch_key, *args, **kwargs)
        backend = _parse("CUDA" if any(tensor.is_cuda for tensor in tensors) else "CPU")

        def run() -> Any:
            return original(self, backend, *args, **kwargs)

        if tensors and all(_C.is_deferred(tensor) or not _C.is_fake(tensor) for tensor in tensors):
            return run()
        is_differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with making_fakes():  # what an implementation allocates for its results
            return _run_on_fakes(self, run, is_differentiated, args, kwargs)

    return dispatch


def _is_met_at(key: Any) -> bool:
    """Returns true if ours goes before the implementation for `key`.

    Those for autograd differentiate what `torch.compile` makes of the functions: it turns tensors that these have
    closed over into arguments. Called as they are, autograd differentiates them as any other code.
    """
    return isinstance(key, _torch.DispatchKey) and (key == _FAKE or _torch._to_functionality_key(key) == _AUTOGRAD)


def _run_on_fakes(
    op: Any, run: Callable[[], Any], is_differentiated: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    fake_function = getattr(hop_utils, "registered_hop_fake_fns", {}).get(op)
    is_attention = op.name() == KERNEL_OF and not kwargs
    if fake_function is not None and is_attention and attends_by_kernel() and is_differentiated:
        captured = [tensor for tensor in _tensors(args[3:]) if _C.is_fake(tensor) and tensor.requires_grad]
        return call_kernel(op, args[:3], args[3:], captured)
    # Attention that is not compiled computes all scores.
    if fake_function is not None and not is_differentiated and (not is_attention or attends_by_kernel()):
        return fake_function(*args, **kwargs)
    if op.name() == "cond" and torch.is_grad_enabled() and _C.is_fake(args[0]):
        # Autograd gives gradients to what either branch uses (`CondAutogradOp`), even if the predicate is known.
        return _merge_branches(*args, **kwargs)
    try:
        return run()
    except DataDependentError:
        rule = _RULES.get(op.name())
        if rule is None:
            raise
        return rule(*args, **kwargs)


def _merge_branches(pred: object, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    """What both branches of `torch.cond` return, as a result of both."""
    found, spec = pytree.tree_flatten(true_fn(*operands))
    others, other_spec = pytree.tree_flatten(false_fn(*operands))
    if spec != other_spec:
        raise RuntimeError(
            f"Unmatched output spec from torch.cond branches: true branch tree_spec {spec} vs false branch tree_spec "
            f"{other_spec}."
        )
    return pytree.tree_unflatten([_merge(pred, *outcomes) for outcomes in zip(found, others, strict=True)], spec)


def _merge(pred: object, if_true: object, if_false: object) -> object:
    if _metadata(if_true) != _metadata(if_false):
        raise _data_dependent(
            "torch.cond",
            f"returns {_metadata(if_true)} if true and {_metadata(if_false)} if false, so that what it returns",
        )
    if not isinstance(if_true, Tensor) or not isinstance(if_false, Tensor):
        return if_true
    return torch.where(cast("Tensor", pred), if_true, if_false)


def _run_body_once(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Any,
    additional_inputs: Any = (),
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What the body of `while_loop` returns, which looks like what it is given."""
    cond_fn(*carried_inputs, *additional_inputs)
    results = body_fn(*carried_inputs, *additional_inputs)
    wanted, found = pytree.tree_leaves(carried_inputs), pytree.tree_leaves(results)
    if len(wanted) != len(found) or any(
        _metadata(a)[:-1] != _metadata(b)[:-1] for a, b in zip(wanted, found, strict=True)
    ):
        raise RuntimeError(
            "torch.while_loop: expected carried_inputs and body_output to have the same metadata, but found "
            f"{[_metadata(a) for a in wanted]} and {[_metadata(b) for b in found]}."
        )
    if any(isinstance(result, int) for result in found):
        raise _data_dependent("torch.while_loop", "carries a number, which")
    return results


_RULES: dict[str, Callable[..., Any]] = {"cond": _merge_branches, "while_loop": _run_body_once}


def _metadata(value: object) -> tuple[object, ...]:
    if not isinstance(value, Tensor):
        return (value,)
    return tuple(value.shape), value.dtype, value.device, value.layout, value.stride()


def _data_dependent(name: str, what: str) -> Exception:
    return DataDependentError(
        f"`{name}` {what} depends on the values of fake tensors, which have none. Run it on real tensors, or move it "
        "out of the code that runs on fake tensors."
    )


def _not_compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        return fn(*args, **(kwargs or {})) if _is_about_ours((args, kwargs)) else original(fn, args, kwargs)

    return call


def _eager_on_our_thread(original: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @contextmanager
    @wraps(original)  # the name for errors
    def setup_compilation_env() -> Iterator[Any]:
        with original() as backend, set_stance("force_eager") if _is_on_our_thread() else nullcontext():
            yield backend

    return setup_compilation_env


def _is_on_our_thread() -> bool:
    return _C.are_factories_fake() or is_constructing()


def _is_about_ours(values: object) -> bool:
    return _is_on_our_thread() or any(map(_C.is_fake, _tensors(values)))


def _tensors(values: object) -> Iterator[Tensor]:
    """The tensors in `values`, and those that functions and modules there hold, have closed over or know globally."""
    seen: set[int] = set()
    waiting = pytree.tree_leaves(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            waiting += [*value.parameters(), *value.buffers()]
        elif callable(value):
            waiting += pytree.tree_leaves(_held_by(value))


def _held_by(function: Any) -> list[object]:
    if isinstance(function, partial):
        return [function.func, function.args, function.keywords]
    if isinstance(function, MethodType):
        return [function.__func__, function.__self__]
    if not isinstance(function, FunctionType):
        return []
    held: list[object] = [function.__globals__.get(name) for name in function.__code__.co_names]
    held = [value for value in held if isinstance(value, Tensor)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            held.append(cell.cell_contents)
    return held
