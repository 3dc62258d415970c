"""Random fills of memory have PyTorch's bits, and leave the generator in the same state as PyTorch."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import bindings
import hypothesis.strategies as st
import pytest
import torch
from common import kept_threads
from hypothesis import given
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.deferred_init import deferred_init
from torchext.fake import fake_mode
from torchext.internals.patching import TORCH_RELEASE

ROOT = Path(__file__).parents[2]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float64]
DISTRIBUTIONS = ["uniform_", "normal_"]
WORDS = 624
LARGE = 1 << 20

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def copy_of(generator: Generator) -> Generator:
    copied = Generator()
    copied.set_state(generator.get_state())
    return copied


def fill(tensor: Tensor, name: str, first: float, second: float, generator: Generator) -> bool:
    return bindings.fill_randomly(tensor, name == "normal_", first, second, generator)


def assert_is_pytorchs(
    numel: int,
    dtype: torch.dtype,
    name: str,
    generator: Generator,
    first: float = 0.0,
    second: float = 1.0,
    *,
    is_filled: bool = True,
) -> None:
    """Fill from two copies of a generator, and advance the generator."""
    own, own_generator = torch.full((numel,), 7, dtype=dtype), copy_of(generator)
    assert fill(own, name, first, second, own_generator) == is_filled
    if not is_filled:
        assert (own == 7).all()
        assert torch.equal(own_generator.get_state(), generator.get_state())
        return
    expected = torch.full((numel,), 7, dtype=dtype)
    getattr(expected, name)(first, second, generator=generator)
    assert torch.equal(bits_of(own), bits_of(expected))
    assert torch.equal(own_generator.get_state(), generator.get_state())


def drawn(generator: Generator, draws: int) -> Generator:
    """Advance a generator by a number of 32-bit draws."""
    torch.empty(draws, dtype=torch.float32).uniform_(generator=generator)
    return generator


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads."""
    with kept_threads():
        yield


# ---- Generators with given next draws.


