"""Random numbers equal those of eager construction in any order, and the generator ends in the same state."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import assert_same_tensor, build_both, in_fake_mode
from comparisons import error_of
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, explain, materialize_module, materialize_tensor
from torchext.fake import python_functions
from torchext.internals.patching import TORCH_RELEASE

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FILLS: dict[str, tuple[Callable[[Tensor], Tensor], list[torch.dtype]]] = {
    "uniform": (lambda t: t.uniform_(-1, 2), FLOATS),
    "normal": (lambda t: t.normal_(1, 2), FLOATS),
    "log_normal": (lambda t: t.log_normal_(0, 0.5), FLOATS),
    "exponential": (lambda t: t.exponential_(2), FLOATS),
    "cauchy": (lambda t: t.cauchy_(), FLOATS),
    "geometric": (lambda t: t.geometric_(0.3), [*FLOATS, torch.int64]),
    "bernoulli": (lambda t: t.bernoulli_(0.3), [*FLOATS, torch.int64, torch.bool]),
    "bernoulli_tensor": (lambda t: t.bernoulli_(torch.full(t.shape, 0.4)), [torch.float32, torch.int64]),
    "random": (lambda t: t.random_(), [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]),
    "random_to": (lambda t: t.random_(100), [*FLOATS, torch.int64]),
    "random_large_range": (lambda t: t.random_(0, 2**40), [torch.int64]),
    "random_full_range": (lambda t: t.random_(-(2**63), None), [torch.int64]),
    "complex_normal": (lambda t: t.normal_(), [torch.complex64, torch.complex128]),
}
# Around the chunk of 16 of `normal_fill`, the block of 624 of MT19937, and beyond.
SIZES = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 623, 624, 625, 5000]


def assert_same_results(build: Callable[[], list[Tensor]], strictly: bool = True) -> None:
    """Assert equal bits for all results, materialized in a shuffled order."""
    eager, deferred = build_both(build)
    for i in random.Random(0).sample(range(len(deferred)), len(deferred)):
        assert_same_tensor(materialize_tensor(deferred[i]), eager[i], f"result {i}", strictly)


@pytest.mark.cases(48)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in FILLS.items() for dtype in dtypes], ids=str
)
def test_fill_takes_the_draws_of_the_eager_one(name: str, dtype: torch.dtype) -> None:
    fill = FILLS[name][0]

    def build() -> list[Tensor]:
        return [fill(torch.empty(size, dtype=dtype)) for size in SIZES] + [torch.rand(3)]

    assert_same_results(build)


@pytest.mark.parametrize("name", ["uniform", "normal", "exponential", "bernoulli", "random"])
def test_fill_of_a_strided_view(name: str) -> None:
    fill = FILLS[name][0]

    def build() -> list[Tensor]:
        whole = torch.zeros(40, 9)
        fill(whole.t()[2:7])
        fill(whole[::3, 1])
        return [whole, torch.rand(3)]

    assert_same_results(build)


DRAWS: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(3, 7),
    "rand": lambda: torch.rand(100, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 10, (50,)),
    "randperm": lambda: torch.randperm(1000),
    "randn_like": lambda: torch.randn_like(torch.zeros(33)),
    "complex": lambda: torch.rand(20, dtype=torch.complex64),
    "normal_tensor": lambda: torch.normal(torch.zeros(20), 1.0),
    "normal_size": lambda: torch.normal(0.0, 1.0, (5, 5)),
    "bernoulli": lambda: torch.bernoulli(torch.full((30,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(30), 10),
    "poisson": lambda: torch.poisson(torch.full((30,), 3.0)),
    "dropout": lambda: nn.functional.dropout(torch.ones(100)),
    "dropout_with_gradient": lambda: nn.functional.dropout(torch.ones(100, requires_grad=True), 0.3).detach(),
    "exponential_generator": lambda: torch.empty(5).exponential_(2.0, generator=torch.Generator().manual_seed(1)),
    "binomial": lambda: torch.distributions.Binomial(10, torch.full((3,), 0.5)).sample(),
    "rrelu": lambda: nn.functional.rrelu(torch.full((30,), -1.0), training=True),
    "gumbel": lambda: torch.nn.functional.gumbel_softmax(torch.zeros(4, 5)),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.ones(4)).sample(),
    "trunc_normal_wide": lambda: nn.init.trunc_normal_(torch.empty(500), std=0.02, a=-2, b=2),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(6, 4)),
    "sparse": lambda: nn.init.sparse_(torch.empty(10, 6), 0.3),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draw_is_the_eager_one(draw: Callable[[], Tensor]) -> None:
    assert_same_results(lambda: [torch.rand(5), draw(), torch.randn(3), draw(), torch.randn(20)])


@pytest.mark.parametrize("bounds", [(-2, 2), (-0.5, 1), (2, 3)], ids=str)
def test_rejection_sampling_draws_as_often_as_eager(bounds: tuple[float, float]) -> None:
    def build() -> list[Tensor]:
        return [nn.init.trunc_normal_(torch.empty(500), a=bounds[0], b=bounds[1]), torch.rand(3)]

    # The number of writes in the eager loop depends on the drawn values, so versions may differ.
    assert_same_results(build, strictly=False)


@pytest.mark.cases(37)
@pytest.mark.parametrize("numel", [64, 128, 130, 200, 1000, 1024])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bounds", [(-2, 2), (-0.5, 1), (2, 3)], ids=str)
def test_rejection_sampling_goes_chunk_by_chunk(
    bounds: tuple[float, float], dtype: torch.dtype, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_functions, "CHUNK", 64)

    def build() -> list[Tensor]:
        torch.empty(3).normal_()  # leaves a cached value, which others must neither use nor discard
        sampled = nn.init.trunc_normal_(torch.empty(numel, dtype=dtype), a=bounds[0], b=bounds[1])
        return [sampled, torch.empty(3).normal_(), torch.rand(3)]

    assert_same_results(build, strictly=False)


@pytest.mark.parametrize("numel", [5, 100, 500])
def test_sampler_warns_as_often_as_eager(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_functions, "CHUNK", 64)

    def build() -> Tensor:
        return nn.init.trunc_normal_(torch.empty(numel), mean=3, a=-1, b=0.9)

    with pytest.warns(UserWarning, match="more than 2 std from") as warned:
        sampled = deferred_init(build)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        materialize_tensor(sampled)


@pytest.mark.ci
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_rejection_sampling_takes_no_memory_but_its_chunks() -> None:
    code = """
