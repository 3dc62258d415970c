"""Fakes answer what real tensors answer: metadata, sharing, errors, and the values that are known.

A program runs on real tensors and in `fake_mode()` side by side. Some programs run in a forked child, and some on the
second of two fake GPUs, where it must not matter which device is current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from common import has_same_bits, in_forked_process
from comparisons import LOOSE_PROPERTIES, metadata
from fuzz.machine import Machine, Step
from fuzz.states import restored_settings
from torch import Tensor

from torchext import _C
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_mode, is_fake

__all__ = ["CHECKS"]

PROGRAMS_A_FORK = 10

COMPARED = LOOSE_PROPERTIES | {"storage_offset", "is_inference"}
# Actions on memory that fakes do not have, and on threads outside of the block, where factories make real tensors.
NEEDS_MEMORY = {"numpy", "share_numpy", "write_source", "collective", "set_data", "read_on_thread"}


def partners(tensors: list[Tensor]) -> list[list[int]]:
    """Return, for each tensor, the positions of those that share its storage."""
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [[place for place, other in enumerate(storages) if other == storage] for storage in storages]


class Side:
    """A machine and the blocks in which its steps run."""

    def __init__(self, block: Callable[[], AbstractContextManager[object]]) -> None:
        self._block = block
        with block():
            self.machine = Machine()

    def error_of(self, step: Step) -> Exception | None:
        with self._block(), torch.no_grad():
            try:
                self.machine.step(step)
            except Exception as error:
                return error.with_traceback(None)
        return None

    @property
    def memory(self) -> list[Tensor]:
        return self.machine.memory


def lacks_values(error: Exception | None) -> bool:
    is_about_data = isinstance(error, RuntimeError) and ("fake" in str(error) or "no data" in str(error))
    return isinstance(error, (DataDependentError, UnsupportedOperatorError)) or is_about_data


def is_all_known(tensors: list[Tensor]) -> bool:
    return all(not is_fake(tensor) or _C.known_value(tensor) is not None for tensor in tensors)


def check_alike(step: Step, real: Side, fake: Side) -> None:
    assert len(fake.memory) == len(real.memory), step
    for place, (found, wanted) in enumerate(zip(fake.memory, real.memory, strict=True)):
        differences = {name: (found, wanted) for name, found, wanted in differing(found, wanted)}
        assert not differences, f"{step}: memory[{place}]: {differences}"
        known = _C.known_value(found) if is_fake(found) else None
        assert known is None or has_same_bits(known, wanted), f"{step}: memory[{place}]: {known} for {wanted}"
    assert partners(fake.memory) == partners(real.memory), step


def is_ambiguous(step: Step, side: Side) -> bool:
    """Return True if an output that may grow shares memory with an input."""
    if step.action not in ("out_of_any_shape", "out_of_a_view") or not side.memory:
        return False
    one, other = (side.memory[place % len(side.memory)].untyped_storage()._cdata for place in (step.a, step.b))
    return step.action == "out_of_a_view" or one == other


def has_resized(real: Side, fake: Side) -> bool:
    return [tensor.shape for tensor in real.memory] != [tensor.shape for tensor in fake.memory]


def differing(found: Tensor, wanted: Tensor) -> Iterator[tuple[str, object, object]]:
    of_found, of_wanted = metadata(found, COMPARED), metadata(wanted, COMPARED)
    yield from ((name, of_found[name], of_wanted[name]) for name in of_found if of_found[name] != of_wanted[name])


def check_against_real(program: list[Step], order: int) -> None:
    """Compare each step with the real one, up to a step that needs values. Some programs run in a forked process."""
    if order % PROGRAMS_A_FORK == 0:
        assert in_forked_process(lambda: compare_with_real(program)) == 0, "differs in a forked process, or ends it"
    else:
        compare_with_real(program)


def compare_with_real(program: list[Step]) -> None:
    with restored_settings():
        torch.manual_seed(0)
        real, fake = Side(nullcontext), Side(fake_mode)
        for step in program:
            if step.action in NEEDS_MEMORY or is_ambiguous(step, real):
                continue
            # `trunc_normal_` also depends on the numbers that it draws: it copies only if it draws some again.
            were_known = is_all_known(fake.memory) and step.action != "trunc_normal_"
            found = fake.error_of(step)
            if lacks_values(found):
                return
            wanted = real.error_of(step)
            if wanted is not None and found is None and not were_known:
                return  # depends on values
            assert type(found) is type(wanted), f"{step}: {found!r} for {wanted!r}"
            if wanted is not None and has_resized(real, fake):
                return  # structured kernels resize their output before they raise
            check_alike(step, real, fake)


def check_devices(program: list[Step], order: int) -> None:
    """Compare runs on the second of two fake GPUs while the first or the second is current."""

    def on_second(current: int) -> Callable[[], AbstractContextManager[object]]:
        def block() -> AbstractContextManager[object]:
            stack = ExitStack()
            stack.enter_context(torch.cuda.device(current))
            stack.enter_context(torch.device("cuda:1"))
            return stack

        return block

    with fake_mode(gpu=2), restored_settings():
        sides = [Side(on_second(current)) for current in (0, 1)]
        for step in program:
            # With the same numbers: those that `trunc_normal_` draws decide whether it draws some again.
            numbers = torch.get_rng_state()
            first = sides[0].error_of(step)
            torch.set_rng_state(numbers)
            second = sides[1].error_of(step)
            assert repr(first) == repr(second), step
            assert "INTERNAL ASSERT" not in str(first), (step, first)
            assert metadata(sides[0].memory, COMPARED) == metadata(sides[1].memory, COMPARED), step


CHECKS = {"answer as real tensors": check_against_real, "ignore the current device": check_devices}
