"""Real tensors that recorded operators read: replay uses the values at recording time, or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from common import assert_same_tensor, kept_threads, too_large_to_copy
from torch import Tensor, nn

from torchext import _C
from torchext.deferred_init import deferred_init, explain, is_deferred, materialize_module, materialize_tensor

# The size of a tensor too large to be copied when it is recorded (kMaxCopiedBytes,
# csrc/core/deferred_init/graph/external_tensor.h).
LARGE = (2**20 + 64) // 4
SMALL = 24


def read(source: Tensor) -> Tensor:
    """Return a deferred tensor with the present values of `source`."""
    return deferred_init(lambda: torch.empty(source.shape, dtype=source.dtype).copy_(source))


def step(optimizer: Callable[..., torch.optim.Optimizer], source: Tensor, **options: Any) -> None:
    parameter = nn.Parameter(source)
    parameter.grad = torch.ones_like(source)
    optimizer([parameter], lr=0.5, **options).step()


def normalize(source: Tensor) -> None:
    """Call an operator whose kernel writes running statistics in training, without bumping their versions."""
    x = torch.randn(3, source.numel(), generator=torch.Generator().manual_seed(0))
    nn.functional.batch_norm(x, source, torch.ones_like(source), training=True)


def fill_numpy(source: Tensor) -> None:
    source.numpy()[:] = 7.0


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda source: source.add_(1),
    "data": lambda source: source.data.lerp_(torch.zeros_like(source), 0.5),
    "detached": lambda source: source.detach().zero_(),
    "view": lambda source: source[-1:].zero_(),
    "foreach": lambda source: torch._foreach_mul_([source], 2.0),
    "SGD": lambda source: step(torch.optim.SGD, source),
    "fused Adam": lambda source: step(torch.optim.Adam, source, fused=True),
    "batch norm": normalize,
    "numpy": fill_numpy,
    "dlpack": lambda source: torch.from_dlpack(source.__dlpack__()).zero_(),
    "storage, filled": lambda source: source.untyped_storage().fill_(1),
    "storage, copied": lambda source: source.untyped_storage().copy_(torch.zeros_like(source).untyped_storage()),
    "storage, one byte": lambda source: source.untyped_storage().__setitem__(source.nbytes - 1, 1),
    "map_": lambda source: source[:1].map_(source[:1], lambda a, b: a + 1),
}


class TestChangedSources:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
    def test_small_one_has_the_value_at_recording_time(self, change: Callable[[Tensor], object]) -> None:
        source = torch.rand(SMALL)
        wanted = source.clone()
        deferred = read(source)
        change(source)
        assert not torch.equal(source, wanted)
        assert torch.equal(materialize_tensor(deferred), wanted)

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
    def test_large_one_is_an_error(self, change: Callable[[Tensor], object]) -> None:
        source = torch.rand(LARGE)
        deferred = read(source)
        change(source)
        with pytest.raises(RuntimeError, match=r"`aten::copy_` was recorded with a real .* changed in place since"):
            materialize_tensor(deferred)
        assert is_deferred(deferred)

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_unchanged_one_is_read(self, size: int) -> None:
        source = torch.rand(size)
        assert torch.equal(materialize_tensor(read(source)), source)

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_write_of_equal_values_is_not_a_change(self, size: int) -> None:
        source = torch.rand(size)
        deferred = read(source)
        source.mul_(1)
        assert torch.equal(materialize_tensor(deferred), source)

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_other_data_of_the_source_does_not_matter(self, size: int) -> None:
        source = torch.rand(size)
        wanted = source.clone()
        deferred = read(source)
        source.data = torch.zeros(3)
        assert torch.equal(materialize_tensor(deferred), wanted)

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_inference_tensor(self, size: int) -> None:
        with torch.inference_mode():
            source = torch.rand(size)
        deferred = read(source)
        wanted = source.clone()
        with torch.inference_mode():
            source.zero_()
        if size == SMALL:
            assert torch.equal(materialize_tensor(deferred), wanted)
        else:
            with pytest.raises(RuntimeError, match="changed in place since"):
                materialize_tensor(deferred)

    # At both ends, in the last words, which do not fill a stripe, and next to the boundaries between threads.
    @pytest.mark.parametrize("place", [0, 1, 7, 63, 64, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 - 2, -64, -3, -1])
    def test_single_bit_of_a_large_one_is_detected(self, place: int) -> None:
        source = torch.zeros(4 * 2**20 + 13, dtype=torch.uint8)
        deferred = read(source)
        source.data[place] = 1
        with pytest.raises(RuntimeError, match="changed in place since"):
            materialize_tensor(deferred)

    def test_exchanged_rows_are_detected(self) -> None:
        source = torch.rand(4, LARGE)
        deferred = read(source)
        source.data.copy_(source.data.flip(0).clone())
        with pytest.raises(RuntimeError, match="changed in place since"):
            materialize_tensor(deferred)


def momentum_encoder(query: nn.Module) -> nn.Module:
    """The target network of MoCo, BYOL or DDPG: a copy, by way of `.data`."""
    key = nn.Linear(4, 4)
    for mine, theirs in zip(key.parameters(), query.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    return key


class TestPrograms:
    def test_target_network_has_the_values_of_its_source_before_training(self) -> None:
        query = nn.Linear(4, 4)
        wanted = momentum_encoder(query)
        key = deferred_init(momentum_encoder, query)
        for fused in (False, True):
            optimizer = torch.optim.Adam(query.parameters(), fused=fused)
            query(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        materialize_module(key)
        assert torch.equal(key.weight, wanted.weight)
        assert not torch.equal(key.weight, query.weight)

    def test_loaded_state_keeps_the_values_of_its_loading(self) -> None:
        source, model = nn.BatchNorm1d(3), deferred_init(nn.BatchNorm1d, 3)
        model.load_state_dict(source.state_dict())
        source(torch.randn(5, 3))
        materialize_module(model)
        assert model.running_mean.tolist() == [0.0, 0.0, 0.0]

    @pytest.mark.parametrize(
        "wrap", [torch.from_numpy, lambda array: torch.frombuffer(array.data, dtype=torch.float32)]
    )
    def test_every_layer_has_its_value_of_a_reused_buffer(self, wrap: Callable[[Any], Tensor]) -> None:
        def build() -> list[Tensor]:
            buffer = np.empty(8, dtype=np.float32)
            layers = []
            for number in range(3):
                buffer[:] = number
                layers.append(torch.zeros(8).copy_(wrap(buffer)))
            return layers

        for found, wanted in zip(deferred_init(build), build(), strict=True):
            assert_same_tensor(materialize_tensor(found), wanted)

    def test_large_buffer_that_is_used_again_is_an_error_for_all_layers_but_the_last(self) -> None:
        def build() -> list[Tensor]:
            buffer = np.empty(LARGE, dtype=np.float32)
            layers = []
            for number in range(3):
                buffer[:] = number
                layers.append(torch.zeros(LARGE).copy_(torch.from_numpy(buffer)))
            return layers

        *layers, last = deferred_init(build)
        for layer in layers:
            with pytest.raises(RuntimeError, match=r"changed in place since.* pass `tensor.clone\(\)`"):
                materialize_tensor(layer)
        assert materialize_tensor(last)[0] == 2

    def test_clone_that_the_error_suggests_helps(self) -> None:
        source = torch.rand(LARGE)
        deferred = deferred_init(lambda: torch.zeros(LARGE).copy_(source.clone()))
        wanted = source.clone()
        source.zero_()
        assert torch.equal(materialize_tensor(deferred), wanted)


class TestFreedSources:
    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_freed_after_recording(self, size: int) -> None:
        source = torch.rand(size)
        wanted = source.clone()
        deferred = read(source)
        source.untyped_storage().resize_(0)
        if size == SMALL:
            assert torch.equal(materialize_tensor(deferred), wanted)
        else:
            with pytest.raises(RuntimeError, match="memory has been freed since.* Materialize before freeing it"):
                materialize_tensor(deferred)

    @pytest.mark.parametrize("size", [SMALL, LARGE])
    def test_freed_before_recording(self, size: int) -> None:
        source = torch.rand(size)
        source.untyped_storage().resize_(4)
        with pytest.raises(RuntimeError, match="its storage has only 4 bytes: its memory has been freed"):
            read(source)

    def test_without_elements_there_is_nothing_to_free(self) -> None:
        source = torch.rand(0, 3)
        deferred = read(source)
        source.untyped_storage().resize_(0)
        assert materialize_tensor(deferred).shape == (0, 3)


def geometries() -> Iterator[Any]:
    base = torch.rand(3, LARGE)
    yield pytest.param(base[1:], id="offset")
    yield pytest.param(base.t(), id="transposed")
    yield pytest.param(base[:, ::2], id="gaps")
    yield pytest.param(base.t()[::3], id="gaps-transposed")
    yield pytest.param(base[0].expand(2, LARGE), id="expanded")
    yield pytest.param(base[0, :1].expand(LARGE), id="one-expanded")
    yield pytest.param(base.as_strided((LARGE, 4), (1, 1)), id="overlapping")
    yield pytest.param(torch.randn(3, LARGE, dtype=torch.complex64).conj(), id="conjugate")
    yield pytest.param(torch.randn(3, LARGE, dtype=torch.complex64).conj().imag, id="negative")
    yield pytest.param(too_large_to_copy(), id="small-spread")
    small = torch.rand(6, 8)
    yield pytest.param(small[1:, ::3], id="small-gaps")
    yield pytest.param(small.t(), id="small-transposed")
    yield pytest.param(small[0].expand(5, 8), id="small-expanded")
    yield pytest.param(torch.randn(8, dtype=torch.complex128).conj()[3:], id="small-conjugate")
    yield pytest.param(torch.rand(()), id="number")
    yield pytest.param(torch.rand(17, dtype=torch.bfloat16)[1:], id="small-bfloat16")


class TestGeometries:
    @pytest.mark.parametrize("source", list(geometries()))
    def test_value_is_read_as_shown(self, source: Tensor) -> None:
        wanted = source * 2
        deferred = deferred_init(lambda: torch.full((), 2.0).mul(source))
        assert_same_tensor(materialize_tensor(deferred), wanted)

    def test_change_in_the_gaps_of_a_large_one_is_ignored(self) -> None:
        base = torch.rand(LARGE, 4)
        deferred = read(base[:, ::2])
        base[:, 1::2] = 0
        assert torch.equal(materialize_tensor(deferred), base[:, ::2])

    def test_change_of_an_element_between_gaps_is_detected(self) -> None:
        base = torch.rand(LARGE, 4)
        deferred = read(base[:, ::2])
        base.data[LARGE - 1, 2] = 0
        with pytest.raises(RuntimeError, match="changed in place since"):
            materialize_tensor(deferred)

    def test_sparse_one_has_the_value_at_recording_time(self) -> None:
        source = torch.eye(3).to_sparse()
        deferred = deferred_init(lambda: torch.ones(3, 3).add_(source))
        source.values().zero_()
        assert materialize_tensor(deferred).diagonal().tolist() == [2.0, 2.0, 2.0]

    def test_explanation_shows_a_real_argument(self) -> None:
        assert "aten::copy_(%0, real float32[24])" in str(explain(read(torch.rand(SMALL))))
        assert f"aten::copy_(%0, real float32[{LARGE}])" in str(explain(read(torch.rand(LARGE))))


class TestMemory:
    @pytest.mark.ci
    def test_table_that_many_read_is_kept_once(self) -> None:
        table = torch.rand(2**18)  # 1 MiB
        before = psutil.Process().memory_info().rss
        layers = [read(table) for _ in range(200)]
        assert psutil.Process().memory_info().rss - before < 50 * 2**20
        table.zero_()
        assert materialize_tensor(layers[0]).any()

    def test_large_source_is_not_copied(self) -> None:
        source = torch.ones(64, 2**20)  # 256 MiB
        before = psutil.Process().memory_info().rss
        deferred = read(source)
        assert psutil.Process().memory_info().rss - before < 100 * 2**20
        assert is_deferred(deferred)


class Handled(Tensor):
    """A tensor with memory, and with a handler that changes nothing."""

    @staticmethod
    def __new__(cls: Any, base: Tensor) -> Any:
        return Tensor._make_subclass(cls, base)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "change", [lambda source, base: source.add_(1), lambda source, base: base.numpy().fill(7)], ids=["source", "memory"]
)
def test_tensors_with_a_handler_are_compared(change: Callable[[Tensor, Tensor], object]) -> None:
    base = torch.ones(3)
    source = Handled(base)
    deferred = deferred_init(lambda: torch.zeros(3).copy_(source))
    change(source, base)
    with pytest.raises(RuntimeError, match="changed in place since"):
        materialize_tensor(deferred)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (9 << 20) + 5])
@pytest.mark.parametrize("step", [1, 2])
def test_digest_does_not_depend_on_the_number_of_threads(nbytes: int, step: int) -> None:
    memory = torch.randint(256, (step * nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memory = memory[::step]
    with kept_threads():
        digests = set()
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            digests.add(_C.digest_of(memory))
    assert len(digests) == 1