import resource, torch
from torch import nn
from torchext.deferred_init import deferred_init, materialize_tensor
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def build(numel): return nn.init.trunc_normal_(torch.empty(numel))
materialize_tensor(deferred_init(build, 2**23))
peaks = [peak()]
tensor = deferred_init(build, 2**25)
peaks.append(peak())
materialize_tensor(tensor)
peaks.append(peak())
print((peaks[1] - peaks[0]) / 2**20, (peaks[2] - peaks[0]) / 2**20)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    recording, materializing = map(float, result.stdout.split())
    assert recording < 110  # the tensor takes 128, and eager construction three times that
    assert materializing < 128 + 110


def test_rejection_sampling_of_nothing_writes_once() -> None:
    assert_same_results(lambda: [nn.init.trunc_normal_(torch.empty(0, 5)), torch.rand(3)])


# Few blocks of 624 numbers, several, more than a copy is worth, and too many to skip.
@pytest.mark.parametrize(
    "skipped", [623, 624, 625, 3000, 60001, 1024 * 624, 1025 * 624, 1026 * 624 + 1, 4 * 10**6 + 3, 3 * 10**7 + 5]
)
def test_distances_are_walked_or_jumped(skipped: int) -> None:
    def build() -> list[Tensor]:
        torch.empty(skipped).uniform_()
        return [torch.rand(1000)]

    assert_same_results(build)


