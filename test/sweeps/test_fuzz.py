"""Random programs: what they construct deferred, materialized in any order, equals what they construct eagerly.

They read real tensors that are changed before anything is materialized, call operators with wrong dtypes and shapes,
and ask for collectives. What raises eagerly must raise deferred, at once or when it is materialized; nothing else may
raise.

Hypothesis writes some thousand programs, always the same, and shrinks those that fail. `make fuzz PROGRAMS=1000000`
writes more and different ones, by a generator that is ten times as fast, and prints those that fail, with as few steps
as possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from common import assert_same_tensor, too_large_to_copy
from hypothesis import strategies
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchext.deferred_init import deferred_init, materialize_tensor

SHAPES = ((), (1,), (3,), (17,), (32,), (4, 5), (5, 4), (2, 3, 4), (16, 3), (0, 2))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Step(NamedTuple):
    """One statement of a program: the name of an action, and numbers that select its operands."""

    action: str
    a: int
    b: int
    n: int


class Machine:
    """Runs a program. The tensors that it has made are its memory, and steps refer to them by position."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(5)
        self.sources = make_sources()
        self.has_read_large = False

    def run(self, program: list[Step], skipped: set[int]) -> list[Tensor]:
        """Runs `program`, without the steps in `skipped`, and returns its memory."""
        with torch.no_grad():
            for place, step in enumerate(program):
                if place not in skipped:
                    self.step(step)
        return self.memory

    def step(self, step: Step) -> None:
        if step.action in FACTORIES:
            self.memory.append(FACTORIES[step.action](SHAPES[step.a % len(SHAPES)], step.b, step.n))
        elif self.memory:
            a, b = (self.memory[place % len(self.memory)] for place in (step.a, step.b))
            result = ACTIONS[step.action](self, a, b, step.n)
            self.memory.extend([result] if isinstance(result, Tensor) else result or [])

    def forget(self, tensor: Tensor) -> None:
        self.memory = [t for t in self.memory if t is not tensor]


def make_sources() -> list[Tensor]:
    """Returns real tensors for programs to read: small ones, also on foreign memory, and one too large to copy."""
    with torch.inference_mode():
        inference = torch.linspace(-1, 1, 3)
    return [
        torch.linspace(-2, 2, 3),
        torch.arange(20).view(4, 5),
        torch.from_numpy(np.linspace(0, 1, 4, dtype=np.float32)).view(4, 1),
        inference,
        too_large_to_copy(),
    ]


def change(source: Tensor, n: int) -> None:
    """Changes all elements, without bumping the version."""
    if n % 3 == 0:
        source.numpy()[...] += 1
    elif n % 3 == 1:
        storage: Any = source.detach().untyped_storage()
        storage.fill_(3)
    elif source.is_inference():
        with torch.inference_mode():
            source.add_(1)
    else:
        source.data.add_(1)


def float_of(n: int) -> torch.dtype:
    return FLOATS[n % len(FLOATS)]


# Factories of tensors of a shape. `n` and `m` are any numbers.
FACTORIES: dict[str, Callable[[tuple[int, ...], int, int], Tensor]] = {
    "zeros": lambda shape, n, m: torch.zeros(shape, dtype=DTYPES[n % len(DTYPES)]),
    "ones": lambda shape, n, m: torch.ones(shape, dtype=DTYPES[n % len(DTYPES)]),
    "full": lambda shape, n, m: torch.full(shape, n % 7 - 3.5),
    "rand": lambda shape, n, m: torch.rand(shape, dtype=float_of(n)),
    "randn": lambda shape, n, m: torch.randn(shape, dtype=float_of(n)),
    "randint": lambda shape, n, m: torch.randint(n % 5, n % 5 + 1 + m % 9, shape),
    "randperm": lambda shape, n, m: torch.randperm(n % 40),
    "arange": lambda shape, n, m: torch.arange(n % 20, dtype=torch.float32),
    "linspace": lambda shape, n, m: torch.linspace(0, n % 3 + 1, m % 20 + 1),
    "eye": lambda shape, n, m: torch.eye(n % 6, m % 6),
    "constant": lambda shape, n, m: torch.tensor([[n % 5, 1.5], [-2.0, m % 3]]),
    "number": lambda shape, n, m: torch.tensor(float(n % 11)),
    "from_numpy": lambda shape, n, m: torch.from_numpy(np.arange(n % 12, dtype=np.float32)),
    "empty-normal": lambda shape, n, m: torch.empty(shape, dtype=float_of(n)).normal_(m % 3, 1 + n % 2),
    "bernoulli": lambda shape, n, m: torch.bernoulli(torch.full(shape, 0.3)),
    "parameter": lambda shape, n, m: nn.Parameter(torch.rand(shape), requires_grad=False),
    "complex": lambda shape, n, m: torch.randn(shape, dtype=torch.complex64),
    "transposed": lambda shape, n, m: torch.rand((n % 5 + 1, m % 7 + 1)).t(),
}


