"""Run a program with remedies, without changing it, and find the remedies that may help it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _C
from ..fake.fake_tensor_mode import is_fake_tensor, is_wrapper_of_fakes
from ..internals.events import Listener, is_in_backward, subscribe
from ..internals.leases import Lease
from ..internals.patching import Function
from .remedies import (
    Accumulate,
    Block,
    ChunkedLoss,
    Findings,
    NoGradients,
    Remedy,
    blocks_of,
    cross_entropy_in_chunks,
    is_checkpointed_by_transformers,
    sharded_modules,
)

__all__ = ["Application", "applying"]

OPTIONS = ("foreach", "fused")


class _Thread(threading.local):
    """The modules that run on a thread: their number, and whether the outermost one began with gradients.

    Attributes:
        buffers: The buffers of the blocks before their forward passes, by the `id()` of the blocks.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.has_gradients = False
        self.block = ExitStack()
        self.buffers: dict[int, list[tuple[int, int]]] = {}


class Application(Listener):
    """The remedies of a run, and what it shows about the program.

    Args:
        remedies: The remedies to apply.

    Attributes:
        findings: The properties of the program so far, with these remedies.
    """

    def __init__(self, remedies: Iterable[Remedy]) -> None:
        self.remedies: tuple[Remedy, ...] = tuple(remedies)
        self.kinds: set[type[Remedy]] = {type(remedy) for remedy in self.remedies}
        self.micro_batches: int = next((one.count for one in self.remedies if isinstance(one, Accumulate)), 1)
        self._number = 0
        self._had_backward = False
        self._found = Findings()
        self._thread = _Thread()
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._blocks: dict[int, tuple[Block, bool]] = {}  # by the `id()` of modules: whether it is the block itself
        self._modules: list[nn.Module] = []  # keeps these numbers valid
        self._trained: dict[Block, None] = {}
        self._left_alone: set[Block] = set()

    @property
    def findings(self) -> Findings:
        """The properties of the program so far."""
        self._found.blocks = tuple(block for block in self._trained if block not in self._left_alone)
        self._found.allocator = torch._C._accelerator_getAllocatorSettings()
        return self._found

    def step(self, step: Callable[[], Any]) -> None:
        """Run a step of the program, or a step for each micro-batch. The last one updates the parameters."""
        for self._number in range(self.micro_batches):  # noqa: B020
            self._had_backward = False
            step()

    # ---- Modules

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Handle the beginning of a forward pass of any module."""
        if not _may_be_simulated(module):
            return
        thread = self._thread
        thread.depth += 1
        if is_in_backward():
            return  # recomputed by checkpointing
        if thread.depth == 1:
            thread.has_gradients = torch.is_grad_enabled()
            if any(True for _ in module.parameters()):
                self._enter_root(module)
        block, is_itself = self._blocks.get(id(module), (None, False))
        if block is None or not thread.has_gradients:
            return
        if (
            not torch.is_grad_enabled()
            or _is_in_checkpoint()
            or (is_itself and is_checkpointed_by_transformers(module))
        ):
            self._left_alone.add(block)
        elif is_itself:
            self._trained[block] = None
            thread.buffers[id(module)] = _versions_of_buffers(module)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Handle the end of a forward pass of any module."""
        if not _may_be_simulated(module):
            return
        versions = self._thread.buffers.pop(id(module), None)
        if versions is not None and versions != _versions_of_buffers(module):
            self._left_alone.add(self._blocks[id(module)][0])  # a recomputation would update the buffers again
        self._thread.depth = max(self._thread.depth - 1, 0)
        if self._thread.depth == 0:
            self._thread.block.close()

    def close(self) -> None:
        """Leave blocks of a forward pass that has not ended: hooks are not called after a `BaseException`."""
        self._thread.block.close()

    def _enter_root(self, root: nn.Module) -> None:
        if root not in self._roots:
            self._roots.add(root)
            for block, module in blocks_of(root):
                self._modules += (parts := list(module.modules()))
                self._blocks.update((id(part), (block, part is module)) for part in parts)
            self._found.is_sharded |= bool(sharded_modules(root))
            for remedy in self.remedies:
                remedy.adapt_module(root)
        for remedy in self.remedies:
            self._thread.block.enter_context(remedy.around_forward())

    # ---- Functions

    def cross_entropy(self, original: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
        """Compute a cross entropy, in chunks if its arguments allow that."""
        logits, target = arguments["input"], arguments["target"]
        is_divisible = (
            logits.dim() == 2
            and not target.is_floating_point()
            and arguments["weight"] is None
            and arguments["label_smoothing"] == 0
            and arguments["reduction"] in ("mean", "sum")
            and arguments["size_average"] is arguments["reduce"] is None
        )
        if not is_divisible:
            return original(**arguments)
        self._found.logits = max(self._found.logits, 4 * logits.numel())
        if ChunkedLoss not in self.kinds:
            return original(**arguments)
        return cross_entropy_in_chunks(original, logits, target, arguments["ignore_index"], arguments["reduction"])

    def construct_optimizer(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of an optimizer."""
        if not arguments.get("fused"):
            self._found.options |= {one for one in OPTIONS if arguments.get(one, ...) in (None, one == "foreach")}
        for remedy in self.remedies:
            remedy.adapt_optimizer(arguments)

    def updates_parameters(self) -> bool:
        """Return whether a step of an optimizer is one: with micro-batches, only the last one is."""
        return self._number == self.micro_batches - 1

    def zeroes_gradients(self) -> bool:
        """Return whether gradients are zeroed: before the first micro-batch, or after the last one."""
        return self.updates_parameters() if self._had_backward else self._number == 0

    def sets_to_none(self, is_requested: bool) -> bool:
        """Return whether zeroed gradients become None."""
        self._found.keeps_gradients |= not is_requested
        return is_requested or NoGradients in self.kinds

    def loss_of_backward(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        self._had_backward = True
        return loss if self.micro_batches == 1 else loss / self.micro_batches


def _versions_of_buffers(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(one), 0 if one.is_inference() else one._version) for one in module.buffers()]


def _is_in_checkpoint() -> bool:
    """Return true if a function of `torch.utils.checkpoint`, other than the reentrant one, runs on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


_applied: list[Application] = []
_while_applied = Lease("a simulated run applies remedies")


# Patches and global hooks also see the calls of other threads, which may train real models.


def _application_for(tensors: Iterable[object]) -> Application | None:
    """Return the application that handles a call with these tensors; None if none is fake, or no block is open."""
    is_simulated = any(is_fake_tensor(tensor) or is_wrapper_of_fakes(tensor) for tensor in tensors)
    return _applied[-1] if is_simulated and _applied else None


def _may_be_simulated(module: nn.Module) -> bool:
    """Return true unless all parameters of a module are real. Return true if it has none."""
    return _application_for(module.parameters()) is not None or not any(True for _ in module.parameters())


def _parameters_in(owner: Any) -> Iterator[Tensor]:
    """Return the parameters of a module or an optimizer."""
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return (parameter for group in owner.param_groups for parameter in group["params"])


def _parameters_of(arguments: dict[str, Any]) -> Iterator[object]:
    """Return the parameters among the arguments of an optimizer. Iterators are replaced by lists of their items."""
    params = arguments.get("params", ())
    if isinstance(params, Iterator):
        arguments["params"] = params = list(params)
    for one in params if isinstance(params, Iterable) and not isinstance(params, Tensor) else ():
        if isinstance(one, dict):
            yield from _parameters_of(one)
        else:
            yield one[1] if isinstance(one, tuple) and len(one) == 2 else one  # of `named_parameters()`


@contextmanager
def applying(remedies: Iterable[Remedy]) -> Iterator[Application]:
    """Apply remedies to the program that runs in the block.

    Args:
        remedies: The remedies; none to learn which ones may help.

    Yields:
        The application, which records properties of the program.
    """
    application = Application(remedies)
    with ExitStack() as block:
        block.enter_context(_while_applied.hold())
        _applied.append(application)
        block.callback(_applied.remove, application)
        block.callback(application.close)
        block.enter_context(subscribe(application))
        for remedy in application.remedies:
            block.enter_context(remedy.block())
        yield application


# ---- Replacements


@_while_applied.replaces(torch, "compile", reason="traces hooks of modules, which apply remedies")
def _compile(original: Function, /, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not _C.are_factories_fake():
        return original(model, *args, **kwargs)
    return model if model is not None else lambda function: function


@_while_applied.replaces(nn.functional, "cross_entropy", reason="computes the loss of all tokens at once")
def _cross_entropy(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    application = _application_for((bound.arguments["input"],))
    return application.cross_entropy(original, bound.arguments) if application else original(*args, **kwargs)


@_while_applied.replaces(nn.Module, "zero_grad", reason="may keep gradients")
@_while_applied.replaces(Optimizer, "zero_grad", reason="may keep gradients")
def _zero_grad(original: Function, self: Any, set_to_none: bool = True) -> None:
    application = _application_for(_parameters_in(self))
    if application is None:
        original(self, set_to_none)
    elif application.zeroes_gradients():
        original(self, application.sets_to_none(set_to_none))


@_while_applied.replaces(Tensor, "backward", reason="computes the gradients of a whole batch")
def _backward(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> None:
    application = _application_for((self,))
    original(application.loss_of_backward(self) if application else self, *args, **kwargs)


@_while_applied.replaces(Optimizer, "__init__", reason="has a method `step` that follows each batch")
def _init_skipping_steps(original: Function, /, self: Optimizer, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    application = _application_for(_parameters_in(self))
    if application is None or application.micro_batches == 1:
        return
    step = type(self).step

    def step_after_last(self: Optimizer, closure: Any = None) -> Any:
        if application.updates_parameters():
            return step(self, closure) if closure else step(self)
        return closure() if closure else None

    self.step = MethodType(step_after_last, self)  # type: ignore[method-assign]


def _init_with_remedies(original: Function, /, *args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    application = _application_for(_parameters_of(bound.arguments))
    if application is not None:
        application.construct_optimizer(bound.arguments)
    original(*bound.args, **bound.kwargs)


for _kind in vars(torch.optim).values():
    _constructor = vars(_kind).get("__init__") if isinstance(_kind, type) else None
    if _constructor is not None and "foreach" in inspect.signature(_constructor).parameters:
        _while_applied.replaces(_kind, "__init__", reason="uses lists of temporaries by default")(_init_with_remedies)