@pytest.mark.ci
def test_jumps_do_not_need_an_instruction_of_the_processor() -> None:
    code = """
import torch
from torchext import _C
for numel in (700_000, 5_000_000):
    walked, jumped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.empty(numel).uniform_(generator=walked)
    _C.skip_fill("uniform_", numel, torch.float32, [0.0, 1.0], jumped)
    print(torch.equal(walked.get_state(), jumped.get_state()))
"""
    for capability in ("avx2", "default"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert result.stdout.split() == ["True", "True"]


def test_tensors_are_materialized_in_any_order() -> None:
    def build() -> list[Tensor]:
        # Each starts at its own mark, and most marks keep no state.
        return [torch.rand(size) for size in (70_000, 700_000, 66_000, 1_000_000, 70_000, 66_000, 700_000, 80_000, 3)]

    torch.manual_seed(5)
    eager = build()
    for order in (range(8, -1, -1), (4, 8, 1, 6, 2, 7, 0, 5, 3)):
        torch.manual_seed(5)
        deferred = deferred_init(build)
        for i in order:
            assert torch.equal(materialize_tensor(deferred[i]), eager[i])


def test_replays_of_several_tapes_alternate() -> None:
    def build() -> list[Tensor]:
        tensors = []
        for seed in range(6):  # more tapes than a thread keeps generators
            torch.manual_seed(seed)
            tensors += [torch.randn(5), torch.rand(700), torch.empty(3).normal_(), torch.randn(40)]
        return tensors

    eager, deferred = build_both(build)
    for i in (*range(0, 24, 4), *range(2, 24, 4), *range(23, 0, -2)):
        assert_same_tensor(materialize_tensor(deferred[i]), eager[i], f"result {i}")


def test_failed_replay_leaves_the_next_one_exact() -> None:
    read = torch.ones(2_000_000)  # too large for a copy

    def build() -> list[Tensor]:
        return [torch.randn(100), torch.rand(50), torch.rand(len(read)).mul_(read), torch.rand(7)]

    eager, deferred = build_both(build)
    read.add_(1)
    with pytest.raises(RuntimeError, match="changed"):
        materialize_tensor(deferred[2])
    read.sub_(1)
    for i in (3, 1, 0, 2):
        assert_same_tensor(materialize_tensor(deferred[i]), eager[i], f"result {i}")


def test_fill_that_refuses_complex_numbers_refuses_them_at_once() -> None:
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        deferred_init(lambda: torch.zeros(4, dtype=torch.complex64).random_())


def test_dropped_draws_count() -> None:
    def build() -> list[Tensor]:
        torch.randn(7)
        first = torch.randn(7)
        torch.randn(100)
        return [first, torch.randn(7)]

    assert_same_results(build)


def test_second_values_of_pairs_are_kept_between_fills() -> None:
    def build() -> list[Tensor]:
        # With odd sizes and strided targets, values are drawn in pairs. An unused value is cached for the next such
        # fill.
        sizes = [1, 3, 5, 1, 7, 2, 1, 16, 3, 40, 1, 1]
        fills = [torch.empty(size).normal_() for size in sizes]
        strided = [torch.empty(size, 2).t()[0].normal_(2, 3) for size in (1, 17, 3)]
        torch.manual_seed(1)  # discards the cached value
        return [*fills, *strided, torch.empty(3).log_normal_(), torch.empty(3, dtype=torch.complex64).normal_()]

    assert_same_results(build)


def test_small_fills_share_the_base_of_their_tape() -> None:
    def build() -> list[Tensor]:
        torch.manual_seed(3)
        return [torch.empty(size).normal_() for size in (3, 1, 5)]

    # Two pairs of four draws each, whose last value goes to the second fill, and three pairs.
    fills = [operation for t in deferred_init(build) for operation in explain(t) if operation.draws]
    assert [(fill.generator_offset, fill.draws) for fill in fills] == [(0, 8), (8, 12)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_order_of_materializing_does_not_matter(order: tuple[int, ...]) -> None:
    eager, deferred = build_both(lambda: [torch.randn(5), torch.randn(40), torch.rand(3)])
    torch.rand(11)
    for i in order:
        state = torch.get_rng_state()
        materialize_tensor(deferred[i])
        assert torch.equal(torch.get_rng_state(), state), "materializing moved the generator"
        assert_same_tensor(deferred[i], eager[i])


def test_generator_given_by_the_user() -> None:
    def build() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(50, generator=generator)
        second = torch.empty(9).uniform_(generator=generator)
        return [first, second, torch.randn(4), torch.rand(1, generator=generator)]

    assert_same_results(build)


def test_seeding_and_forking_inside_the_constructor() -> None:
    def build() -> list[Tensor]:
        first = torch.randn(20)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            second = torch.randn(20)
        third = torch.randn(20)
        torch.manual_seed(6)
        return [first, second, third, torch.randn(20)]

    assert_same_results(build)


def test_state_can_be_saved_and_restored_inside_the_constructor() -> None:
    def build() -> list[Tensor]:
        torch.randn(3)
        state = torch.get_rng_state()
        first = torch.randn(20)
        torch.set_rng_state(state)
        return [first, torch.randn(20)]

    assert_same_results(build)


def test_program_continues_as_if_it_were_eager() -> None:
    torch.manual_seed(1)
    nn.Linear(10, 10)
    wanted = torch.rand(5)
    torch.manual_seed(1)
    deferred_init(nn.Linear, 10, 10)
    assert torch.equal(torch.rand(5), wanted)


def test_real_draws_and_deferred_draws_share_the_tape() -> None:
    def build() -> list[Tensor]:
        first = torch.randn(20)
        numbers = torch.empty(3, device="cpu").uniform_().tolist()
        return [first, torch.full((2,), numbers[1]), torch.randn(20)]

    assert_same_results(build)


def test_stretches_of_the_tape_are_read_in_turn() -> None:
    def build() -> nn.Module:
        layers: Any = nn.ModuleList(nn.Linear(7, 9) for _ in range(6))
        for fill in (nn.init.normal_, nn.init.xavier_uniform_, nn.init.orthogonal_):
            for layer in layers[::2]:
                fill(layer.weight)
        for layer in layers:
            layer.bias.data = layer.bias.data.bernoulli_(0.5) + layer.weight.data.sum()
        result: nn.Module = layers.double()
        return result

    eager, deferred = build_both(build)
    materialize_module(deferred)
    for found, wanted in zip(deferred.parameters(), eager.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        pytest.param(
            lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
            marks=pytest.mark.skipif(TORCH_RELEASE < (2, 12), reason="PyTorch does not refuse it"),
        ),
        lambda: torch.ones(3, dtype=torch.int64),
    ],
    ids=["complex", "conjugated", "negated", "integers"],
)
def test_truncated_normal_numbers_are_refused_as_eagerly(make: Callable[[], Tensor]) -> None:
    def program() -> Tensor:
        return nn.init.trunc_normal_(make())

    wanted = error_of(program, (RuntimeError, NotImplementedError))
    assert error_of(lambda: deferred_init(program)) == wanted
    assert error_of(lambda: in_fake_mode(program)) == wanted


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("size", [1, 16, 1000])
def test_dropout_draws_from_the_default_generator_without_being_given_it(
    size: int, train: bool | None, order: tuple[int, ...]
) -> None:
    def build() -> list[Tensor]:
        return [*torch.native_dropout(torch.rand(size), 0.3, train), torch.rand(3)]

    eager, deferred = build_both(build)
    state = torch.get_rng_state()
    for place in order:
        assert_same_tensor(materialize_tensor(deferred[place]), eager[place])
    assert torch.equal(torch.get_rng_state(), state)


def test_recording_waits_while_the_default_generator_is_elsewhere() -> None:
    """Operators without a generator are replayed with the default one, which another thread may record from."""
    begun, recorded = threading.Event(), threading.Event()
    with torch.library._scoped_library("tapes", "FRAGMENT") as library:
        library.define("slow(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

        def slow(x: Tensor) -> Tensor:
            begun.set()
            recorded.wait(0.5)  # until another thread may record, unless it is blocked
            return torch.rand(x.shape)

        library.impl("slow", slow, "CPU")
        library.impl("slow", lambda x: torch.empty_like(x), "Meta")
        torch.manual_seed(0)
        deferred = deferred_init(lambda: torch.ops.tapes.slow(torch.empty(5)))
        begun.clear()
        state = torch.get_rng_state()
        expected = torch.randn(40)
        torch.set_rng_state(state)
        others: list[Tensor] = []

        def record() -> None:
            begun.wait()
            others.append(deferred_init(torch.randn, 40))
            recorded.set()

        thread = threading.Thread(target=record)
        thread.start()
        materialize_tensor(deferred)
        thread.join()
        assert_same_tensor(materialize_tensor(others[0]), expected)