def untempered(numbers: Tensor) -> Tensor:
    """Return the state words of MT19937 that produce these numbers, as int64."""

    def before(result: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        y = result
        for _ in range(6):
            y = result ^ step(y)
        return y

    y = before(numbers, lambda y: y >> 18)
    y = before(y, lambda y: (y << 15) & 0xEFC60000)
    y = before(y, lambda y: (y << 7) & 0x9D2C5680)
    return before(y, lambda y: y >> 11)


class Forge:
    """Generators with given next 623 numbers. A state begins with the seed, `left`, `seeded` and `next`."""

    def __init__(self) -> None:
        self.state = drawn(seeded(0), 1).get_state()
        self.words = self.state[24 : 24 + 8 * WORDS].view(torch.int64)
        self.generators = (Generator(), Generator())

    def fill_both(self, words: Tensor, own: Tensor, theirs: Tensor, name: str, first: float, second: float) -> None:
        """Fill two tensors, one with our fill, from a generator with these state words."""
        self.words[1 : 1 + len(words)] = words
        for generator in self.generators:
            generator.set_state(self.state)
        assert fill(own, name, first, second, self.generators[0])
        getattr(theirs, name)(first, second, generator=self.generators[1])


def test_forged_generator_has_the_given_draws() -> None:
    numbers = torch.randint(1 << 32, (WORDS - 1,), generator=seeded(1))
    forge = Forge()
    forge.words[1:] = untempered(numbers)
    generator = Generator()
    generator.set_state(forge.state)
    values = torch.empty(WORDS - 1).uniform_(generator=generator)
    assert torch.equal(values, (numbers & 0xFFFFFF) * 2.0**-24)


def compare_all(numbers: Tensor, dtype: torch.dtype, name: str, first: float, second: float) -> None:
    """Compare the values of rows of numbers in portions, because new memory takes longer than the fills."""
    own, theirs = torch.zeros(2, 100, numbers.shape[1], dtype=dtype)
    own_rows, their_rows = own.unbind(), theirs.unbind()
    forge = Forge()
    for some in numbers.split(100):
        for words, row, expected in zip(untempered(some).unbind(), own_rows, their_rows, strict=False):
            forge.fill_both(words, row, expected, name, first, second)
        assert torch.equal(bits_of(own), bits_of(theirs))


def all_numbers(in_a_row: int) -> Tensor:
    """Return all 24-bit numbers in rows; the last row is padded."""
    rows = -(-(1 << 24) // in_a_row)
    return (torch.arange(rows * in_a_row) & 0xFFFFFF).view(rows, in_a_row)


def chunks(radii: Tensor, angles: Tensor) -> Tensor:
    """Return rows of numbers as `normal_` reads them: eight radii, eight angles."""
    return torch.stack([radii.view(-1, 38, 8), angles.view(-1, 38, 8)], dim=2).flatten(1)


needs_own_kernel = pytest.mark.skipif(
    not bindings.is_fill_exact(True, torch.float32),
    reason="there is no kernel of our own for this processor or PyTorch",
)


@needs_own_kernel
class TestExhaustion:
    """Numbers have 24 significant bits, so all of them are tested."""

    @pytest.mark.ci
    def test_all_radii(self) -> None:
        radii = all_numbers(304)
        compare_all(chunks(radii, torch.zeros_like(radii)), torch.float32, "normal_", 0.0, 1.0)

    @pytest.mark.ci
    def test_all_angles_at_all_radii(self) -> None:
        angles = all_numbers(304)
        radii = (angles * 0x9E3779B1 + 12345) & 0xFFFFFF  # a bijection
        compare_all(chunks(radii, angles), torch.float32, "normal_", 0.0, 1.0)

    @pytest.mark.ci
    @pytest.mark.parametrize(
        ("dtype", "first", "second"),
        [
            (torch.float32, -0.0361, 0.0361),
            (torch.bfloat16, -1.0, 3.0),
            (torch.float16, -1e-5, 0.0),
        ],
        ids=str,
    )
    def test_all_uniforms(self, dtype: torch.dtype, first: float, second: float) -> None:
        compare_all(all_numbers(623), dtype, "uniform_", first, second)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("first", "second"), [(0.0, 1.0), (1.0, 2.0), (-1e-5, 0.0), (0.3, 0.3001)])
def test_uniform_range_does_not_contain_its_end(dtype: torch.dtype, first: float, second: float) -> None:
    numbers = (torch.arange(623) ^ 0xFFFFFF).view(1, -1)
    compare_all(numbers, dtype, "uniform_", first, second)


# ---- Sizes, parameters and generators.


@by_dtype
@by_distribution
class TestSizes:
    def test_small(self, dtype: torch.dtype, name: str) -> None:
        generator = seeded(2)
        for numel in range(201):
            assert_is_pytorchs(numel, dtype, name, generator, 0.25, 0.5, is_filled=name == "uniform_" or numel >= 16)

    @pytest.mark.parametrize("numel", [1000, 10007, 16384, 16384 + 15, 16384 + 16, 16384 + 17, 4096 * 3 + 1])
    def test_medium(self, dtype: torch.dtype, name: str, numel: int) -> None:
        assert_is_pytorchs(numel, dtype, name, seeded(numel))

    @pytest.mark.cases(6)
    @pytest.mark.parametrize("count", [1, 2, 3, 8])
    def test_large_on_threads(self, dtype: torch.dtype, name: str, count: int) -> None:
        torch.set_num_threads(count)
        generator = seeded(count)
        for numel in (LARGE - 17, LARGE - 1, LARGE, LARGE + 1, LARGE + 15, LARGE + 17):
            assert_is_pytorchs(numel, dtype, name, generator, -0.5, 0.75)

    def test_on_threads_that_start_far_on(self, dtype: torch.dtype, name: str) -> None:
        torch.set_num_threads(2)
        assert_is_pytorchs(4 * LARGE + 5, dtype, name, seeded(3))

    @pytest.mark.cases(4)
    def test_each_size_around_a_slice(self, dtype: torch.dtype, name: str) -> None:
        torch.set_num_threads(3)
        generator = seeded(4)
        for numel in range(3 * 131072 - 20, 3 * 131072 + 60, 3):
            assert_is_pytorchs(numel, dtype, name, generator)


LIMITS = {dtype: torch.finfo(dtype) for dtype in DTYPES}
NAN, INF = float("nan"), float("inf")


@by_dtype
class TestParameters:
    @pytest.mark.parametrize(
        ("mean", "std"),
        [
            *[(0, 0), (3.5, 0), (-0.0, 1), (0.1, 0.02), (-7, 1e30), (1e38, 1e38), (0, 3.4e38), (65504, 30000)],
            *[(0, 1e-40), (1e-41, 1e-42), (0, 1e-310)],
            *[(1e300, 1), (0, 1e300), (INF, 1), (0, INF), (NAN, 1), (-INF, 0)],
        ],
        ids=str,
    )
    def test_normal(self, dtype: torch.dtype, mean: float, std: float) -> None:
        assert_is_pytorchs(1003, dtype, "normal_", seeded(5), mean, std)

    @pytest.mark.parametrize("std", [-1.0, -1e-300, NAN, -INF])
    def test_normal_that_pytorch_refuses(self, dtype: torch.dtype, std: float) -> None:
        assert_is_pytorchs(1003, dtype, "normal_", seeded(5), 0, std, is_filled=False)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            *[(0, 0), (2.5, 2.5), (-0.0, 0.0), (0.1, 0.2), (1 / 3, 2 / 3), (1000, 1000.1), (-1e-7, 1e-7)],
            *[(0, 1e-40), (1e-45, 2e-45), (-60000, 0), (-65504, 0), (16777215, 16777217)],
        ],
        ids=str,
    )
    def test_uniform(self, dtype: torch.dtype, first: float, second: float) -> None:
        is_filled = -LIMITS[dtype].max <= first and second <= LIMITS[dtype].max
        assert_is_pytorchs(1003, dtype, "uniform_", seeded(6), first, second, is_filled=is_filled)

    def test_widest_uniform(self, dtype: torch.dtype) -> None:
        half = LIMITS[dtype].max / 2
        assert_is_pytorchs(1003, dtype, "uniform_", seeded(6), -half, half)

    def test_uniform_that_pytorch_refuses(self, dtype: torch.dtype) -> None:
        largest = LIMITS[dtype].max
        for first, second in ((1, 0), (-largest, largest), (0, INF), (NAN, 1), (0, NAN), (-INF, 0)):
            assert_is_pytorchs(1003, dtype, "uniform_", seeded(6), first, second, is_filled=False)
            with pytest.raises(RuntimeError, match="uniform_ expects|out of bounds"):
                torch.empty(1003, dtype=dtype).uniform_(first, second)