def index_of(tensor: Tensor, n: int) -> Any:
    """An index into the first dimension that there is."""
    kinds = (0, slice(None, None, 2), slice(1, None), None, Ellipsis, [0], torch.tensor([0, 0]), slice(0, 0))
    return kinds[n % len(kinds)]


def weight_of(tensor: Tensor) -> Tensor:
    """A matrix, for initializers that need one."""
    return tensor if tensor.dim() >= 2 and tensor.is_floating_point() else torch.ones(4, 6)


def filled(tensor: Tensor) -> Tensor:
    """Returns `tensor` if it has elements. Kernels do not refuse the dtype of one that has none."""
    if tensor.numel() == 0:
        raise ValueError("has no elements")
    return tensor


def read_number(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    value = float(a.double().nan_to_num().clamp(-5, 5).sum().item()) if a.numel() else 0.0
    return b.new_full((3,), 1 if value > n % 3 else 0)


def branch_on_value(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor | None:
    if bool((a == a).all()) and a.numel() > n % 4:
        return b.clone()
    return None


def share_numpy(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    a.detach().numpy()  # this makes it real
    return a.detach() * 2


def with_own_seed(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n)
        return torch.rand_like(a.float())


def source_of(machine: Machine, n: int) -> Tensor:
    place = n % len(machine.sources)
    machine.has_read_large = machine.has_read_large or place == len(machine.sources) - 1
    return machine.sources[place]


def ask_for_collective(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    """Calls a collective of a process alone, which a deferred tensor becomes real for."""
    collectives = (
        lambda: dist.all_reduce(a),
        lambda: dist.broadcast(a, 0),
        lambda: dist.all_gather([torch.empty_like(a)], a),
        lambda: funcol.all_reduce(a, "sum", dist.group.WORLD),
    )
    collectives[n % len(collectives)]()


def write_source(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    """Writes a deferred tensor, or a number, to a real one."""
    source = source_of(machine, n)
    source.copy_(a) if n % 2 else source.data.mul_(2)


def set_data(machine: Machine, a: Tensor, b: Tensor, n: int) -> None:
    if a.dtype == b.dtype or not a.requires_grad:
        a.data = b.data


def write_out(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor | None:
    # Meta kernels give what they resize other strides than CPU kernels do.
    return torch.add(a, 1, out=b) if a.shape == b.shape else None


def tie(machine: Machine, a: Tensor, b: Tensor, n: int) -> Tensor:
    return nn.Parameter(a, requires_grad=False) if a.is_floating_point() and n % 2 else a


Action = Callable[[Machine, Tensor, Tensor, int], Any]

ACTIONS: dict[str, Action] = {
    # random fills
    "normal_": lambda m, a, b, n: filled(a).normal_(n % 3, 2),
    "uniform_": lambda m, a, b, n: filled(a).uniform_(-1, n % 3),
    "bernoulli_": lambda m, a, b, n: filled(a).bernoulli_(0.5),
    "random_": lambda m, a, b, n: filled(a).random_(0, 1 + n % 100),
    "exponential_": lambda m, a, b, n: filled(a).exponential_(),
    "geometric_": lambda m, a, b, n: filled(a).geometric_(0.5),
    "log_normal_": lambda m, a, b, n: filled(a).log_normal_(),
    "cauchy_": lambda m, a, b, n: filled(a).cauchy_(),
    "generator": lambda m, a, b, n: filled(a).uniform_(generator=m.generator),
    "multinomial": lambda m, a, b, n: torch.multinomial(torch.ones(5), 1 + n % 4),
    "dropout": lambda m, a, b, n: torch.dropout(a.float(), 0.5, train=True),
    "seed": lambda m, a, b, n: torch.manual_seed(n) and None,
    "own-seed": with_own_seed,
    "trunc_normal_": lambda m, a, b, n: nn.init.trunc_normal_(a, std=1, a=-0.5 - n % 3, b=0.5 + n % 9),
    "kaiming_uniform_": lambda m, a, b, n: nn.init.kaiming_uniform_(weight_of(a)),
    "xavier_normal_": lambda m, a, b, n: nn.init.xavier_normal_(weight_of(a)),
    "orthogonal_": lambda m, a, b, n: nn.init.orthogonal_(weight_of(a).float()),
    "sparse_": lambda m, a, b, n: nn.init.sparse_(torch.ones(5, 6), 0.4),
    # views
    "t": lambda m, a, b, n: a.t(),
    "transpose": lambda m, a, b, n: a.transpose(0, -1),
    "flatten": lambda m, a, b, n: a.view(-1),
    "reshape": lambda m, a, b, n: a.reshape(-1),
    "index": lambda m, a, b, n: a[index_of(a, n)],
    "narrow": lambda m, a, b, n: a.narrow(0, 1, 1 + n % 2),
    "unsqueeze": lambda m, a, b, n: a.unsqueeze(n % (a.dim() + 1)),
    "expand": lambda m, a, b, n: a.expand(2, *a.shape),
    "chunk": lambda m, a, b, n: list(a.chunk(2)),
    "diagonal": lambda m, a, b, n: a.diagonal(),
    "detach": lambda m, a, b, n: a.detach(),
    "data": lambda m, a, b, n: a.data,
    "as_strided": lambda m, a, b, n: a.as_strided((2,), (1,), n % 3),
    "bytes": lambda m, a, b, n: a.view(torch.uint8),
    "real": lambda m, a, b, n: torch.view_as_real(a)[..., n % 2],
    "conj": lambda m, a, b, n: a.conj(),
    # writes
    "add_": lambda m, a, b, n: a.add_(n % 5),
    "add_other_": lambda m, a, b, n: a.add_(b),
    "mul_": lambda m, a, b, n: a.mul_(n % 4),
    "copy_": lambda m, a, b, n: a.copy_(b),
    "zero_row": lambda m, a, b, n: a[n % 3].zero_(),
    "set_item": lambda m, a, b, n: a.__setitem__(index_of(a, n), n % 9),
    "set_mask": lambda m, a, b, n: a.__setitem__(a > 0, n % 9),
    "masked_fill_": lambda m, a, b, n: a.masked_fill_(a > 0, n % 9),
    "index_put_": lambda m, a, b, n: a.index_put_((torch.tensor([0, 0]),), a.new_ones(()), accumulate=True),
    "clamp_": lambda m, a, b, n: a.clamp_(-1, n % 3),
    "out": write_out,
    "resize_": lambda m, a, b, n: a.resize_(a.shape).fill_(1),
    "foreach": lambda m, a, b, n: torch._foreach_add_([a, b], 1.0),
    # real tensors from outside
    "read_source": lambda m, a, b, n: a.copy_(source_of(m, n)),
    "add_source": lambda m, a, b, n: a + source_of(m, n),
    "source_item": lambda m, a, b, n: a.__setitem__(index_of(a, n), source_of(m, n)),
    "scatter_source": lambda m, a, b, n: a.index_add_(0, m.sources[1][:1, :1].view(-1), source_of(m, n)),
    "write_source": write_source,
    "collective": ask_for_collective,
    # operators whose arguments often have a wrong dtype or shape
    "mm": lambda m, a, b, n: a.mm(b),
    "linear": lambda m, a, b, n: functional.linear(a, b),
    "layer_norm": lambda m, a, b, n: functional.layer_norm(a, a.shape[-1:], b),
    # With a target of no dimensions PyTorch compares a size that it does not have, which is what memory holds there.
    "cross_entropy": lambda m, a, b, n: functional.cross_entropy(a, b if b.dim() > 0 else b.view(1)),
    "embedding": lambda m, a, b, n: functional.embedding(a, b),
    "conv": lambda m, a, b, n: functional.conv1d(a, b),
    "index_select": lambda m, a, b, n: a.index_select(n % 3, b),
    "gather": lambda m, a, b, n: a.gather(n % 3, b),
    "set_items": lambda m, a, b, n: a.__setitem__(index_of(a, n), b),
    "softmax_of": lambda m, a, b, n: a.softmax(n % 5),
    "argmax": lambda m, a, b, n: a.argmax(n % 4),
    "max_of_all": lambda m, a, b, n: a.max(),
    "join": lambda m, a, b, n: torch.stack([a, b]),
    "complex_of": lambda m, a, b, n: torch.complex(a, b),
    "where": lambda m, a, b, n: torch.where(a, b, a),
    "bmm": lambda m, a, b, n: a.bmm(b),
    "lerp": lambda m, a, b, n: torch.lerp(a, b, 0.5),
    # identity
    "tie": tie,
    "set_data": set_data,
    "set_": lambda m, a, b, n: torch.empty(0, dtype=a.dtype).set_(a),
    "forget": lambda m, a, b, n: m.forget(a),
    "deepcopy": lambda m, a, b, n: __import__("copy").deepcopy([a.detach(), a.detach().view(-1)]),
    # computations
    "half": lambda m, a, b, n: a.half(),
    "to": lambda m, a, b, n: a.to(DTYPES[n % len(DTYPES)]),
    "add": lambda m, a, b, n: a + b,
    "matmul": lambda m, a, b, n: a.float() @ b.float(),
    "cat": lambda m, a, b, n: torch.cat([a, b]),
    "stack": lambda m, a, b, n: torch.stack([a, a]),
    "softmax": lambda m, a, b, n: a.float().softmax(-1),
    "sum": lambda m, a, b, n: a.sum(),
    "max": lambda m, a, b, n: list(a.max(0)),
    "contiguous": lambda m, a, b, n: a.contiguous(),
    "zeros_like": lambda m, a, b, n: torch.zeros_like(a),
    "rand_like": lambda m, a, b, n: torch.rand_like(a),
    "qr": lambda m, a, b, n: list(torch.linalg.qr(weight_of(a).float())) if a.dim() == 2 else None,
    # reads
    "item": read_number,
    "branch": branch_on_value,
    "tolist": lambda m, a, b, n: torch.tensor(a.tolist()),
    "numpy": lambda m, a, b, n: torch.from_numpy(a.detach().numpy().copy()),
    "share_numpy": share_numpy,
    "nonzero": lambda m, a, b, n: a.nonzero(),
    "unique": lambda m, a, b, n: a.unique(),
    "masked_select": lambda m, a, b, n: a[a > 0],
    "equal": lambda m, a, b, n: torch.tensor(torch.equal(a, b)),
}

STEPS = strategies.builds(
    Step,
    strategies.sampled_from([*FACTORIES, *ACTIONS]),
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
    with torch.no_grad():
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
    machine.run(program[:place], set(skipped))
    try:
        machine.step(program[place])
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CHECKS = {"defer exactly": check, "raise as eagerly": check_refusal}


@pytest.mark.parametrize("checked", CHECKS)
@hypothesis.given(PROGRAMS, strategies.integers(0, 30))
def test_programs(checked: str, program: list[Step], order: int) -> None:
    CHECKS[checked](program, order)


@pytest.mark.parametrize("checked", CHECKS)
def test_many_programs(checked: str, fuzz_seed: int, fuzz_count: int) -> None:
    numbers = random.Random(f"{checked} {fuzz_seed}")
    for _ in range(fuzz_count):
        program, order = random_program(numbers), numbers.randrange(31)
        if fails(checked, program, order):
            program = shortened(checked, program, order)
            print(f"seed {fuzz_seed}, order {order}:", *program, sep="\n    ")
            CHECKS[checked](program, order)


def random_program(numbers: random.Random) -> list[Step]:
    def steps(kinds: list[str], count: int) -> list[Step]:
        return [Step(numbers.choice(kinds), *(numbers.randrange(30) for _ in range(3))) for _ in range(count)]

    return [*steps([*FACTORIES], numbers.randint(1, 4)), *steps([*FACTORIES, *ACTIONS], numbers.randint(1, 25))]


def fails(checked: str, program: list[Step], order: int) -> bool:
    try:
        CHECKS[checked](program, order)
    except Exception:
        return True
    return False


def shortened(checked: str, program: list[Step], order: int) -> list[Step]:
    """Returns the program without the steps that are not needed for it to fail."""
    for place in reversed(range(len(program))):
        shorter = program[:place] + program[place + 1 :]
        if fails(checked, shorter, order):
            program = shorter
    return program
