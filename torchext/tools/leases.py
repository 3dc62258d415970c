"""Leases: PyTorch's functions are replaced while somebody needs that, and PyTorch's own again afterwards.

Somebody is a block that is open, or a tensor of ours that is alive: NOTE [Leases on PyTorch's functions],
csrc/support/leases.h. Each feature declares what it replaces, once, with `Lease.patch()`; nothing is replaced before
the first holder of the lease, and everything is given back after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import _C
from .patching import Concerns, Make, Patch, Steps, Thing, patching_lock

__all__ = ["Lease", "leases", "settle", "while_autocasting", "while_fakes_live", "while_marks_live"]


class Lease:
    """Patches that are in place while somebody holds them.

    Attributes:
        needed_while: When somebody does.
        patches: What has been declared so far, in the order in which it is replaced.
    """

    def __init__(self, needed_while: str, count: _C.Lease | None = None) -> None:
        self.needed_while = needed_while
        self.patches: list[Patch] = []
        self._count = _C.Lease() if count is None else count
        self._declarations: list[Callable[[], None]] = []
        self._is_settling = False
        self._things: dict[Thing, None] = {}  # what the patches are of
        self._alone: dict[bool, Steps] = {}  # what to do while nobody else replaces the same things
        leases.append(self)

    @property
    def is_active(self) -> bool:
        """Whether the patches are in place."""
        return self._count.is_active()

    @property
    def is_settled(self) -> bool:
        """Whether the patches are in place if, and only if, somebody holds the lease."""
        return self._count.is_active() == self._count.is_held()

    def declare(self, *declarations: Callable[[], None]) -> None:
        """Lets each of `declarations` be called before the patches are first needed. They call `patch()`."""
        with patching_lock:
            self._declarations += declarations
            if self.is_active:
                self.prepare()

    def patch(
        self,
        owner: Any,
        name: str,
        make: Make,
        reason: str,
        *,
        concerns: Concerns = Concerns.ALL,
        is_traced: bool = False,
        releases: str = "all",
    ) -> None:
        """Declares that an attribute of a module or a class is to be replaced.

        Args:
            owner: The module or the class. A function that a class inherits is replaced for all who do.
            name: The name of the attribute.
            make: Is given what was there before, and returns what shall be called, or the value that shall be there.
                What is replaced twice is given the replacement.
            reason: What PyTorch does, for which this is needed.
            concerns: Which calls it is about. Others go to the original, unless Dynamo traces the replacement.
            is_traced: Whether Dynamo traces the replacement of a function of Python, and not the original.
            releases: The releases of PyTorch that need it.
        """
        with patching_lock:
            patch = Patch(
                owner,
                name,
                make,
                reason,
                concerns=concerns,
                lease=self._count,
                is_traced=is_traced,
                releases=releases,
            )
            self.patches.append(patch)
            self._things[patch.thing] = None
            self._alone.clear()
            _C.withdraw_switches()
            if self.is_active:
                self._plan([patch.thing], is_wanted=True).take()

    def declared(self) -> list[Patch]:
        """All patches of the lease, whether they are in place or not."""
        self.prepare()
        return list(self.patches)

    def prepare(self) -> None:
        """Lets everything be declared that is not yet."""
        with patching_lock:
            while self._declarations:
                declared = len(self.patches)
                try:
                    self._declarations[0]()
                except BaseException:
                    failed = self.patches[declared:]
                    del self.patches[declared:]
                    for patch in failed:
                        patch.thing.declared.remove(patch)
                    self._things = dict.fromkeys(patch.thing for patch in self.patches)
                    self._alone.clear()
                    self._plan([patch.thing for patch in failed], self.is_active).take()
                    raise
                del self._declarations[0]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the lease in the block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def token(self) -> object:
        """Returns an object that holds the lease as long as it lives."""
        return _Token(self)

    def acquire(self) -> None:
        """Holds the lease until `release()`, which is to be called as often."""
        self._count.hold()
        try:
            self.settle()
        except BaseException:
            self._count.release()
            raise

    def release(self) -> None:
        """Undoes one `acquire()`."""
        self._count.release()
        if not self._count.is_held():
            self.settle()

    def settle(self) -> None:
        """Puts the patches in place if somebody holds the lease, and gives them back if nobody does."""
        with patching_lock:
            if self._is_settling:  # on this thread: the last holder has died meanwhile, which the loop below notices
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
        self._steps(is_wanted).take()
        self._count.set_active(is_wanted)
        for lease in (while_marks_live, while_autocasting):
            lease.offer_switch()

    def offer_switch(self) -> None:
        """Lets the core exchange what is replaced by itself, while nobody else replaces the same things."""
        if self._declarations or self._do_others_replace_the_same():
            return
        on, off = self._steps(True), self._steps(False)
        for step in on.others:  # which replacements the codes will call
            step()
        _C.offer_switch(self._count, (on.codes, on.functions), (off.codes, off.functions))

    def _steps(self, is_wanted: bool) -> Steps:
        """What puts all patches in place, or gives them back; it takes long to plan, and happens often."""
        if self._do_others_replace_the_same():
            return self._plan(self._things, is_wanted)
        if is_wanted not in self._alone:
            self._alone[is_wanted] = self._plan(self._things, is_wanted)
        return self._alone[is_wanted]

    def _do_others_replace_the_same(self) -> bool:
        others = (lease for lease in leases if lease is not self and lease.is_active)
        return any(not self._things.keys().isdisjoint(other._things) for other in others)

    def _plan(self, things: Iterable[Thing], is_wanted: bool) -> Steps:
        """What lets our patches of `things` be called, or not; those of others that are in place stay."""
        steps = Steps()
        for thing in things:
            ours = [patch for patch in thing.declared if patch.lease is self._count] if is_wanted else []
            thing.plan((*self._others_in_place(thing), *ours), steps)
        return steps

    def _others_in_place(self, thing: Thing) -> list[Patch]:
        return [patch for patch in thing.declared if patch.lease is not self._count and patch.is_installed]


class _Token:
    def __init__(self, lease: Lease) -> None:
        lease.acquire()
        self._count = lease._count

    def __del__(self) -> None:
        self._count.release()  # may be in the midst of anything, so the core asks for `settle()` later


leases: list[Lease] = []


def settle(is_urgent: bool) -> None:
    """Puts in place what somebody needs, and gives back what nobody needs any more. Called by the core, too.

    Args:
        is_urgent: Whether it is to be done when this returns. What is given back need not be, and must not be waited
            for where the core asks for it in the midst of anything.
    """
    if is_urgent:
        with patching_lock:
            _settle()
    else:
        patching_lock.run_soon(_settle)


def _settle() -> None:
    for lease in leases:
        if not lease.is_settled:
            lease.settle()


_C.provide("settle_leases", settle)


while_fakes_live = Lease("a block of fake_mode or deferred_init is open, or a fake tensor is alive", _C.lease_of_fakes)
while_marks_live = Lease(
    "a tensor is marked: an AmpTensor, or an inference tensor whose origin is traced", _C.lease_of_marks
)
while_autocasting = Lease("a region of autocast is open, or a tensor is marked", _C.lease_of_regions)