@given(
    name=st.sampled_from(DISTRIBUTIONS),
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(16, 40000),
    seed=st.integers(0, 1 << 62),
    skipped=st.integers(0, 1300),
    first=st.floats(-1e4, 1e4),
    width=st.floats(0, 1e4),
)
def test_random_fills(
    name: str, dtype: torch.dtype, numel: int, seed: int, skipped: int, first: float, width: float
) -> None:
    second = first + width if name == "uniform_" else width
    assert_is_pytorchs(numel, dtype, name, drawn(seeded(seed), skipped), first, second)


@by_dtype
@by_distribution
class TestGenerators:
    def test_fresh(self, dtype: torch.dtype, name: str) -> None:
        assert_is_pytorchs(2000, dtype, name, seeded(7))

    def test_fresh_that_draws_nothing_stays_so(self, dtype: torch.dtype, name: str) -> None:
        assert_is_pytorchs(0, dtype, name, seeded(7), is_filled=name == "uniform_")

    def test_at_each_place_of_a_block(self, dtype: torch.dtype, name: str) -> None:
        generator = seeded(8)
        for _ in range(WORDS + 1):
            drawn(generator, 1)
            assert_is_pytorchs(40, dtype, name, copy_of(generator))

    def test_up_to_each_place_of_a_block(self, dtype: torch.dtype, name: str) -> None:
        for numel in range(600, 660):
            assert_is_pytorchs(numel, dtype, name, drawn(seeded(9), 7))

    def test_keeps_the_second_value_of_a_pair(self, dtype: torch.dtype, name: str) -> None:
        generator = seeded(10)
        torch.empty(3).normal_(generator=generator)
        assert_is_pytorchs(1000, dtype, name, generator)
        own, theirs = copy_of(generator), copy_of(generator)
        fill(torch.empty(64, dtype=dtype), name, 0, 1, own)
        getattr(torch.empty(64, dtype=dtype), name)(0, 1, generator=theirs)
        assert torch.equal(torch.empty(3).normal_(generator=own), torch.empty(3).normal_(generator=theirs))

    def test_manually_assembled_state_is_left_to_pytorch(self, dtype: torch.dtype, name: str) -> None:
        generator = drawn(seeded(11), 100)
        state = generator.get_state()
        state.view(torch.uint8)[16:24].view(torch.int64)[0] = 50  # `next`, which is 100 according to `left`
        generator.set_state(state)
        assert_is_pytorchs(1000, dtype, name, generator, is_filled=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@by_distribution
def test_other_dtypes_are_left_to_pytorch(dtype: torch.dtype, name: str) -> None:
    generator = seeded(12)
    assert not fill(torch.zeros(64, dtype=dtype), name, 0, 1, generator)
    assert torch.equal(generator.get_state(), seeded(12).get_state())


# ---- Callbacks after each stretch.


@by_dtype
@by_distribution
class TestStretches:
    @pytest.mark.cases(74)
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("numel", [16, 1000, 16384 + 7, 16384 + 16, LARGE + 9])
    def test_are_each_value_once_and_final(self, dtype: torch.dtype, name: str, numel: int, count: int) -> None:
        torch.set_num_threads(count)
        tensor = torch.full((numel,), -99, dtype=dtype)
        copy = torch.full((numel,), -99, dtype=dtype)
        seen = []

        def after(begin: int, end: int) -> None:
            seen.append((begin, end))
            copy[begin:end] = tensor[begin:end]

        assert bindings.fill_randomly(tensor, name == "normal_", 0, 1, seeded(13), after)
        assert torch.equal(copy, tensor)
        seen.sort()
        assert [0, *(end for _, end in seen)] == [*(begin for begin, _ in seen), numel]
        assert max(end - begin for begin, end in seen) < 16384 + 16

    def test_are_filled_by_as_many_threads_as_pytorch_may_use(self, dtype: torch.dtype, name: str) -> None:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            workers: set[int] = set()

            def after(begin: int, end: int, workers: set[int] = workers) -> None:
                workers.add(threading.get_native_id())

            assert bindings.fill_randomly(torch.empty(LARGE, dtype=dtype), name == "normal_", 0, 1, seeded(13), after)
            assert len(workers) == count
            assert threading.get_native_id() in workers

    @pytest.mark.parametrize("count", [1, 3])
    def test_may_raise(self, dtype: torch.dtype, name: str, count: int) -> None:
        torch.set_num_threads(count)

        def after(begin: int, end: int) -> None:
            if begin <= LARGE // 2 < end:
                raise LookupError("this stretch")

        generator = seeded(14)
        with pytest.raises(LookupError, match="this stretch"):
            bindings.fill_randomly(torch.empty(LARGE, dtype=dtype), name == "normal_", 0, 1, generator, after)
        assert torch.equal(generator.get_state(), seeded(14).get_state())


# ---- Self-test of our kernel.


def run_python(code: str, **variables: str) -> str:
    folders = [str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(folders)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


COMPARE = """
import bindings, torch
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for is_normal in (False, True):
        for numel in (16, 1000, 300007):
            own, theirs = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
            assert bindings.fill_randomly(own, is_normal, 0.5, 2.0, a)
            (theirs.normal_ if is_normal else theirs.uniform_)(0.5, 2.0, generator=b)
            assert torch.equal(own, theirs)
            assert torch.equal(a.get_state(), b.get_state())
"""


class TestExactness:
    def test_pytorchs_kernel_may_run_on_pieces(self) -> None:
        for dtype in DTYPES:
            assert bindings.is_cut_fill_exact(True, dtype)
            assert bindings.is_cut_fill_exact(False, dtype)

    @pytest.mark.ci
    @needs_own_kernel
    def test_kernel_for_older_processors_is_exact(self) -> None:
        verdict = "print(*(bindings.is_fill_exact(True, d) for d in (torch.float32, torch.bfloat16, torch.float16)))"
        expected = "True False False" if TORCH_RELEASE < (2, 13) else "True True True"
        assert run_python(COMPARE + verdict, ATEN_CPU_CAPABILITY="avx2") == expected

    @pytest.mark.ci
    def test_kernel_without_vectors_is_another(self) -> None:
        verdict = "print(bindings.is_fill_exact(True, torch.float32))"
        assert run_python(COMPARE + verdict, ATEN_CPU_CAPABILITY="default") == "False"

    def test_double_precision_is_pytorchs(self) -> None:
        assert not bindings.is_fill_exact(True, torch.float64)

    @pytest.mark.ci
    def test_verdict_does_not_depend_on_the_thread(self) -> None:
        code = """
import bindings, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchext.fake import fake_mode

class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)

state = torch.get_rng_state()
def verdicts():
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [bindings.is_fill_exact(n, d) and bindings.is_cut_fill_exact(n, d) for n in (True, False) for d in dtypes]
with torch.inference_mode(), torch.autocast('cpu', dtype=torch.bfloat16), fake_mode(), Refusing():
    found = verdicts()
assert torch.equal(torch.get_rng_state(), state)
print(found)
"""
        expected = [bindings.is_fill_exact(normal, dtype) for normal in (True, False) for dtype in FLOATS]
        assert run_python(code) == str(expected)


class Refusing(TorchDispatchMode):
    """A mode that must not receive calls from torchext."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(func)


@by_dtype
@by_distribution
class TestThreadState:
    def test_is_not_seen_by_modes(self, dtype: torch.dtype, name: str) -> None:
        own, theirs = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
        generator = seeded(15)
        with Refusing():
            assert fill(own, name, 0, 1, generator)
        getattr(theirs, name)(0, 1, generator=seeded(15))
        assert torch.equal(own, theirs)

    def test_is_real_in_fake_modes_and_deferred_constructors(self, dtype: torch.dtype, name: str) -> None:
        first, second = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
        theirs = torch.empty(1000, dtype=dtype)
        with fake_mode():
            assert fill(first, name, 0, 1, seeded(16))
        deferred_init(lambda: fill(second, name, 0, 1, seeded(16)) and torch.nn.Linear(1, 1))
        getattr(theirs, name)(0, 1, generator=seeded(16))
        assert torch.equal(first, theirs)
        assert torch.equal(second, theirs)

    def test_flushed_denormals_are_flushed_in_all_slices(self, dtype: torch.dtype, name: str) -> None:
        torch.set_num_threads(2)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush denormals")
        try:
            assert_is_pytorchs(300_001, dtype, name, seeded(17), 0.0, 1e-38)
        finally:
            torch.set_flush_denormal(False)

    def test_threads_fill_at_once(self, dtype: torch.dtype, name: str) -> None:
        torch.set_num_threads(2)
        failures = []

        def run(seed: int) -> None:
            try:
                assert_is_pytorchs(300_003, dtype, name, seeded(seed))
            except AssertionError as error:
                failures.append(error)

        workers = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures


class TestArguments:
    def test_tensor_that_is_not_contiguous_is_refused(self) -> None:
        with pytest.raises(ValueError, match="takes a contiguous tensor on the CPU"):
            fill(torch.empty(40, 40).t()[::2], "normal_", 0, 1, seeded(18))


# Huge and small pages are tried in turn, and threads share the pages between their slices.
@pytest.mark.parametrize("count", [1, 3])
def test_fill_of_fresh_memory_writes_only_its_values(count: int) -> None:
    torch.set_num_threads(count)
    for begin in (0, 16, 1 << 19):
        memory = torch.frombuffer(mmap.mmap(-1, 20 << 20), dtype=torch.float32)
        end = memory.numel() - 16
        memory[max(begin - 16, 0) : begin] = memory[end:] = 5
        assert fill(memory[begin:end], "uniform_", 0, 1, Generator().manual_seed(7))
        expected = torch.empty(end - begin).uniform_(generator=Generator().manual_seed(7))
        assert torch.equal(bits_of(memory[begin:end]), bits_of(expected))
        assert (memory[max(begin - 16, 0) : begin] == 5).all()
        assert (memory[end:] == 5).all()
        assert (memory[: max(begin - 16, 0)] == 0).all()
