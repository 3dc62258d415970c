"""The vocabulary of the rules: a kernel is a list of allocations and frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .geometry import Geometry

__all__ = ["NO_BLOCK", "RULES", "Gpu", "KernelCall", "Rule", "Steps", "copying", "rule", "steps_of"]

Step: TypeAlias = tuple[int, int, int]
"""A `KernelStep` of csrc/extensions/memory/memory_counter.h: its kind, its bytes, and the number of its block."""

Steps: TypeAlias = tuple[list[Step], list[Step]]
"""The steps before and after the results."""

ALLOCATE, FREE, WORKSPACE, RESULT = range(4)  # the kinds of steps

NO_BLOCK = -1
"""The number of a block of 0 bytes, for which the allocator returns no memory, or of a copy that is not needed."""


class Gpu(NamedTuple):
    """The properties of a GPU that rules read."""

    major: int
    multiprocessors: int
    max_threads_per_multiprocessor: int


class KernelCall:
    """A call of an operator, and the steps of its kernel so far.

    Rules follow the kernels line by line, in the order of allocation. A rule that does not call `allocate_results()`
    describes a kernel that allocates all its results last. Blocks that a rule does not free are freed at its end, the
    last one first, as C++ destroys local variables. A block `with call:` frees those allocated in it in the same way.

    Args:
        arguments: The arguments by position. A tensor is a `Geometry`, and None if it is undefined.
        results: The results, in the same form.
        gpu: The device.
    """

    __slots__ = ("_alive", "_count", "_scopes", "_steps", "arguments", "gpu", "results", "steps")

    def __init__(self, arguments: Sequence[Any], results: Sequence[Any], gpu: Gpu) -> None:
        self.arguments = arguments
        self.results = results
        self.gpu = gpu
        self.steps: Steps = ([], [])
        self._steps = self.steps[0]
        self._count = 0
        self._alive: list[int] = []
        self._scopes: list[int] = []

    def tensor(self, i: int) -> Geometry:
        """Return an argument that is a tensor."""
        tensor: Geometry = self.arguments[i]
        return tensor

    def result(self, i: int = 0) -> Geometry:
        """Return a result that is a tensor."""
        result: Geometry = self.results[i]
        return result

    def allocate_results(self, *in_order: int) -> None:
        """Allocate some results, in this order. By default all that remain, in the order that the operator returns."""
        if in_order:
            self._steps += [(RESULT, 0, number) for number in in_order]
        else:
            self._steps = self.steps[1]

    def allocate(self, nbytes: int) -> int:
        """Allocate a block besides the results, and return its number."""
        if nbytes <= 0:
            return NO_BLOCK
        block = self._count
        self._count += 1
        self._alive.append(block)
        self._steps.append((ALLOCATE, nbytes, block))
        return block

    def free(self, *blocks: int) -> None:
        """Free blocks in this order."""
        for block in blocks:
            if block != NO_BLOCK:
                self._alive.remove(block)
                self._steps.append((FREE, 0, block))

    def allocate_and_free(self, nbytes: int) -> None:
        """Allocate a block and free it at once."""
        self.free(self.allocate(nbytes))

    def __enter__(self) -> KernelCall:
        self._scopes.append(len(self._alive))
        return self

    def __exit__(self, *error: object) -> None:
        self.free(*self._alive[: self._scopes.pop() - len(self._alive) - 1 : -1])

    def keep_workspace(self, workspace: int, nbytes: int) -> None:
        """Require memory that the thread keeps for its stream once it has been allocated."""
        if nbytes > 0:
            self._steps.append((WORKSPACE, nbytes, workspace))

    def copy(self, tensor: Geometry) -> int:
        """Allocate a copy of all elements of `tensor`."""
        return self.allocate(tensor.nbytes)

    def copy_unless(self, is_readable: bool, tensor: Geometry) -> int:
        """Copy `tensor`, unless the kernel can read it."""
        return NO_BLOCK if is_readable else self.copy(tensor)

    def contiguous(self, *tensors: Geometry) -> None:
        """Copy tensors unless they are contiguous, as `contiguous()` does."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                self.copy(tensor)


Rule: TypeAlias = Callable[[KernelCall], None]
"""Describes the kernel of a call by adding its steps."""

RULES: dict[str, Rule] = {}
"""The rules by the full names of operators."""


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule of operators of `aten`. A name without an overload is the one with an empty overload name."""

    def register(function: Rule) -> Rule:
        RULES.update((f"aten::{operator}", function) for operator in operators)
        return function

    return register


def copying(*, before: Sequence[int] = (), after: Sequence[int] = ()) -> Rule:
    """Return the rule of a kernel that only copies arguments that are not contiguous, before or after the results."""

    def describe(call: KernelCall) -> None:
        call.contiguous(*[call.tensor(i) for i in before])
        call.allocate_results()
        call.contiguous(*[call.tensor(i) for i in after])

    return describe


def steps_of(operator: str, arguments: Sequence[Any], results: Sequence[Any], gpu: Sequence[int]) -> Steps:
    """Return the steps of the kernel of a call. The core calls this: csrc/python/memory.cpp."""
    call = KernelCall(arguments, results, Gpu(*gpu))
    with call:
        RULES[operator](call)
    return call.steps
