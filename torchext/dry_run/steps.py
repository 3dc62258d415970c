"""The definition of a training step.

Optimizer calls with no pass between them form a round, which ends where the next forward or backward
pass begins. A round is one call in a plain loop. It has many calls where an engine calls an optimizer for each
parameter group, or where hooks call one for each parameter in the backward pass. A step is complete at the end of the
first round by which each participating optimizer has been called since the last step. So it includes the code after
the calls, such as the reduction of metrics, averaging of weights, and loading the next batch.

| program                                 | rounds                  | a step is  |
| --------------------------------------- | ----------------------- | ---------- |
| a plain loop, accumulation, closures    | {A} {A}                 | one round  |
| a GAN with five calls for each of one   | {D} {D} {D} {D} {D} {G} | six rounds |
| two optimizers in turns                 | {A} {B}                 | two rounds |
| ZeRO, optimizers in the backward pass   | {A, B, C}               | one round  |

An optimizer participates if it has been called, or if one of its parameters requires a gradient. If another optimizer
updates its parameters in the same round, as with a wrapper, it need not be called itself. Whether an idle optimizer
will be called later is unknown; after `PATIENCE` rounds it is ignored, with a remark.

Calls that a CUDA graph captures count at each replay.

Without passes, a round ends where an optimizer updates the same parameters again. Calls before the first pass belong to
the construction: loading a distributed checkpoint calls an optimizer once to create its state.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ..fake.cuda.streams import is_put_off
from ..internals.events import Listener, is_in_backward, place_of, subscribe, users_frame

__all__ = ["PATIENCE", "Passes", "Round", "Rounds", "Steps"]


# ---- Detect the beginnings of forward and backward passes
#
# A forward pass is a call of a module that holds parameters or buffers, while no other module runs on the thread.
# Losses and metrics, which are modules without either, belong to the code around them. A backward pass is a run of
# autograd's engine. Code inside a backward pass belongs to it: activation checkpointing calls modules and the engine
# again, and gradient hooks may call optimizers.


class Passes(Listener):
    """Detects passes of the process, on all threads.

    Args:
        on_forward: Called before each forward pass begins.
        on_backward: Called before each backward pass begins.
    """

    def __init__(self, on_forward: Callable[[], None], on_backward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self._on_backward = on_backward
        self._process = os.getpid()
        self._running = _Running()
        self._subscription = subscribe(self)

    def is_in_pass(self) -> bool:
        """Return true if this thread runs in a pass."""
        return self._running.count > 0 or is_in_backward()

    def close(self) -> None:
        """Stop detecting passes."""
        self._subscription.close()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Begin a forward pass, if this is the outermost module that runs."""
        is_outermost = self._running.count == 0
        self._running.count += 1
        if is_outermost and not is_in_backward() and _computes(module) and os.getpid() == self._process:
            self._on_forward()

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module has ended."""
        self._running.count = max(self._running.count - 1, 0)

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        if os.getpid() == self._process:
            self._on_backward()


class _Running(threading.local):
    """The number of modules that run on the thread."""

    count = 0


def _computes(module: nn.Module) -> bool:
    # `torch.nn.DataParallel` runs replicas on its own threads.
    if getattr(module, "_is_replica", False):
        return False
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


# ---- Count rounds of optimizer calls, and the steps that they complete


# The number of rounds to wait for an optimizer: more than generators or discriminators are trained in a row.
PATIENCE = 100
NAMED = 3  # the number of ignored optimizers that a remark names

Key = int


@dataclass(frozen=True)
class Round:
    """Optimizer calls with no pass between them.

    Attributes:
        updated: The optimizers whose parameters were updated.
        needed: The optimizers that participated by then.
        mark: The mark of the end of the round.
    """

    updated: frozenset[Key]
    needed: frozenset[Key]
    mark: int


class Rounds:
    """Groups rounds into steps.

    Attributes:
        ends: The marks of the rounds that completed a step.
        since: The number of rounds since the last of them.
        missing: The optimizers that were missing for a step at the end of the last round.
    """

    def __init__(self) -> None:
        self._rounds: list[Round] = []
        self._left_out: set[Key] = set()
        self._start()

    def add(self, one: Round) -> None:
        """Add the latest round."""
        self._rounds.append(one)
        self._count(one)

    def leave_out(self, keys: Iterable[Key]) -> None:
        """Count again from the first round, without these optimizers."""
        self._left_out.update(keys)
        self._start()
        for one in self._rounds:
            self._count(one)

    def never_updated(self) -> frozenset[Key]:
        """Return the missing optimizers that were not called in any round."""
        return self.missing.difference(*(one.updated for one in self._rounds))

    def _start(self) -> None:
        self.ends: list[int] = []
        self.since: int = 0
        self.missing: frozenset[Key] = frozenset()
        self._updated: frozenset[Key] = frozenset()

    def _count(self, one: Round) -> None:
        self._updated |= one.updated
        self.missing = one.needed - self._updated - self._left_out
        self.since += 1
        if not self.missing:
            self.ends.append(one.mark)
            self.since = 0
            self._updated = frozenset()


class Steps(Listener):
    """Counts the steps of the optimizers of the process.

    Args:
        mark: Returns the mark of the end of a round.
        on_round: Called when a round has ended without a pass.

    Attributes:
        rounds: The rounds so far.
        calls: The number of optimizer calls.
        remarks: Remarks about ignored optimizers.
    """

    def __init__(self, mark: Callable[[], int], on_round: Callable[[], None]) -> None:
        self.rounds: Rounds = Rounds()
        self.calls: int = 0
        self.remarks: list[str] = []
        self._mark = mark
        self._on_round = on_round
        self._had_pass = False
        self._called: dict[Key, dict[int, TensorWeakRef]] = {}  # since the last pass, with the updated parameters
        self._known: dict[Key, _Known] = {}
        self._subscription = subscribe(self)

    def close(self) -> None:
        """Stop counting."""
        self._subscription.close()

    def end_round(self) -> None:
        """End the current round, because a pass begins or the program ends."""
        if self._called and self._had_pass:
            self._add_round()
        self._called = {}

    def begin_pass(self) -> None:
        """Handle the beginning of a forward or backward pass."""
        self.end_round()
        self._had_pass = True

    def finish(self) -> None:
        """Count the steps that are complete because the program has ended, and no calls will follow."""
        self._had_pass = True
        self.end_round()
        self._leave_out(self.rounds.never_updated())

    @property
    def made(self) -> int:
        """The number of complete steps."""
        return len(self.rounds.ends)

    def _learn(self, optimizer: Optimizer) -> _Known:
        known = self._known.get(id(optimizer))
        if known is None or known.reference() is not optimizer:
            known = self._known[id(optimizer)] = _Known(ref(optimizer), _description(optimizer))
            known.takes_part()
        return known

    def end_construction(self, optimizer: Optimizer) -> None:
        """Let an optimizer participate if its parameters require gradients."""
        self._learn(optimizer)

    def begin_step(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        """End the round if no pass is between this call and one that has updated the same parameters."""
        if is_put_off(partial(self.begin_step, optimizer)):
            return
        updated = self._called.get(id(optimizer))
        if updated and not is_in_backward() and any(_is_in(updated, p) for p in _parameters(optimizer)):
            self._add_round()
            self._called = {}
            self._on_round()

    def end_step(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        """Count a call of an optimizer."""
        if is_put_off(partial(self.end_step, optimizer)):
            return
        self.calls += 1
        self._learn(optimizer).was_called = True
        updated = self._called.setdefault(id(optimizer), {})
        updated.update((id(p), TensorWeakRef(p)) for p in _parameters(optimizer))

    def _add_round(self) -> None:
        needed = {key for key, known in self._known.items() if known.takes_part()}
        self.rounds.add(Round(frozenset(self._updated(needed)), frozenset(needed), self._mark()))
        if self.rounds.since >= PATIENCE:
            self._leave_out(self.rounds.missing)

    def _updated(self, needed: set[Key]) -> set[Key]:
        everything = {name: tensor for updated in self._called.values() for name, tensor in updated.items()}
        covered = {key for key in needed if self._known[key].is_covered_by(everything)}
        return covered | self._called.keys()

    @property
    def missing(self) -> str:
        """The names of the optimizers that must be called before the step is complete."""
        return self._names(self.rounds.missing)

    def _leave_out(self, keys: frozenset[Key]) -> None:
        if keys:
            self.remarks.append(
                f"Steps are counted without {self._names(keys)}: not called while other optimizers were called in "
                f"{self.rounds.since} rounds."
            )
            self.rounds.leave_out(keys)

    def _names(self, keys: frozenset[Key]) -> str:
        names = [known.name for key, known in self._known.items() if key in keys]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more


@dataclass
class _Known:
    """An optimizer of the program."""

    reference: ref[Optimizer]
    name: str
    was_called: bool = False
    required_gradients: bool = False

    def takes_part(self) -> bool:
        optimizer = self.reference()
        if optimizer is None:
            return False
        # Programs that train networks in turns turn off the gradients of the others.
        self.required_gradients |= any(p.requires_grad for p in _parameters(optimizer))
        return self.was_called or self.required_gradients

    def is_covered_by(self, updated: dict[int, TensorWeakRef]) -> bool:
        optimizer = self.reference()
        own = [] if optimizer is None else list(_parameters(optimizer))
        return bool(own) and all(_is_in(updated, p) for p in own)


def _description(optimizer: Optimizer) -> str:
    """Return the class, and the line that constructs it."""
    frame = users_frame()
    name = type(optimizer).__name__
    return name if frame is None else f"{name} ({place_of(frame)})"


def _parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (p for group in getattr(optimizer, "param_groups", ()) for p in group["params"])


def _is_in(updated: dict[int, TensorWeakRef], parameter: torch.Tensor) -> bool:
    reference = updated.get(id(parameter))
    return reference is not None and reference() is parameter
