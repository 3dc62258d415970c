"""The cache of metadata: which calls share an entry, which are not cached, and its statistics.

`sweeps/checks/fakes.py` checks on every operator that cached results are right.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from torchext import _C
from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import CacheInfo, DataDependentError, cache_clear, cache_info, fake_like, fake_mode, is_fake


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    cache_clear()
    yield
    cache_clear()


@pytest.fixture
def fake() -> torch.Tensor:
    return fake_like(torch.ones(4, 4, device="meta"), device="cpu")


def hits_of(fn: Callable[[], object]) -> int:
    before = cache_info().hits
    fn()
    return cache_info().hits - before


class TestStatistics:
    def test_second_call_hits(self, fake: torch.Tensor) -> None:
        assert hits_of(lambda: fake + fake) == 0
        assert hits_of(lambda: fake + fake) == 1

    def test_clear_drops_calls_and_counts(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            fake + fake
        cache_clear()
        assert cache_info() == CacheInfo(0, 0, 0, 0, cache_info().maxsize)
        assert hits_of(lambda: fake + fake) == 0

    def test_real_tensors_are_not_counted(self) -> None:
        torch.ones(2) + torch.ones(2)
        assert cache_info() == CacheInfo(0, 0, 0, 0, cache_info().maxsize)

    def test_size_is_bounded(self) -> None:
        maxsize = cache_info().maxsize
        with fake_mode():
            for n in range(maxsize + 10):
                torch.empty(n)
        assert cache_info().currsize == maxsize
        with fake_mode():
            assert hits_of(lambda: torch.empty(maxsize + 9)) == 1
            assert hits_of(lambda: torch.empty(0)) == 0


class TestKeys:
    """Pairs of calls that differ in one thing only, which affects the result."""

    def test_shapes_and_dtypes(self, fake: torch.Tensor) -> None:
        assert (fake + fake).shape == (4, 4)
        assert (fake[0] + fake[0]).shape == (4,)
        assert (fake.double() + fake.double()).dtype == torch.float64

    def test_strides(self, fake: torch.Tensor) -> None:
        assert (fake + 1).stride() == (4, 1)
        assert (fake.t() + 1).stride() == (1, 4)

    def test_size_of_the_storage(self) -> None:
        small, large = fake_like(torch.ones(4)), fake_like(torch.ones(8))[:4]
        assert torch.as_strided(large, (8,), (1,)).shape == (8,)
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.as_strided(small, (8,), (1,))

    def test_conjugate_bit(self) -> None:
        fake = fake_like(torch.ones(2, dtype=torch.complex64))
        assert fake.conj().is_conj()
        assert not fake.conj().conj().is_conj()

    def test_kind_and_value_of_numbers(self) -> None:
        fake = fake_like(torch.ones(2, dtype=torch.int64))
        assert (fake * 2).dtype == torch.int64
        assert (fake * 2.0).dtype == torch.float32
        with fake_mode():
            assert [torch.arange(0, 3, step).numel() for step in (1, 2, 0.5)] == [3, 2, 6]

    def test_default_dtype(self) -> None:
        with fake_mode():
            assert torch.arange(0, 3, 0.5).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert torch.arange(0, 3, 0.5).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)

    def test_same_argument_twice_is_not_two_arguments(self, fake: torch.Tensor) -> None:
        other = fake_like(torch.ones(4, 4))
        assert torch.add(fake, other, out=other) is other
        assert torch.add(fake, other, out=fake) is fake

    def test_fake_and_real_arguments(self, fake: torch.Tensor) -> None:
        real = torch.ones(4, 4)
        fake.copy_(real)
        fake.copy_(fake_like(real))
        with pytest.raises(RuntimeError, match="into the real tensor"):
            real.copy_(fake)

    def test_devices(self) -> None:
        with fake_mode(gpu=2):
            for device in ("cpu", "cuda:0", "cuda:1"):
                tensor = torch.ones(2, device=device)
                assert (tensor + 1).device == torch.device(device)

    def test_current_device(self) -> None:
        with fake_mode(gpu=2):
            if torch.cuda.device_count() < 2:
                pytest.skip("needs two devices")
            for index in range(2):
                with torch.cuda.device(index):
                    assert torch.ones(2, device="cuda").device == torch.device("cuda", index)

    def test_inference_mode(self, fake: torch.Tensor) -> None:
        assert not (fake + 1).is_inference()
        with torch.inference_mode():
            assert (fake + 1).is_inference()
        assert not (fake + 1).is_inference()

    def test_autograd(self, fake: torch.Tensor) -> None:
        weight = fake_like(torch.ones(4, 4, requires_grad=True))
        assert not torch.mm(fake, fake).requires_grad
        assert torch.mm(fake, weight).requires_grad

    def test_deterministic_algorithms(self) -> None:
        values, indices = torch.nn.functional.max_pool2d(fake_like(torch.ones(1, 1, 4, 4)), 2, return_indices=True)
        unpool = torch.nn.functional.max_unpool2d
        try:
            for strict in (True, False, True):
                torch.use_deterministic_algorithms(True, warn_only=not strict)
                if strict:
                    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                        unpool(values, indices, 2)
                else:
                    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
                        unpool(values, indices, 2)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_fakes_of_other_libraries_may_look_at_anything(self, fake: torch.Tensor) -> None:
        rows = 2
        with torch.library._scoped_library("torchext_test_anything", "DEF") as library:
            library.define("f(Tensor x) -> Tensor")
            torch.library.register_fake("torchext_test_anything::f", lambda x: x.new_empty(rows), lib=library)
            for rows in (2, 3):
                assert torch.ops.torchext_test_anything.f(fake).shape == (rows,)

    def test_kernels_that_are_registered_later(self, fake: torch.Tensor) -> None:
        name = "torchext_test_cache::f"
        with torch.library._scoped_library("torchext_test_cache", "DEF") as library:
            library.define("f(Tensor x) -> Tensor")
            for rows in (2, 3, 2):
                with torch.library._scoped_library("torchext_test_cache", "IMPL") as kernels:
                    kernels.impl("f", lambda x, rows=rows: x.new_empty(rows, 4), "Meta")
                    for _ in range(2):
                        assert torch.ops.torchext_test_cache.f(fake).shape == (rows, 4), name

    @pytest.mark.filterwarnings("ignore:Warning only once for all operators")
    @pytest.mark.parametrize(("device", "keys"), [("cuda", ["Meta"]), ("cpu", ["Meta", "CPU"])])
    def test_kernels_of_other_libraries_for_operators_of_pytorch(self, device: str, keys: list[str]) -> None:
        with fake_mode(gpu=True):
            fake = torch.ones(4, 4, device=device)
            assert fake.hypot(fake).shape == (4, 4)
            with torch.library._scoped_library("aten", "IMPL") as library:
                for key in keys:
                    library.impl("hypot", lambda x, y: x.new_empty(rows, 4), key, allow_override=True)
                for rows in (2, 3):
                    assert fake.hypot(fake).shape == (rows, 4)
            assert fake.hypot(fake).shape == (4, 4)

    def test_devices_of_generators(self) -> None:
        with fake_mode(gpu=True):
            cpu, cuda = torch.Generator(), torch.Generator("cuda")
            for device, right, wrong in (("cpu", cpu, cuda), ("cuda", cuda, cpu)):
                tensor = torch.empty(3, device=device)
                for _ in range(2):
                    tensor.normal_(generator=right)
                    expected = f"Expected a '{device}' device type for generator but found '{wrong.device.type}'"
                    with pytest.raises(RuntimeError, match=expected):
                        tensor.normal_(generator=wrong)
                    with pytest.raises(RuntimeError, match=expected):
                        torch.multinomial(tensor, 1, generator=wrong)
                    with pytest.raises(RuntimeError, match="generator"):
                        torch.randperm(3, generator=wrong, device=device)
                tensor[:0].normal_(generator=wrong)  # an empty fill does not check the generator

    def test_recording(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            assert is_fake(fake + 1)
            deferred = deferred_init(lambda: torch.ones(4, 4) + 1)
            assert torch.equal(materialize_tensor(deferred), torch.full((4, 4), 2.0))

    def test_priority_of_attention(self) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with fake_mode(gpu=True):
            query = torch.ones(1, 1, 16, 64, dtype=torch.float16, device="cuda", requires_grad=True)
            for _ in range(2):
                names = []
                for first in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION):
                    both = [first, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                    with sdpa_kernel(both, set_priority=True):
                        result = torch.nn.functional.scaled_dot_product_attention(query, query, query)
                    names.append(type(result.grad_fn).__name__)
                assert names == [
                    "ScaledDotProductEfficientAttentionBackward0",
                    "ScaledDotProductFlashAttentionBackward0",
                ]


class TestWarnings:
    @pytest.mark.parametrize(
        "call",
        [
            lambda t: t.std(0),
            lambda t: torch.var_mean(t, 0),
            lambda t: torch.add(t, t, out=torch.empty(2)),
            lambda t: t.put_(torch.tensor([0]), torch.ones(1)),
        ],
    )
    def test_are_those_of_the_real_call_each_time(self, call: Callable[[torch.Tensor], object]) -> None:
        def messages(tensor: torch.Tensor) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(tensor)
            return [str(warning.message).split(" (Triggered")[0] for warning in caught]

        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            expected = messages(torch.ones(1, 4))
            assert len(expected) == 1
            with fake_mode():
                tensor = torch.ones(1, 4)
                for _ in range(3):
                    assert messages(tensor) == expected
        finally:
            torch.use_deterministic_algorithms(False)

    def test_meta_kernels_in_python_warn_each_time(self) -> None:
        with fake_mode(gpu=True):
            tensor = torch.ones(3, device="cuda")
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                for _ in range(3):
                    with pytest.warns(UserWarning, match="_histc_cuda .* does not have a deterministic"):
                        tensor.histc()
            finally:
                torch.use_deterministic_algorithms(False)


class TestChecks:
    def test_hit_that_differs_raises(self, fake: torch.Tensor) -> None:
        rows = 2
        with torch.library._scoped_library("torchext", "FRAGMENT") as library:
            library.define("looks_at_rows(Tensor x) -> Tensor")
            library.impl("looks_at_rows", lambda x: x.new_empty(rows, 4), "Meta")
            before = _C.check_hits(1.0)
            try:
                for _ in range(2):
                    assert torch.ops.torchext.looks_at_rows(fake).shape == (2, 4)
                rows = 3
                with pytest.raises(RuntimeError, match=r"remembered .*sizes \[2, 4\].*, recomputed .*sizes \[3, 4\]"):
                    torch.ops.torchext.looks_at_rows(fake)
                assert _C.take_wrong_hits() == 1
            finally:
                _C.check_hits(before)

    def test_memory_is_counted_once(self) -> None:
        with fake_mode(gpu=True):
            a = torch.ones(64, 64, device="cuda")
            a @ a
            used = torch.cuda.memory_allocated()
            before = _C.check_hits(1.0)
            try:
                results = [a @ a, a.sort()]
                assert torch.cuda.memory_allocated() - used == 3 * 64 * 64 * 4 + 64 * 64 * 4
            finally:
                _C.check_hits(before)
            del results


class TestResults:
    def test_views_stay_views(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            view = fake.view(-1)
            assert view._base is fake
            assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata

    def test_new_results_do_not_share(self, fake: torch.Tensor) -> None:
        first, second = fake + 1, fake + 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata

    def test_results_that_share_a_new_storage_keep_sharing(self) -> None:
        fake = fake_like(torch.ones(2, 3, 4))
        for _ in range(2):
            first, second = torch.ops.aten.split_copy(fake, 1)
            assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
            values, indices = fake.max(0)
            assert (values.dtype, indices.dtype) == (torch.float32, torch.int64)

    def test_metadata_changes_are_made_each_time(self) -> None:
        for _ in range(2):
            fake = fake_like(torch.ones(2, 3))
            assert fake.resize_(4, 5).shape == (4, 5)
            assert fake.untyped_storage().nbytes() == 80
            assert fake.t_().shape == (5, 4)
        assert cache_info().hits > 0

    def test_moves_to_another_storage_are_not_cached(self) -> None:
        for _ in range(2):
            fake, other = fake_like(torch.ones(2, 3)), fake_like(torch.ones(6))
            assert fake.set_(other).untyped_storage()._cdata == other.untyped_storage()._cdata
        assert cache_info().uncacheable > 0

    def test_out_that_is_resized_is_resized_each_time(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            with fake_mode():
                out = torch.empty(0)
            assert torch.add(fake, fake, out=out).shape == (4, 4)

    def test_errors_are_raised_each_time(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            with pytest.raises(DataDependentError, match="aten::nonzero"):
                fake.nonzero()

    def test_lists_of_tensors(self, fake: torch.Tensor) -> None:
        tensors = [fake, fake_like(torch.ones(3))] * 20
        for _ in range(2):
            results = torch._foreach_add(tensors, 1.0)
            assert [t.shape for t in results] == [t.shape for t in tensors]
            assert len({t.untyped_storage()._cdata for t in results}) == len(tensors)

    @pytest.mark.ci
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_forks_while_threads_are_busy(self) -> None:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                fake_like(torch.ones(3, 4)) + 1

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(40):
                child = os.fork()
                if child == 0:
                    signal.alarm(20)  # ends a child that hangs
                    fake_like(torch.ones(3)) + 1
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def test_threads_share_the_cache(self, fake: torch.Tensor) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for n in range(1, 200):
                    tensor = fake_like(torch.ones(n % 17, 3))
                    assert (tensor + tensor).shape == (n % 17, 3)
                    assert is_fake(tensor.sum(0))
                    if n % 50 == 0:
                        cache_clear()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
