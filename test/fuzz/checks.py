"""What must hold for every random program."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import assert_same_tensor
from fuzz.machine import Machine, Step, change
from fuzz.states import restored_settings
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchext.deferred_init import deferred_init, materialize_tensor

__all__ = ["CHECKS", "prepare", "run"]


def steps_that_raise(program: list[Step]) -> set[int]:
    """Returns the steps that raise eagerly. Without them the program works."""
    skipped: set[int] = set()
    while raising := steps_that_raise_besides(skipped, program):
        skipped |= raising  # some have written before they raised, and others have read that
    return skipped


def steps_that_raise_besides(skipped: set[int], program: list[Step]) -> set[int]:
    torch.default_generator.manual_seed(0)
    machine = Machine()
    raising = set()
    with restored_settings(), torch.no_grad():
        for place, step in enumerate(program):
            if place in skipped:
                continue
            state = torch.get_rng_state()
            try:
                machine.step(step)
            except Exception:
                raising.add(place)
                torch.set_rng_state(state)  # some draw before they raise
    return raising


def partners(tensors: list[Tensor]) -> list[list[int]]:
    """Returns, for each tensor, the positions of those that share its storage."""
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [[place for place, other in enumerate(storages) if other == storage] for storage in storages]


def materialize_all(machine: Machine, order: int) -> list[int]:
    """Materializes the memory in the order that `order` selects, and returns the positions of what could not be.

    The only permitted reason is that the program has read the source that is not copied, and it was changed.
    """
    failed = []
    for place in sorted(range(len(machine.memory)), key=lambda place: (place + 1) * (2 * order + 1) % 31):
        try:
            materialize_tensor(machine.memory[place])
        except RuntimeError as error:
            if not is_about_large_source(machine, error):
                raise
            failed.append(place)
    return failed


def is_about_large_source(machine: Machine, error: Exception) -> bool:
    """The program, too, may change it and then read what was computed from it."""
    return machine.has_read_large and "changed in place since" in str(error)


def check(program: list[Step], order: int) -> None:
    skipped = steps_that_raise(program)
    torch.default_generator.manual_seed(0)
    wanted = Machine().run(program, skipped)
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    machine = Machine()
    try:
        found = deferred_init(machine.run, program, skipped)
    except RuntimeError as error:
        if not is_about_large_source(machine, error):
            raise
        return
    assert torch.equal(torch.get_rng_state(), state)
    assert len(found) == len(wanted)
    assert partners(found) == partners(wanted)
    for source in machine.sources:
        change(source, order)
    failed = materialize_all(machine, order)
    for place, (tensor, want) in enumerate(zip(found, wanted, strict=True)):
        if place not in failed:
            assert_same_tensor(tensor, want, f"memory[{place}]", strictly=False)
    assert torch.equal(torch.get_rng_state(), state)


def check_refusal(program: list[Step], order: int) -> None:
    """Checks one of the steps that raise eagerly, as the last step of a program without the others."""
    skipped = sorted(steps_that_raise(program))
    if not skipped:
        return
    place = skipped[order % len(skipped)]
    wanted = error_of(Machine(), program, skipped, place)
    machine = Machine()
    try:
        found = deferred_init(error_of, machine, program, skipped, place)
    except RuntimeError as error:
        if not is_about_large_source(machine, error):
            raise
        return
    if found is not None and is_about_large_source(machine, found):
        return
    if wanted is not None and found is None:  # it depends on values, so it has to be raised now
        found = error_of_materializing(machine, order)
        assert found is not None, f"nothing for {wanted!r}"
    else:
        assert type(found) is type(wanted), f"{found!r} for {wanted!r}"


def error_of_materializing(machine: Machine, order: int) -> Exception | None:
    try:
        materialize_all(machine, order)
    except Exception as error:
        return error
    return None


def error_of(machine: Machine, program: list[Step], skipped: list[int], place: int) -> Exception | None:
    """Returns what the step at `place` raises, after those before it."""
    torch.default_generator.manual_seed(0)
    with restored_settings(), torch.no_grad():
        for step in (step for number, step in enumerate(program[:place]) if number not in skipped):
            machine.step(step)
        try:
            machine.step(program[place])
        except Exception as error:
            return error
    return None


CHECKS = {"defer exactly": check, "raise as eagerly": check_refusal}


# Another process imports these by name, so they are not in a file of tests.


def prepare() -> None:
    """Makes a process group of this process only."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def run(checked: str, program: list[Step], order: int) -> None:
    """Checks a program. Raises an AssertionError if it differs."""
    CHECKS[checked](program, order)
