"""Higher-order operators on fake and deferred tensors, and functions that communicate metadata in tensors.

Higher-order operators (`torch.cond`, `scan`, `while_loop`, `flex_attention`, ...) are Python functions that choose a
registered implementation by the highest dispatch key (`HigherOrderOperator.dispatch`). The patch of this method
provides ours, also for operators that are defined later:

- Deferred tensors have values, so the implementation for real tensors runs, and the operators that it calls are
  recorded.
- For fakes, the operator's rule for `FakeTensorMode` runs, which calls operators. If it depends on a value, one of the
  rules below applies.

When called eagerly, most of them first go through `torch.compile`, whose graphs hold neither fakes nor recordings. This
step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch._higher_order_ops.utils as hop_utils
import torch.distributed as dist
from torch import Tensor, _ops
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.autograd.function import once_differentiable
from torch.compiler import set_stance
from torch.utils import _pytree as pytree

from .. import _C
from ..errors import DataDependentError
from ..internals.dispatch_keys import call_on_real_tensors, is_constructing, making_fakes
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__ = [
    "KERNEL_OF",
    "attending_by_kernel",
    "call_kernel",
    "is_flex_attention_compiled",
    "may_not_run",
    "that_may_not_run",
]

_torch: Any = torch._C
_parse: Callable[[str], Any] = _torch._parse_dispatch_key
_FAKE: Any = _parse("Fake")
_AUTOGRAD: Any = _parse("AutogradFunctionality")


@while_fakes_live.replaces(_ops.HigherOrderOperator, "dispatch", reason="has no implementation for our keys")
def _dispatch(original: Function, self: Any, dispatch_key: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not _takes_precedence(dispatch_key):
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
    with making_fakes():  # for results that an implementation allocates
        return _run_on_fakes(self, run, is_differentiated, args, kwargs)


def _takes_precedence(key: Any) -> bool:
    """Return true if ours takes precedence over the implementation for `key`.

    Implementations for autograd differentiate the functions as `torch.compile` transforms them: it turns tensors in
    closures into arguments. Called directly, the functions are differentiated by autograd like other code.
    """
    return isinstance(key, _torch.DispatchKey) and (key == _FAKE or _torch._to_functionality_key(key) == _AUTOGRAD)


def _run_on_fakes(
    op: Any, run: Callable[[], Any], is_differentiated: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if op.name() == "inductor_compiled_code":
        return run()  # its rule runs the graph before compilation
    fake_function = getattr(hop_utils, "registered_hop_fake_fns", {}).get(op)
    is_attention = op.name() == KERNEL_OF and not kwargs
    if fake_function is not None and is_attention and is_flex_attention_compiled() and is_differentiated:
        captured = [tensor for tensor in _tensors(args[3:]) if _C.is_fake(tensor) and tensor.requires_grad]
        return call_kernel(op, args[:3], args[3:], captured)
    # Attention that is not compiled computes all scores.
    if fake_function is not None and not is_differentiated and (not is_attention or is_flex_attention_compiled()):
        return fake_function(*args, **kwargs)
    if op.name() == "cond" and torch.is_grad_enabled() and _C.is_fake(args[0]):
        # Autograd returns gradients for the inputs of either branch (`CondAutogradOp`), even if the predicate is known.
        return _merge_branches(*args, **kwargs)
    try:
        return run()
    except DataDependentError:
        rule = _RULES.get(op.name())
        if rule is None:
            raise
        return rule(*args, **kwargs)


may_not_run: ContextVar[bool] = ContextVar("may_not_run", default=False)
"""Whether the running operators are in a branch or a loop that a real program may skip."""


@contextmanager
def that_may_not_run() -> Iterator[None]:
    """Mark operators that a real program may skip."""
    before = may_not_run.set(True)
    try:
        yield
    finally:
        may_not_run.reset(before)


def _merge_branches(pred: object, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    """Return the results of both branches of `torch.cond`, as results of both."""
    with that_may_not_run():
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
    """Return the results of the body of `while_loop`, whose metadata equals that of its inputs."""
    cond_fn(*carried_inputs, *additional_inputs)
    with that_may_not_run():
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


@while_fakes_live.replaces(
    hop_utils, "_hop_compile_and_call", needs="_hop_compile_and_call", reason="compiles eager calls"
)
def _hop_compile_and_call(original: Function, fn: Function, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
    return fn(*args, **(kwargs or {})) if _involves_fakes((args, kwargs)) else original(fn, args, kwargs)


@while_fakes_live.replaces(hop_utils, "setup_compilation_env", reason="prepares for compilation")
def _setup_compilation_env(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """For operators that call `torch.compile` themselves, such as flex_attention."""
    return _run_eagerly(original(*args, **kwargs))  # errors about arguments quote its name


@contextmanager
def _run_eagerly(environment: AbstractContextManager[Any]) -> Iterator[Any]:
    with environment as backend, set_stance("force_eager") if _makes_fakes() else nullcontext():
        yield backend


def _makes_fakes() -> bool:
    return _C.are_factories_fake() or is_constructing()


def _involves_fakes(values: object) -> bool:
    return _makes_fakes() or any(map(_C.is_fake, _tensors(values)))


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in `values` and those that functions and modules there hold in closures and globals."""
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
        with suppress(ValueError):  # empty cell
            held.append(cell.cell_contents)
    return held


