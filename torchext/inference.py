"""PyTorch's inference mode, with faster entry, and tools for using its tensors outside of it."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

from . import _C
from .errors import TorchextFutureWarning
from .internals.calls import call_in_block
from .internals.document import Document
from .internals.held_tensors import inner_tensors, is_wrapper, reachable_tensors
from .internals.leases import Lease, settle, while_marks_live
from .internals.patching import Concerns, Function, patching_lock

__all__ = [
    "Origin",
    "check_dispatch_state",
    "inference_mode",
    "is_inference_mode_enabled",
    "is_inference_tensor",
    "normal_tensors",
    "origin",
    "to_normal",
    "trace_origins",
]


# ---- The source lines of inference tensors: `origin()`, and notes on errors that operators do not raise


@dataclass(frozen=True)
class Origin(Document):
    """The source line that made a tensor: the innermost line outside of PyTorch and torchext.

    Attributes:
        file: The file of the line.
        line: Its number.
        function: The name of its function.
    """

    file: str
    line: int
    function: str

    def _parts(self) -> list[str]:
        return [f"{self.file}:{self.line} in {self.function}"]


def origin(tensor: torch.Tensor) -> Origin | None:
    """Return the source line that made an inference tensor.

    Args:
        tensor: Any tensor. An inference tensor has an origin if an operator made it in `inference_mode(trace=True)` or
            after `trace_origins()`. A view that was made elsewhere has the origin of its base.

    Returns:
        The line. None for a normal tensor, for a tensor that was not traced, and for a tensor that was not made by an
        operator, such as the result of `torch.from_numpy()` or of a transform of `torch.func`.

    Raises:
        TypeError: `tensor` is not a tensor.

    Example:
        >>> with inference_mode(trace=True):
        ...     x = torch.ones(2)
        >>> print(origin(x))
        <...>:2 in <module>
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"origin() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    found = re.fullmatch(r"(.*):(\d+) in (.*)", _C.origin_of(tensor), re.DOTALL)
    return None if found is None else Origin(found[1], int(found[2]), found[3])


def trace_origins(enabled: bool = True) -> None:
    """Trace all blocks of inference mode in the process, or stop tracing them.

    This does for every block that any thread enters from now on, and for the innermost block of this thread, what
    `inference_mode(trace=True)` does for one block. It includes PyTorch's `torch.inference_mode`, but not C++'s
    `c10::InferenceMode`.

    Args:
        enabled: False to stop. Open blocks are still traced, and recorded lines are kept.
    """
    _C.trace_origins_in_blocks(enabled)
    _hold_while_tracing(enabled)
    if enabled and torch.is_inference_mode_enabled():
        _trace_here()


def are_all_blocks_traced() -> bool:
    """Return True after `trace_origins()`."""
    return _is_tracing_all


def _trace_here() -> None:
    _C.trace_origins_here()
    settle(is_urgent=True)


_while_all_blocks_trace = Lease("trace_origins() is on")
_is_tracing_all = False


def _hold_while_tracing(enabled: bool) -> None:
    global _is_tracing_all
    with patching_lock:
        if enabled and not _is_tracing_all:
            _while_all_blocks_trace.acquire()
        elif not enabled and _is_tracing_all:
            _while_all_blocks_trace.release()
        _is_tracing_all = enabled


@_while_all_blocks_trace.replaces(torch.inference_mode, "__enter__", reason="runs no operator when a block begins")
def _enter(original: Function, self: torch.inference_mode) -> None:
    original(self)
    if self.mode:
        _trace_here()  # until PyTorch's guard restores the keys of the thread


@_while_all_blocks_trace.replaces(torch.inference_mode, "__exit__", reason="runs no operator when a block ends")
def _exit(original: Function, self: torch.inference_mode, *error: Any) -> Any:
    result = original(self, *error)
    _C.drop_stale_demands()
    return result


