"""Invariants of every random program."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import assert_same_tensor, has_same_bits
from fuzz import fakes
from fuzz.fakes import partners
from fuzz.machine import DEVICE, Machine, Step, change, on_device
from fuzz.states import restored_settings
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchext.deferred_init import deferred_init, materialize_tensor

__all__ = ["CHECKS", "LOST_DEVICE", "prepare", "run"]

LOST_DEVICE = 77  # exit code of a process that can no longer use CUDA


def steps_that_raise(program: list[Step]) -> set[int]:
    """Return the steps that raise eagerly. The program works without them."""
    skipped: set[int] = set()
    while raising := steps_that_raise_besides(skipped, program):
        skipped |= raising  # some write before they raise, and others read that
    return skipped


def steps_that_raise_besides(skipped: set[int], program: list[Step]) -> set[int]:
    seed_generators()
    machine = Machine()
    raising = set()
    with restored_settings(), torch.no_grad(), on_device():
        for place, step in enumerate(program):
            if place in skipped:
                continue
            states = generator_states()
            try:
                machine.step(step)
            except Exception:
                raising.add(place)
                restore(states)  # some advance the generator before they raise
    return raising


def default_generators() -> list[torch.Generator]:
    """Return the generators that a program may use."""
    return [torch.default_generator, *(torch.cuda.default_generators if DEVICE.type == "cuda" else ())]


def seed_generators() -> None:
    for generator in default_generators():
        generator.manual_seed(0)


def generator_states() -> list[Tensor]:
    return [generator.get_state() for generator in default_generators()]


def restore(states: list[Tensor]) -> None:
    for generator, state in zip(default_generators(), states, strict=True):
        generator.set_state(state)


def assert_states(expected: list[Tensor]) -> None:
    for found, wanted in zip(generator_states(), expected, strict=True):
        assert torch.equal(found, wanted), "a generator stands elsewhere"


def materialize_all(machine: Machine, order: int) -> list[int]:
    """Materialize the memory in the order that `order` selects, and return the positions that failed.

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
    """Return true for errors about the large source, which the program may also change and then read results of."""
    return machine.has_read_large and "changed in place since" in str(error)


def check(program: list[Step], order: int) -> None:
    skipped = steps_that_raise(program)
    seed_generators()
    wanted = Machine().run(program, skipped)
    states = generator_states()
    if DEVICE.type == "cuda":
        end_process_if_device_is_lost()
    has_one_result = [True] * len(wanted) if DEVICE.type == "cpu" else equal_to_another_run(wanted, program, skipped)
    seed_generators()
    machine = Machine()
    try:
        found = deferred_init(machine.run, program, skipped)
    except RuntimeError as error:
        if not is_about_large_source(machine, error):
            raise
        return
    assert_states(states)
    assert len(found) == len(wanted)
    assert partners(found) == partners(wanted)
    for source in machine.sources:
        change(source, order)
    failed = materialize_all(machine, order)
    for place, (tensor, want) in enumerate(zip(found, wanted, strict=True)):
        if place not in failed and has_one_result[place]:
            assert_same_tensor(tensor, want, f"memory[{place}]", strictly=False)
    assert_states(states)


def end_process_if_device_is_lost() -> None:
    """End this process if eager kernels have hit an error that disables CUDA, such as an index out of bounds."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(LOST_DEVICE)


def equal_to_another_run(tensors: list[Tensor], program: list[Step], skipped: set[int]) -> list[bool]:
    """Return whether another run has equal results: sums and scans on CUDA may differ."""
    seed_generators()
    again = Machine().run(program, skipped)
    return [has_same_bits(tensor, other) for tensor, other in zip(tensors, again, strict=True)]


def check_refusal(program: list[Step], order: int) -> None:
    """Check a step that raises eagerly, as the last step of a program without the other ones."""
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
    if found is None and machine.has_dropped_large:  # a dropped result is never materialized
        return
    if wanted is not None and found is None:  # it depends on values, so it must raise now
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
    """Return the error of the step at `place`, after the steps before it."""
    seed_generators()
    with restored_settings(), torch.no_grad(), on_device():
        for step in (step for number, step in enumerate(program[:place]) if number not in skipped):
            machine.step(step)
        try:
            machine.step(program[place])
        except Exception as error:
            # Its frames would keep the hooks of a checkpoint on saved tensors.
            return error.with_traceback(None)
    return None


CHECKS = {"defer exactly": check, "raise as eagerly": check_refusal, **(fakes.CHECKS if DEVICE.type == "cpu" else {})}


#
# Another process imports these by name, so they are not in a test file.


def prepare() -> None:
    """Create a process group of this process only."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    if DEVICE.type == "cuda":
        torch.cuda.init()


def run(checked: str, program: list[Step], order: int) -> None:
    """Check a program. Raise an AssertionError if it differs."""
    CHECKS[checked](program, order)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
