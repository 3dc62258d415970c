"""Leases: patches of PyTorch functions that are installed while they are needed, and removed afterwards.

The holders of a lease are open blocks and live tensors of torchext: NOTE [Leases on PyTorch's functions],
leases.h. Each feature declares its patches once, with the decorator `Lease.replaces()`:

    registered --(the first holder begins)--> declared <--(no holder)-- installed
        |                                        |                          ^
        |                                        +-----(a holder exists)----+
        +--(its module is not imported)--> awaited --(it is)--> declared

Registering costs almost nothing. Declaring finds the owner of the attribute, and installing exchanges implementations.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from .. import _C
from .imports import is_imported, when_imported
from .patching import Concerns, Function, Make, Patch, Patchable, Steps, patching_lock

Replacement = TypeVar("Replacement", bound=Function)

__all__ = ["Lease", "leases", "settle", "while_autocasting", "while_fakes_live", "while_marks_live"]


class Lease:
    """Patches that are installed while the lease is held.

    Attributes:
        needed_while: The condition under which it is held.
        patches: The patches declared so far, in order of installation.
    """

    def __init__(self, needed_while: str, count: _C.Lease | None = None) -> None:
        self.needed_while = needed_while
        self.patches: list[Patch] = []
        self._count = _C.Lease() if count is None else count
        self._declarations: list[Callable[[], None]] = []
        self._is_settling = False
        self._patchables: dict[Patchable, None] = {}  # the targets of the patches
        self._alone: dict[bool, Steps] = {}  # valid while no other active lease patches the same targets
        leases.append(self)

    @property
    def is_active(self) -> bool:
        """Whether the patches are installed."""
        return self._count.is_active()

    @property
    def is_settled(self) -> bool:
        """Whether the patches are installed if, and only if, the lease is held."""
        return self._count.is_active() == self._count.is_held()

    def declare(self, *declarations: Callable[[], None]) -> None:
        """Register functions that call `patch()`, which are called before the patches are first needed."""
        with patching_lock:
            _C.withdraw_switches()  # the offered steps do not include these declarations
            self._declarations += declarations
            if self.is_active:
                self.prepare()

    def declare_after_import(self, module: str, declaration: Callable[[], None]) -> None:
        """Register a function after the program has imported a module. It is called once in a process."""
        when_imported(module, partial(patching_lock.run_soon, partial(self.declare, declaration)))

    def replaces(
        self, owner: Any, *names: str, reason: str, needs: str | None = None, **options: Any
    ) -> Callable[[Replacement], Replacement]:
        """Return a decorator that declares a function as the replacement of attributes of a module or a class.

        The function receives the original (or, with several patches of one attribute, the previous replacement) as its
        first argument, which it calls for everything that it does not handle. The others are those of the call; a
        Python function gets them by position where possible, with defaults filled in.

        Args:
            owner: The module or the class, or its name, such as "torch.nn" or "torch.nn.modules.rnn:RNNBase": the
                patches are then declared after the program has first imported the module. They are not declared again
                for a module that is removed from `sys.modules` and imported again.
            *names: The names of the attributes.
            reason: The PyTorch behavior that needs these patches.
            needs: Declare the patches only if `owner` has this attribute, which some releases or builds do not have.
            **options: Further arguments of `patch()`.

        A `partial` of a function gets its bound arguments before the original. They are bound by position, because a
        program may pass any name.
        """

        def declare(function: Replacement) -> Replacement:
            def declare_for(owner: Any) -> None:
                if needs is None or hasattr(owner, needs):
                    for name in names:
                        self.patch(owner, name, partial(partial, function), reason, **options)

            self.declare(partial(self._find, owner, declare_for))
            return function

        return declare

    def _find(self, owner: Any, declare: Callable[[Any], None]) -> None:
        """Call `declare` with the owner of patches, after the module of that name has been imported."""
        if not isinstance(owner, str):
            declare(owner)
            return
        module, _, name = owner.partition(":")

        def find() -> None:
            found = sys.modules[module]
            declare(operator.attrgetter(name)(found) if name else found)

        if is_imported(module):
            find()
        else:
            self.declare_after_import(module, find)

    def patch(
        self,
        owner: Any,
        name: str,
        make: Make,
        reason: str,
        *,
        concerns: Concerns = Concerns.ALL,
        is_traced: bool = False,
        is_added: bool = False,
        releases: str = "all",
    ) -> Patch:
        """Declare the replacement of an attribute, now.

        Args:
            owner: The module or the class. An inherited function is replaced for all classes that inherit it.
            name: The name of the attribute.
            make: Receives the original and returns the function to call, or the value to set. With several patches of
                one attribute, each receives the previous replacement.
            reason: The PyTorch behavior that needs this patch.
            concerns: The calls that the replacement handles. Others go to the original, unless Dynamo traces the
                replacement.
            is_traced: Whether Dynamo traces the replacement of a Python function instead of the original.
            is_added: Whether the attribute is added if this build of PyTorch does not have it. If the build has it, a
                function loses its identity while it is replaced.
            releases: The releases of PyTorch that need it.
        """
        with patching_lock:
            _C.withdraw_switches()  # otherwise another thread may remove the patches now
            patch = Patch(
                owner,
                name,
                make,
                reason,
                concerns=concerns,
                lease=self._count,
                is_traced=is_traced,
                is_added=is_added,
                releases=releases,
            )
            self.patches.append(patch)
            self._patchables[patch.patchable] = None
            self._alone.clear()
            if self.is_active:
                _C.exchange(self._plan([patch.patchable], is_wanted=True))
            return patch

    def withdraw(self, patches: list[Patch]) -> None:
        """Remove patches, and forget that they were declared."""
        with patching_lock:
            _C.withdraw_switches()
            self.patches = [patch for patch in self.patches if patch not in patches]
            for patch in patches:
                patch.patchable.declared.remove(patch)
            self._patchables = dict.fromkeys(patch.patchable for patch in self.patches)
            self._alone.clear()
            _C.exchange(self._plan([patch.patchable for patch in patches], self.is_active))

    def declared(self) -> list[Patch]:
        """Return all patches of the lease, installed or not."""
        self.prepare()
        return list(self.patches)

    def prepare(self) -> None:
        """Call the registered declarations that have not run yet."""
        with patching_lock:
            while self._declarations:
                declared = len(self.patches)
                try:
                    self._declarations[0]()
                except BaseException:
                    self.withdraw(self.patches[declared:])
                    raise
                del self._declarations[0]

    def hold(self) -> Lease:
        """Hold the lease in the block."""
        return self

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def token(self) -> object:
        """Return an object that holds the lease as long as it lives."""
        return _Token(self)

    def acquire(self) -> None:
        """Hold the lease until the matching `release()`."""
        if self._count.hold() and not self._is_settling:  # installed, and no other thread removes the patches
            return
        try:
            self.settle()
        except BaseException:
            self._count.release()
            raise

    def release(self) -> None:
        """Undo one `acquire()`."""
        if not self._count.release():
            self.settle()

    def settle(self) -> None:
        """Install the patches if the lease is held, and remove them otherwise."""
        with patching_lock:
            if self._is_settling:  # re-entered on this thread: the loop below handles the change
                return
            self._is_settling = True
            try:
                while not self.is_settled:
                    if self.is_active:
                        self._put_in_place(False)
                    else:
                        self.prepare()
                        try:
                            self._put_in_place(True)
                        except BaseException:
                            self._put_in_place(False)
                            raise
            finally:
                self._is_settling = False

    def _put_in_place(self, is_wanted: bool) -> None:
        _C.withdraw_switches()
        is_alone = not any(rival.is_active for rival in self._rivals())
        _C.exchange(self._steps_alone(is_wanted) if is_alone else self._plan(self._patchables, is_wanted))
        self._count.set_active(is_wanted)
        for lease in leases:
            if not lease._declarations:
                lease._offer_switch()

    def _offer_switch(self) -> None:
        """Let the core install and remove the patches alone, while no rival is active."""
        rivals = [rival._count for rival in self._rivals()]
        with suppress(Exception):  # `settle()` of this lease raises the errors of its replacements
            _C.offer_switch(self._count, self._steps_alone(True), self._steps_alone(False), rivals)

    def _rivals(self) -> list[Lease]:
        """Return the other leases that patch the same targets."""
        return [
            other for other in leases if other is not self and not self._patchables.keys().isdisjoint(other._patchables)
        ]

    def _steps_alone(self, is_wanted: bool) -> Steps:
        """Return the steps that install or remove all patches while no rival is active. Cached: planning is slow."""
        if is_wanted not in self._alone:
            self._alone[is_wanted] = self._plan(self._patchables, is_wanted, is_alone=True)
            if is_wanted:
                self._alone.pop(False, None)  # lacks the replacements made above
        return self._alone[is_wanted]

    def _plan(self, patchables: Iterable[Patchable], is_wanted: bool, is_alone: bool = False) -> Steps:
        """Return steps that install or remove our patches of `patchables`. Installed ones of other leases stay."""
        steps = Steps([], [], [])
        for patchable in patchables:
            ours = [patch for patch in patchable.declared if patch.lease is self._count] if is_wanted else []
            others = [] if is_alone else self._others_in_place(patchable)
            patchable.plan((*others, *ours), steps)
        return steps

    def _others_in_place(self, patchable: Patchable) -> list[Patch]:
        return [patch for patch in patchable.declared if patch.lease is not self._count and patch.is_installed]


class _Token:
    def __init__(self, lease: Lease) -> None:
        lease.acquire()
        self._count = lease._count

    def __del__(self) -> None:
        self._count.release()  # any code may be running here, so the core requests `settle()` later


leases: list[Lease] = []


def settle(is_urgent: bool) -> None:
    """Install the patches of held leases and remove the others. The core also calls this.

    Args:
        is_urgent: Whether this must be complete on return. Removals are not urgent, and must not block where the core
            requests them during arbitrary code.
    """
    if is_urgent:
        with patching_lock:
            _settle()
    else:
        patching_lock.run_soon(_settle)


def _settle() -> None:
    with ExitStack() as stack:  # an error of one lease does not keep the others from being settled
        for lease in reversed(leases):
            stack.callback(lease.settle)


_C.provide("settle_leases", settle)


while_fakes_live: Lease = Lease(
    "a block of fake_mode or deferred_init is open, or a fake tensor is alive", _C.lease_of_fakes
)
while_marks_live: Lease = Lease(
    "a tensor is marked: an AmpTensor, or an inference tensor whose origin is traced", _C.lease_of_marks
)
while_autocasting: Lease = Lease("a region of autocast is open, or a tensor is marked", _C.lease_of_regions)
