"""The cache of metadata: which calls it tells apart, what it does not remember, and its statistics.

`test_op_db.py` checks on every operator that cached results are right.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from torchext.fake import DataDependentError, cache_clear, cache_info, fake_like, fake_mode, is_fake


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    cache_clear()
    yield
    cache_clear()


@pytest.fixture
def fake() -> torch.Tensor:
    return fake_like(torch.ones(4, 4))


def hits_of(fn: Callable[[], object]) -> int:
    before = cache_info().hits
    fn()
    return cache_info().hits - before


class TestStatistics:
    def test_second_call_hits(self, fake: torch.Tensor) -> None:
        assert hits_of(lambda: fake + fake) == 0
        assert hits_of(lambda: fake + fake) == 1

    def test_clear_forgets_calls_and_counts(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            fake + fake
        cache_clear()
        assert cache_info()[:4] == (0, 0, 0, 0)
        assert hits_of(lambda: fake + fake) == 0

    def test_real_tensors_are_not_counted(self) -> None:
        torch.ones(2) + torch.ones(2)
        assert cache_info()[:4] == (0, 0, 0, 0)

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
    """Pairs of calls that differ in one thing only, on which the result depends."""

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
        with fake_mode(fake_cuda=2):
            for device in ("cpu", "cuda:0", "cuda:1"):
                tensor = torch.ones(2, device=device)
                assert (tensor + 1).device == torch.device(device)

    def test_current_device(self) -> None:
        with fake_mode(fake_cuda=2):
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


class TestResults:
    def test_views_stay_views(self, fake: torch.Tensor) -> None:
        for _ in range(2):
            view = fake.view(-1)
            assert view._base is fake
            assert view.untyped_storage()._cdata == fake.untyped_storage()._cdata

    def test_new_results_do_not_share(self, fake: torch.Tensor) -> None:
        first, second = fake + 1, fake + 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata

    def test_results_that_share_a_new_storage_go_on_sharing(self) -> None:
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

    def test_moves_to_another_storage_are_not_remembered(self) -> None:
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
