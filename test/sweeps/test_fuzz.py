"""Random programs: what they construct deferred, materialized in any order, equals what they construct eagerly.

Fakes have the metadata, errors and known values of real tensors, on the CPU and on two fake GPUs: `fuzz/fakes.py`.

The programs read real tensors that are changed before anything is materialized, show memory in other dtypes, write
`out=` arguments, run backward passes, use threads, change global state, call operators with wrong dtypes and shapes,
and call collectives. A step that raises eagerly must raise deferred, immediately or when it is materialized; no other
step may raise.

Hypothesis writes some hundred programs, always the same, and shrinks those that fail. `make fuzz PROGRAMS=1000000`
writes more and different ones, with a generator that is 10x faster, and prints the failing ones with as few steps as
possible. All of them run in another process: a program that hangs or ends its process has failed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from fuzz.checks import CHECKS, LOST_DEVICE, prepare, run
from fuzz.machine import ACTIONS, AWAITED, DEVICE, FACTORIES, Step
from fuzz.watchdog import Watchdog
from hypothesis import strategies

TRIED = [name for name in ACTIONS if name not in AWAITED]

STEPS = strategies.builds(
    Step,
    strategies.sampled_from([*FACTORIES, *TRIED]),
    strategies.integers(0, 30),
    strategies.integers(0, 30),
    strategies.integers(0, 100),
)
FIRST_STEPS = strategies.builds(
    Step,
    strategies.sampled_from([*FACTORIES]),
    strategies.integers(0, 30),
    strategies.integers(0, 30),
    strategies.just(1),
)
PROGRAMS = strategies.tuples(
    strategies.lists(FIRST_STEPS, min_size=1, max_size=4), strategies.lists(STEPS, min_size=1, max_size=25)
).map(lambda parts: [*parts[0], *parts[1]])


@pytest.fixture(scope="module")
def programs() -> Iterator[Watchdog]:
    with Watchdog(run, prepare) as watchdog:
        yield watchdog


@pytest.mark.parametrize("checked", CHECKS)
@hypothesis.given(program=PROGRAMS, order=strategies.integers(0, 30))
def test_programs(programs: Watchdog, checked: str, program: list[Step], order: int) -> None:
    failure = programs.failure(checked, program, order)
    assert failure is None, failure


@pytest.mark.programs
@pytest.mark.parametrize("checked", CHECKS)
def test_many_programs(programs: Watchdog, checked: str, fuzz_seed: int, fuzz_count: int) -> None:
    if DEVICE.type == "cuda" and checked == "raise as eagerly":
        pytest.skip("kernels of CUDA make their checks in another order, and more of them where there are no elements")
    numbers = random.Random(f"{checked} {fuzz_seed}")
    lost = 0
    for _ in range(fuzz_count):
        program, order = random_program(numbers), numbers.randrange(31)
        if (failure := programs.failure(checked, program, order)) is not None:
            if failure == f"ends the process: exit code {LOST_DEVICE}":  # eagerly
                lost += 1
                continue
            program = shortened(programs, checked, program, order)
            print(f"seed {fuzz_seed}, order {order}:", *program, sep="\n    ")
            pytest.fail(programs.failure(checked, program, order) or f"once, and not again: {failure}")
    assert lost <= fuzz_count / 10


def random_program(numbers: random.Random) -> list[Step]:
    """Return a program that uses all actions, or repeats a few."""
    count = numbers.choice((4, 12, len(TRIED)))
    actions = numbers.sample(TRIED, count)

    def steps(kinds: list[str], count: int) -> list[Step]:
        return [
            Step(numbers.choice(kinds), numbers.randrange(30), numbers.randrange(30), numbers.randrange(100))
            for _ in range(count)
        ]

    return [*steps([*FACTORIES], numbers.randint(1, 4)), *steps([*FACTORIES, *actions], numbers.randint(1, 25))]


def shortened(programs: Watchdog, checked: str, program: list[Step], order: int) -> list[Step]:
    """Return the program without steps that are not needed for its failure."""
    for place in reversed(range(len(program))):
        shorter = program[:place] + program[place + 1 :]
        if programs.failure(checked, shorter, order) is not None:
            program = shorter
    return program


@pytest.mark.ci
def test_hang_is_a_failure() -> None:
    with Watchdog(time.sleep, int, seconds=1) as watchdog:
        assert watchdog.failure(1000) == "hangs: no answer within 1 s"
        assert watchdog.failure(0) is None


@pytest.mark.ci
def test_crash_is_a_failure() -> None:
    with Watchdog(os.abort, int) as watchdog:
        assert watchdog.failure() == "ends the process: SIGABRT"


@pytest.mark.ci
def test_error_is_a_failure() -> None:
    with Watchdog(torch.ones, int) as watchdog:
        assert "TypeError" in str(watchdog.failure("nothing"))