# A class method, in Python before 2.15 and in C since then. `forward()` may have closed over inference tensors.
@while_marks_live.replaces(torch.autograd.Function, "apply", reason="checks saved tensors after forward() has returned")
@while_marks_live.replaces(
    torch.Tensor,
    "_version",
    reason="raises errors about inference tensors without calling an operator",
    concerns=Concerns.MARKS,
)
def _add_notes(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Add notes to errors that operators do not raise."""
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        _add_note(error, args)
        raise


def _add_note(error: RuntimeError, values: Iterable[Any]) -> None:
    if "nference tensor" not in str(error) or getattr(error, "__notes__", None):
        return
    lines = {_C.origin_of(value): None for value in values if isinstance(value, torch.Tensor)}
    lines.pop("", None)
    if lines and hasattr(error, "add_note"):  # Python 3.11
        error.add_note("The inference tensors among the arguments were created at\n  " + "\n  ".join(lines))


# ---- PyTorch's inference mode, with faster entry, and tools for using its tensors outside of it


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])


class inference_mode(_C.InferenceBlock):  # noqa: N801 - PyTorch's name
    """Turn inference mode on, or off, on this thread for a block or a function.

    Tensors that are allocated inside are inference tensors: they have no version counter, and autograd cannot use them.
    Calls inside record no gradients. The mode is that of `torch.inference_mode`: the two nest in each other, and all
    functions that return the mode, or check for inference tensors, work with both.

    One object can be entered again while it is open, and on several threads. As a decorator, with or without
    parentheses, it takes functions, generator functions, `async def` functions and asynchronous generators. They are
    inside the mode while they run; their callers are outside of it between two steps.

    Args:
        mode: Whether the mode is on in the block. `inference_mode(False)` inside the mode returns to training, with
            gradients on.
        trace: Record, for each inference tensor that an operator makes in the block, the source line of the call: see
            `origin()`. If PyTorch later raises an error because an inference tensor is saved for backward, changed, or
            its version is read, a note on the error names the line. Every operator is some microseconds slower.

    Raises:
        TypeError: `mode` is neither a bool nor a function.
        RuntimeError: On leaving a block that is not open on this thread, or not the innermost one.

    Example:
        >>> with inference_mode():
        ...     x = torch.ones(2)
        >>> is_inference_tensor(x)
        True
        >>> @inference_mode
        ... async def double(x):
        ...     return x * 2
    """

    __slots__ = ()

    def __call__(self, function: F) -> F:
        """Decorate `function`."""
        return _decorated(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_block, (self.mode, self.trace)

    def __repr__(self) -> str:
        return f"inference_mode({self.mode}{', trace=True' if self.trace else ''})"


def _make_block(mode: bool, trace: bool) -> inference_mode:
    return inference_mode(mode, trace=trace)


class normal_tensors(_C.NormalTensorsBlock):  # noqa: N801 - as inference_mode
    """Allocate normal tensors, without gradients, in a block inside inference mode.

    Use it for tensors that outlive the mode: caches, buffers, a module that is trained later. Grad mode is off, so the
    block equals `inference_mode(False)` with `torch.no_grad()` in it. Outside of inference mode it equals
    `torch.no_grad()`. In the block, inference tensors can be read, viewed and copied, but not changed in place, as
    outside of the mode. A view of an inference tensor is an inference tensor. It is also a decorator.

    Raises:
        RuntimeError: On leaving a block that is not open on this thread, or not the innermost one.

    Example:
        >>> with inference_mode():
        ...     with normal_tensors():
        ...         cache = torch.zeros(2)
        ...     cache += torch.ones(2)
        >>> is_inference_tensor(cache)
        False
    """

    __slots__ = ()

    def __call__(self, function: F) -> F:
        """Decorate `function`."""
        return _decorated(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return normal_tensors, ()

    def __repr__(self) -> str:
        return "normal_tensors()"


def _decorated(block: inference_mode | normal_tensors, function: F) -> F:
    if not callable(function):
        raise TypeError(f"{type(block).__name__} decorates functions, but this is a {type(function).__name__}.")
    if not inspect.isclass(function):
        return call_in_block(block, function)
    warnings.warn(
        f"Decorating a class with {type(block).__name__} returns a function, whose calls construct objects in the "
        "block; their methods run outside of it. PyTorch will raise an error here. Decorate the methods instead.",
        TorchextFutureWarning,
        stacklevel=3,
    )
    return cast("F", call_in_block(block, lambda *args, **kwargs: function(*args, **kwargs)))


def is_inference_mode_enabled() -> bool:
    """Return True if inference mode is on, on this thread, whether torchext or PyTorch turned it on."""
    return _C.is_inference_mode_enabled()


def is_inference_tensor(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is an inference tensor: allocated in inference mode, or a view of such a tensor.

    Args:
        tensor: Any tensor, real or fake.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_inference_tensor() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return tensor.is_inference()


def check_dispatch_state() -> list[str]:
    """Return the illegal parts of this thread's state, a sentence each; an empty list if the state is legal.

    The RFC forbids removing `ADInplaceOrView` from the thread's included keys while autograd is not excluded. PyTorch
    relies on more rules: the flag of inference mode and the keys agree, autograd is never included, and grad mode is
    off in inference mode. Blocks of inference mode keep these rules. `torch.enable_grad()` inside a block breaks them,
    and so does changing the key sets by hand.
    """
    return _C.check_dispatch_state()


def to_normal(obj: T) -> T:
    """Turn the inference tensors in `obj` into normal tensors, in place.

    The tensors stay the same objects, with their classes, attributes, `requires_grad`, ties and places in optimizers.
    Their memory also stays, unless a tensor outside of `obj` shares it; then they get a copy. Tensors that share memory
    within `obj` still share it, with one version counter, as after `detach()`. Gradients become normal with their
    tensors. Normal tensors do not change.

    Args:
        obj: A tensor, a module, an optimizer, another object that holds tensors, such as a KV cache, or a container of
            them, such as the output of a model. Objects are searched as by `materialize_module`: attributes, slots,
            containers, iterators, closures and the objects in them, but not caches of functions, or results that their
            code would compute. Fake and deferred tensors also become normal; a deferred tensor is normal when it is
            materialized.

    Returns:
        `obj`.

    Raises:
        TypeError: `obj` is an object without tensors.
        NotImplementedError: A tensor is neither strided nor sparse.

    Example:
        >>> with inference_mode():
        ...     model = torch.nn.Linear(2, 2)
        >>> to_normal(model)(torch.ones(2)).requires_grad
        True
    """
    tensors = list(reachable_tensors(obj, torch.Tensor.is_inference))
    is_surely_right = isinstance(obj, torch.Tensor | torch.nn.Module | torch.optim.Optimizer)
    if not tensors and not is_surely_right and pytree.tree_is_leaf(obj):
        raise TypeError(
            f"to_normal() takes a tensor, a module, an optimizer, another object that holds tensors, or a container of "
            f"them, but `obj` is a {type(obj).__name__} in which no tensor was found."
        )
    _C.make_normal([part for tensor in tensors for part in _parts_of(tensor)])
    return obj


def _parts_of(tensor: torch.Tensor, around: tuple[torch.Tensor, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield a tensor, its gradient, and the inner tensors of a wrapper such as `DTensor`."""
    if any(tensor is other for other in around):  # `torch.utils.swap_tensors()` can make a wrapper a part of itself
        return
    yield tensor
    if tensor.is_leaf and tensor.grad is not None:
        yield from _parts_of(tensor.grad, (*around, tensor))
    if is_wrapper(tensor):
        for part in inner_tensors(tensor):
            yield from _parts_of(part, (*around, tensor))
