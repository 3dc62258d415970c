"""Values that are not read are not computed: csrc/core/deferred_init/plan/liveness.h."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from common import assert_same_tensor, build_both
from torch import Tensor, nn

from torchext.deferred_init import (
    deferred_init,
    explain,
    export_graph,
    materialize_module,
    materialize_tensor,
)

LIBRARY = torch.library.Library("torchext_test_dead_writes", "DEF")
LIBRARY.define("counted(Tensor x) -> Tensor")
CALLS: list[int] = []


def _counted(x: Tensor) -> Tensor:
    CALLS.append(x.numel())
    return x.clone()


LIBRARY.impl("counted", _counted, "CPU")
LIBRARY.impl("counted", torch.empty_like, "Meta")


def counted(x: Tensor) -> Tensor:
    """Return a copy of `x`. Each real computation is recorded in `CALLS`."""
    return torch.ops.torchext_test_dead_writes.counted(x)


@pytest.fixture(autouse=True)
def _nothing_called() -> None:
    CALLS.clear()


def dead(tensor: Tensor) -> list[str]:
    """Return the calls in the recording of `tensor` that will not run."""
    return [operation.name.removeprefix("aten::") for operation in explain(tensor) if not operation.runs]


OVERWRITING: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "copy_": lambda t: t.copy_(torch.ones(3)),
    "uniform_": lambda t: t.uniform_(),
    "normal_": lambda t: t.normal_(),
    "log_normal_": lambda t: t.log_normal_(),
    "exponential_": lambda t: t.exponential_(),
    "bernoulli_": lambda t: t.bernoulli_(0.25),
    "bernoulli_ with probabilities": lambda t: t.bernoulli_(torch.full((3,), 0.5)),
    "random_": lambda t: t.random_(),
    "geometric_": lambda t: t.geometric_(0.5),
    "cauchy_": lambda t: t.cauchy_(),
    "trunc_normal_": nn.init.trunc_normal_,
    "eye": lambda t: torch.eye(3, out=t),
    "arange": lambda t: torch.arange(9, out=t),
    "add": lambda t: torch.add(torch.ones(3, 3), 1, out=t),
    "foreach": lambda t: torch._foreach_zero_([t[:1], t[1:]]),
    "half by half": lambda t: (t[:2].normal_(), t[2:].zero_()),
    "column by column": lambda t: [t[:, i].uniform_() for i in range(3)],
}


@pytest.mark.parametrize("write", OVERWRITING.values(), ids=OVERWRITING)
def test_overwritten_values_are_not_computed(write: Callable[[Tensor], object]) -> None:
    def build() -> Tensor:
        tensor = counted(torch.rand(3, 3)).add_(1)
        write(tensor)
        return tensor

    eager, deferred = build_both(build)
    CALLS.clear()
    assert "torchext_test_dead_writes::counted" in dead(deferred)
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert CALLS == []


READING: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda t: t.mul_(2),
    "of itself": lambda t: torch.add(t, 1, out=t),
    "all but one row": lambda t: t[1:].normal_(),
    "all but one column": lambda t: t[:, :2].normal_(),
    "all but the diagonal": lambda t: t.masked_fill_(~torch.eye(3, dtype=torch.bool), 0),
    "as probabilities": lambda t: t.bernoulli_(t.clamp(0, 1)),
    "into an out that gets smaller": lambda t: torch.eye(2, out=t),
    "every second byte": lambda t: t.view(-1)[::2].fill_(1),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("write", READING.values(), ids=READING)
def test_observable_values_are_computed(write: Callable[[Tensor], object]) -> None:
    def build() -> Tensor:
        tensor = counted(torch.rand(3, 3))
        whole = tensor.view(9)
        write(tensor)
        return whole

    CALLS.clear()
    eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert CALLS == [9, 9]  # eagerly, and once for the deferred tensor, at the latest when it is materialized


def test_unobservable_writes_are_skipped() -> None:
    def build() -> Tensor:
        tensor = counted(torch.rand(4))
        tensor[:2].uniform_()  # dead: overwritten
        tensor[2:].normal_()
        tensor[:2].zero_()
        return tensor

    eager, deferred = build_both(build)
    CALLS.clear()
    assert dead(deferred) == ["uniform_", "torchext_test_dead_writes::counted", "uniform_"]
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert CALLS == []


def test_reads_before_the_write_get_the_old_values() -> None:
    def build() -> list[Tensor]:
        tensor = torch.rand(4)
        early = tensor + 1
        tensor.zero_()
        return [early, tensor]

    eager, deferred = build_both(build)
    for order in ((1, 0), (0, 1)):
        found = build_both(build)[1]
        for place in order:
            assert_same_tensor(materialize_tensor(found[place]), eager[place])
    assert dead(deferred[1]) == ["uniform_"]


def test_inputs_of_dead_writes_are_not_computed() -> None:
    def build() -> Tensor:
        tensor = torch.empty(4)
        tensor.copy_(counted(torch.rand(4)) * 2)
        return tensor.normal_()

    eager, deferred = build_both(build)
    CALLS.clear()
    assert_same_tensor(materialize_tensor(deferred), eager)
    assert CALLS == []


def test_generators_are_where_they_would_be() -> None:
    def build() -> Tensor:
        return torch.empty(1000).uniform_().normal_().exponential_()

    torch.manual_seed(5)
    eager, after = build(), torch.rand(3)
    torch.manual_seed(5)
    deferred = deferred_init(build)
    assert torch.equal(torch.rand(3), after)
    assert_same_tensor(materialize_tensor(deferred), eager)


def test_inputs_of_dead_operators_may_change() -> None:
    outside = torch.zeros(2, 2**18)[:, 0]  # too large to copy

    def build() -> Tensor:
        return torch.empty(2).copy_(outside).zero_()

    deferred = deferred_init(build)
    outside.fill_(1)
    assert materialize_tensor(deferred).tolist() == [0.0, 0.0]


def test_storages_have_the_size_that_they_had() -> None:
    def build() -> Tensor:
        return torch.empty(10)[2:5].zero_()

    eager, deferred = build_both(build)
    real = materialize_tensor(deferred)
    assert real.untyped_storage().nbytes() == eager.untyped_storage().nbytes() == 40
    assert_same_tensor(real, eager)


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_tensors_of_any_size(shape: tuple[int, ...]) -> None:
    def build() -> Tensor:
        return torch.rand(shape).normal_().fill_(2)

    eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)


def test_explanations_and_graphs_mark_dead_operators(tmp_path: Path) -> None:
    def build() -> nn.Linear:
        module = nn.Linear(2, 2, bias=False)
        nn.init.normal_(module.weight)
        return module

    module = deferred_init(build)
    assert str(explain(module.weight)).splitlines()[1:] == [
        (
            "%1: float32[2, 2] = aten::uniform_(%0, -0.7071067811865474, 0.7071067811865474)  "
            "# 4 draws from 0; not run: its results are not read"
        ),
        "%2: float32[2, 2] = aten::normal_(%1)  # 8 draws from 4",
        "return %2",
    ]
    export_graph(module, tmp_path / "graph.dot")
    assert [line for line in (tmp_path / "graph.dot").read_text().splitlines() if "dashed" in line] == [
        '  op1 [shape=box, label="aten::uniform_(%0, -0.7071067811865474, 0.7071067811865474)", style=dashed];'
    ]


def grown_out() -> list[Tensor]:
    tensor = torch.zeros(6)
    out = tensor[2:2]
    torch.cat([torch.ones(1)] * 3, out=out)
    return [tensor, out]


def grown_and_written_again() -> list[Tensor]:
    tensor = torch.zeros(6)
    out = tensor[:1]
    torch.add(torch.ones(4), 1, out=out)
    tensor[:1] = 9
    return [tensor, out]


def two_grown_outs() -> list[Tensor]:
    tensor = torch.zeros(6)
    low, high = tensor[:0], tensor[3:3]
    torch.aminmax(torch.rand(3, 3), dim=0, out=(low, high))
    tensor[1:4].fill_(5)
    return [tensor, low, high]


def grown_storage() -> list[Tensor]:
    tensor = torch.empty(0).resize_(100_000)
    tensor[:2].fill_(1)
    tensor[2:].zero_()
    return [tensor[:2], tensor]


def grown_view() -> list[Tensor]:
    tensor = torch.ones(2)
    view = tensor[:1]
    view.resize_(6)
    view[0] = 5
    view[2:] = 7
    return [tensor, view[:2], view]


def part_of_a_grown_view() -> list[Tensor]:
    tensor = torch.ones(4)
    view = tensor[:2]
    view.resize_(8)
    view[:2].fill_(3.0)
    view[4:].fill_(2)
    return [tensor, view]


def copy_of_the_storage() -> Tensor:
    tensor = torch.zeros(4)
    tensor[2:].fill_(7)
    return torch.as_strided_copy(tensor[:2], (4,), (1,), 0)


def scatter_beyond() -> Tensor:
    tensor = torch.zeros(6)
    tensor[2:].fill_(7)
    return torch.as_strided_scatter(tensor[:2], torch.ones(2), (2,), (1,), 4).as_strided((6,), (1,))


LIBRARY.define("neighbour(Tensor x) -> Tensor")
LIBRARY.impl("neighbour", lambda x: x.as_strided(x.shape, x.stride(), x.storage_offset() + 1).clone(), "CPU")
LIBRARY.impl("neighbour", torch.empty_like, "Meta")


def custom_operator_that_reads_beyond() -> Tensor:
    tensor = torch.zeros(4)
    tensor[2:].fill_(7)
    return torch.ops.torchext_test_dead_writes.neighbour(tensor[:2])


def negative_fill() -> Tensor:
    tensor = torch.empty(20)
    torch._neg_view(tensor).uniform_()
    return tensor


def fills_of_copies() -> list[Tensor]:
    """PyTorch fills a contiguous copy of each tensor, so the normal values are those of a contiguous tensor."""
    first, second, third = (
        torch.zeros(20, dtype=torch.complex64),
        torch.zeros(40, dtype=torch.complex64),
        torch.zeros(40),
    )
    first.conj().imag.normal_()
    second[::2].conj().normal_()
    torch._neg_view(third[::2]).normal_(1, 2)
    return [torch.view_as_real(first), torch.view_as_real(second), third, torch.rand(3)]


BEYOND = [
    grown_out,
    grown_and_written_again,
    two_grown_outs,
    grown_storage,
    grown_view,
    part_of_a_grown_view,
    copy_of_the_storage,
    scatter_beyond,
    custom_operator_that_reads_beyond,
    negative_fill,
    fills_of_copies,
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program", BEYOND, ids=lambda program: program.__name__)
def test_calls_whose_bytes_are_not_those_of_their_arguments(program: Callable[[], Tensor | list[Tensor]]) -> None:
    def build() -> list[Tensor]:
        built = program()
        return [built] if isinstance(built, Tensor) else built

    count = len(build_both(build)[0])
    for order in (range(count), reversed(range(count))):
        eager, deferred = build_both(build)
        state = torch.get_rng_state()
        for place in order:
            materialize_tensor(deferred[place])
        for found, wanted in zip(deferred, eager, strict=True):
            assert torch.equal(found, wanted)
            assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "write",
    [lambda t, i: t[i].fill_(1), lambda t, i: t[:, i].fill_(1)],
    ids=["every second row", "every second column"],
)
def test_many_scattered_writes_are_resolved_or_all_run(write: Callable[[Tensor, int], object]) -> None:
    def build() -> Tensor:
        tensor = torch.rand(900, 900)
        for i in range(0, 900, 2):
            write(tensor, i)
        return tensor

    eager, deferred = build_both(build)
    assert_same_tensor(materialize_tensor(deferred), eager)


def random_program(seed: int) -> Callable[[], list[Tensor]]:
    """Write, overwrite and read parts of a few tensors, at random."""

    def part(choose: random.Random, tensor: Tensor) -> Tensor:
        rows, columns = (sorted(choose.choices(range(7), k=2)) for _ in range(2))
        step = choose.choice([1, 1, 2])
        view = tensor[rows[0] : rows[1], columns[0] : columns[1] : step]
        return choose.choice([tensor, tensor[rows[0] :], tensor[:, : columns[1]], view, view.t(), tensor.t()])

    def build() -> list[Tensor]:
        choose = random.Random(seed)
        tensors = [torch.rand(6, 6) for _ in range(2)]
        for _ in range(choose.randrange(2, 14)):
            target = part(choose, choose.choice(tensors))
            match choose.randrange(14):
                case 0:
                    target.zero_()
                case 1:
                    target.normal_()
                case 2:
                    target.uniform_(-1, 1)
                case 3:
                    target.mul_(2)
                case 4:
                    target.copy_(part(choose, choose.choice(tensors)).sum() + torch.rand(target.shape))
                case 5:
                    tensors.append(torch.rand(6, 6).add_(target.sum()))
                case 6:
                    torch._foreach_zero_([target, part(choose, choose.choice(tensors))])
                case 7:
                    torch.add(torch.rand(target.shape), target, out=target)
                case 8:
                    target.add_(part(choose, choose.choice(tensors)).mean())
                case 9:  # then views other bytes
                    torch.add(torch.rand(choose.randrange(5)), 1, out=target[:0].view(-1)[:0])
                case 10:
                    tensors.append(tensors[0].view(-1)[: choose.randrange(9)].resize_(6, 6 + choose.randrange(2)))
                    tensors[-1].view(-1)[36:].zero_()  # never written before
                case 11:
                    torch._neg_view(target).copy_(torch.rand(target.shape))
                case 12:
                    base = choose.choice(tensors)
                    tensors.append(torch.as_strided_copy(base[:2], (6, 6), (6, 1), base.storage_offset()))
                case 13:
                    tensors.append(torch.cat([target.reshape(-1), torch.rand(36)])[:36].view(6, 6))
        return tensors

    return build


@pytest.mark.cases(2)
@pytest.mark.parametrize("block", range(8))
def test_random_programs_leave_the_eager_files(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        build = random_program(seed)
        eager, deferred = build_both(build, seed)
        places = list(range(len(eager)))
        random.Random(seed).shuffle(places)
        for place in places:
            assert_same_tensor(materialize_tensor(deferred[place]), eager[place], f"seed {seed}, tensor {place}")
        again = nn.ParameterList(build_both(build, seed)[1])
        materialize_module(again)
        for found, wanted in zip(again, eager, strict=True):
            assert torch.equal(found.data.view(torch.int32), wanted.view(torch.int32)), f"seed {seed}"