# ---- `flex_attention` as the kernel that a compiled program runs, which has no matrix of scores
#
# Without a compiler, `flex_attention` computes the scores of all queries and keys, and PyTorch warns about it. A
# program that compiles anything is assumed to compile `flex_attention` as well. Inductor's kernels write the results
# that PyTorch's function for fakes returns, and save these and their inputs. The backward pass allocates gradients and
# one sum for each query.


KERNEL_OF = "flex_attention"

_callbacks: list[Callable[[], None]] = []  # callbacks of the open blocks, on all threads


@contextmanager
def attending_by_kernel(when_called: Callable[[], None]) -> Iterator[None]:
    """Count `flex_attention` as its kernel in the block, and call `when_called` each time."""
    _callbacks.append(when_called)
    try:
        yield
    finally:
        _callbacks.remove(when_called)


def is_flex_attention_compiled() -> bool:
    """Return true if a call counts as the kernel, after calling the innermost block's callback."""
    if _callbacks:
        _callbacks[-1]()
    return bool(_callbacks)


def call_kernel(op: Callable[..., Any], inputs: Sequence[Tensor], others: Sequence[Any], captured: list[Tensor]) -> Any:
    """Return the results of the operator, differentiable by its kernel.

    Args:
        op: The higher-order operator.
        inputs: Query, key and value.
        others: Its other arguments.
        captured: Tensors in the closures of its functions. They may need gradients.
    """
    return _Kernel.apply(op, others, *inputs, *captured)  # type: ignore[no-untyped-call]


def _call(op: Callable[..., Any], *args: Any) -> Any:
    """Call dispatch modes, such as selective checkpointing, and then the rule for fakes."""
    with torch._C._AutoDispatchBelowAutograd():
        results = op(*args)
    if results is NotImplemented:
        raise NotImplementedError(
            "A dispatch mode does not support flex_attention (for example FlopCounterMode before PyTorch 2.15). Run "
            "the program without it."
        )
    return results


class _Kernel(torch.autograd.Function):
    """Mirrors `FlexAttentionAutogradOp` in `torch._higher_order_ops.flex_attention`, whose backward needs a graph."""

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], others: Sequence[Any], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.others = others
        out, log_sum, *further = _call(op, *inputs[:3], *others)
        ctx.mark_non_differentiable(*further)
        ctx.save_for_backward(*inputs, out, log_sum)
        return out, log_sum, *further

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor | None, grad_of_log_sum: Tensor | None, *further: Any) -> Any:
        *inputs, out, log_sum = ctx.saved_tensors
        score_mod, *others = ctx.others
        products = torch.empty_like(log_sum)  # for each query, the sum of result times gradient
        # Called as an operator so that its FLOPs are counted. Its rule for fakes ignores the graph.
        graph = score_mod
        made = _call(
            flex_attention_backward, *inputs[:3], out, log_sum, grad, grad_of_log_sum, score_mod, graph, *others
        )
        del products
        captured = [torch.empty_like(tensor) for tensor in inputs[3:]]
        return None, None, *made[:3], *captured


# ---- Functions that communicate metadata in tensors, not values of the user's tensors
#
# `dist.broadcast_object_list()` puts pickled objects into tensors, a `DeviceMesh` puts ranks there, and a `DTensor` the
# indices of the local shard. In a block these tensors would be fake or deferred. They have to be real, like the
# processes.


COMPUTES_SHARD = "_compute_local_shape_and_global_offset"

while_fakes_live.replaces(
    "torch.distributed.tensor._utils",
    COMPUTES_SHARD,
    needs=COMPUTES_SHARD,
    reason="puts the indices of a shard into a tensor",
)(call_on_real_tensors)


if dist.is_available():
    while_fakes_live.replaces(
        "torch.distributed.distributed_c10d",
        *("all_gather_object", "broadcast_object_list", "gather_object"),
        *("recv_object_list", "scatter_object_list", "send_object_list"),
        reason="puts pickled objects into tensors",
    )(call_on_real_tensors)
    while_fakes_live.replaces("torch.distributed.device_mesh", "init_device_mesh", reason="puts ranks into a tensor")(
        call_on_real_tensors
    )
    for _name in ("__init__", "_concatenate", "_flatten", "_unflatten", "from_group"):
        while_fakes_live.replaces(
            "torch.distributed.device_mesh:DeviceMesh", _name, needs=_name, reason="puts ranks into a tensor"
        )(call_on_real_tensors)
