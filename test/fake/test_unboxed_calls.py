"""Unboxed kernels on the `Fake` key: NOTE [Unboxed calls].

Each operator that has one is called on real tensors, and three times on fakes: while the cache does not know the call,
unboxed, and boxed with a check of the hit and of the key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from common import kept_threads
from comparisons import ALL_PROPERTIES, metadata
from torch.utils._pytree import tree_leaves

from torchext import _C
from torchext.deferred_init import deferred_init, is_deferred
from torchext.errors import UnsupportedOperatorError
from torchext.fake import cache_clear, cache_info, fake_mode
from torchext.memory import track_memory

# Arguments have no known values: calls on these are boxed.
SIZE = (6, 700)


def one() -> list[Any]:
    return [torch.empty(SIZE)]


def two() -> list[Any]:
    return [torch.empty(SIZE), torch.empty(SIZE)]


def lists(count: int) -> list[Any]:
    return [[torch.empty(SIZE), torch.empty(5, 700)] for _ in range(count)]


def of(*arguments: Any, make: Callable[[], list[Any]] = one) -> Callable[[], list[Any]]:
    return lambda: [*make(), *arguments]


CALLS: dict[str, Callable[[], list[Any]]] = {
    "_foreach_add_.List": lambda: [*lists(2), 0.5],
    "_foreach_add_.Scalar": lambda: [*lists(1), 1],
    "_foreach_add_.Tensor": lambda: [*lists(1), torch.empty(())],
    "_foreach_addcdiv_.Scalar": lambda: [*lists(3), 0.5],
    "_foreach_addcdiv_.ScalarList": lambda: [*lists(3), [0.5, -3.0]],
    "_foreach_addcmul_.Scalar": lambda: [*lists(3), 0.5],
    "_foreach_div_.ScalarList": lambda: [*lists(1), [0.5, 2]],
    "_foreach_lerp_.Scalar": lambda: [*lists(2), 0.5],
    "_foreach_mul_.Scalar": lambda: [*lists(1), 0.5],
    "_foreach_mul_.Tensor": lambda: [*lists(1), torch.empty(())],
    "_foreach_norm.Scalar": lambda: [*lists(1), 2, torch.float64],
    "_foreach_sqrt": lambda: lists(1),
    "_softmax": of(1, False),
    "_softmax_backward_data": of(1, torch.float32, make=two),
    "_to_copy": one,
    "_unsafe_view": of([700, 6]),
    "add.Tensor": two,
    "add.out": lambda: [*two(), torch.empty(0)],
    "add_.Tensor": two,
    "addcdiv_": lambda: [*two(), torch.empty(SIZE)],
    "addcmul_": lambda: [*two(), torch.empty(SIZE)],
    "addmm": lambda: [torch.empty(700), torch.empty(6, 9), torch.empty(9, 700)],
    "alias": one,
    "arange": lambda: [9],
    "arange.start_step": lambda: [9, 2, -3],
    "as_strided": of([5, 5], [1, 5], 3),
    "bmm": lambda: [torch.empty(2, 6, 9), torch.empty(2, 9, 700)],
    "cat": lambda: [two(), 1],
    "clone": one,
    "copy_": lambda: [torch.empty(SIZE, dtype=torch.float64), torch.empty(SIZE)],
    "detach": one,
    "diagonal": of(1, 0, 1),
    "div.Scalar": of(2.0),
    "div.Tensor": two,
    "div_.Scalar": of(2),
    "empty.memory_format": lambda: [[3, 700]],
    "empty_like": one,
    "empty_strided": lambda: [[3, 700], [1, 3]],
    "expand": lambda: [torch.empty(1, 700), [6, -1]],
    "gelu": one,
    "gelu_backward": two,
    "lerp_.Scalar": of(0.5, make=two),
    "mean.dim": of([1], True),
    "mm": lambda: [torch.empty(6, 9), torch.empty(9, 700)],
    "mul.Scalar": of(0.5),
    "mul.Tensor": two,
    "mul_.Scalar": of(0.5),
    "mul_.Tensor": two,
    "native_layer_norm": lambda: [torch.empty(SIZE), [700], torch.empty(700), None, 1e-5],
    "native_layer_norm_backward": lambda: [
        *two(),
        [700],
        torch.empty(6, 1),
        torch.empty(6, 1),
        torch.empty(700),
        None,
        [True, True, False],
    ],
    "neg": one,
    "new_empty": of([2, 700]),
    "ones": lambda: [[3, 700]],
    "permute": of([1, 0]),
    "pow.Tensor_Scalar": of(2),
    "relu": one,
    "resize_": of([8, 700]),
    "rsqrt": one,
    "select.int": of(1, -1),
    "set_.source_Tensor": lambda: [torch.empty(5)] * 2,
    "silu": one,
    "silu_backward": two,
    "slice.Tensor": of(1, 3, 600, 2),
    "slice_backward": of([6, 800], 1, 0, 700, 1),
    "split.Tensor": of(4, 0),
    "sqrt": one,
    "squeeze": lambda: [torch.empty(1, 700)],
    "squeeze.dim": lambda: [torch.empty(1, 700), 0],
    "squeeze_.dim": lambda: [torch.empty(1, 700), 0],
    "sub.Tensor": two,
    "sum": one,
    "sum.dim_IntList": of([0], False),
    "t": one,
    "t_": one,
    "threshold_backward": of(0, make=two),
    "transpose.int": of(0, 1),
    "transpose_": of(0, 1),
    "unbind.int": one,
    "unsqueeze": of(0),
    "unsqueeze_": of(-1),
    "view": of([700, -1]),
    "zero_": one,
    "zeros": lambda: [[3, 700]],
    "zeros_like": one,
}


def coo() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.arange(6).view(2, 3), torch.empty(3), (7, 8), is_coalesced=True)


def csr() -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), torch.empty(3), (3, 5))


def csc() -> torch.Tensor:
    return torch.sparse_csc_tensor(torch.arange(4), torch.arange(3), torch.empty(3), (5, 3))


# Operators on sparse tensors, which no key describes.
FIELDS: dict[str, Callable[[], list[Any]]] = {
    "_coalesced_": lambda: [coo(), False],
    "_indices": lambda: [coo()],
    "_nnz": lambda: [coo()],
    "_values": lambda: [coo()],
    "ccol_indices": lambda: [csc()],
    "col_indices": lambda: [csr()],
    "crow_indices": lambda: [csr()],
    "dense_dim": lambda: [coo()],
    "is_coalesced": lambda: [coo()],
    "row_indices": lambda: [csc()],
    "sparse_dim": lambda: [coo()],
    "values": lambda: [csr()],
}
NUMBERS = ("add", "sub", "mul", "div", "lerp", "addcdiv")


def overload(name: str) -> Any:
    packet, _, rest = name.partition(".")
    if packet in ("arange", "ones", "zeros"):
        return getattr(torch, packet)  # not the overload, whose fill counts as a write
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def describe(arguments: list[Any], results: Any) -> list[Any]:
    """Return the metadata of all tensors, and which of them are or share which."""
    tensors = [leaf for leaf in tree_leaves([arguments, results]) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    identities = [id(tensor) for tensor in tensors]
    return [
        (metadata(tensor, ALL_PROPERTIES), identities.index(id(tensor)), storages.index(storage))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def call(name: str, requires_grad: bool) -> list[Any]:
    arguments = CALLS[name]()
    if requires_grad:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and name not in ("add.out", "resize_"):
                leaf.requires_grad_()
        if name.partition(".")[0].endswith("_"):  # a leaf cannot be written
            arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.mul(1), arguments)
    try:
        results = overload(name)(*arguments)
    except RuntimeError as error:
        return [str(error)]
    return describe(arguments, results)


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    before = _C.check_hits(0)
    cache_clear()
    yield
    _C.check_hits(before)


def names_of_unboxed() -> set[str]:
    with fake_mode():
        torch.empty(1)  # registers the kernels
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "Fake")
    }


def test_each_operator_is_tested() -> None:
    assert names_of_unboxed() == {*CALLS, *FIELDS, "_local_scalar_dense"}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("fraction", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fields_of_sparse_tensors(name: str, fraction: float, device: str) -> None:
    def found() -> tuple[Any, ...]:
        result = overload(name)(*FIELDS[name]())
        if not isinstance(result, torch.Tensor):
            return (result,)
        is_coalesced = result.layout == torch.sparse_coo and result.is_coalesced()
        return result.dtype, result.size(), result.layout, result._version, is_coalesced

    real = found()
    _C.check_hits(fraction)
    with fake_mode(gpu=True), torch.device(device), torch.no_grad(), track_memory():
        assert found() == real


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("fraction", [0, 1])
def test_field_that_a_layout_lacks_is_an_error(fraction: float) -> None:
    _C.check_hits(fraction)
    with fake_mode(), pytest.raises(UnsupportedOperatorError, match="_indices"):
        torch.ops.aten._indices(csr())


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.bfloat16, torch.float64])
def test_values_of_cached_factories(dtype: torch.dtype | None) -> None:
    def values() -> list[Any]:
        made = [
            torch.arange(5, dtype=dtype),
            torch.arange(2, 9.5, dtype=dtype),
            torch.arange(9, 2, -3, dtype=dtype),
            torch.arange(0, 70_000, dtype=dtype)[-3:],
            torch.ones(2, dtype=dtype),
            torch.zeros(2, dtype=dtype),
            torch.zeros_like(torch.ones(3, dtype=dtype)),
        ]
        return [element.item() for tensor in made for element in tensor]

    real = values()
    with fake_mode():
        assert values() == real
        hits = cache_info().hits
        assert values() == real
        assert cache_info().hits > hits


def test_range_of_floats_has_the_values_of_the_threads_that_it_is_made_with() -> None:
    def make() -> torch.Tensor:
        return torch.arange(1, 10_001, 0.1)

    with kept_threads():
        torch.set_num_threads(4)
        real = make()
        with fake_mode():
            made = [make() for _ in range(2)]
            torch.set_num_threads(1)
            assert all(torch.equal(one, other) for one, other in itertools.pairwise([*made, real]))


def test_ranges_can_be_written() -> None:
    with fake_mode():
        for _ in range(2):
            numbers = torch.arange(4)
            numbers[1] = 7
            numbers += 1
            assert [number.item() for number in numbers] == [1, 8, 3, 4]


def test_lazy_bits_of_known_values_are_resolved() -> None:
    with fake_mode():
        assert torch.tensor([1 + 2j]).conj().item() == 1 - 2j
        assert torch.tensor([1 + 2j]).conj().imag.item() == -2


# All pairs of two parameters are their product.
@pytest.mark.cases(60)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["no_grad", "grad", "inference"])
def test_unboxed_and_boxed_calls_equal_real_ones(name: str, kind: str) -> None:
    block: Callable[[], AbstractContextManager[Any]] = {
        "no_grad": torch.no_grad,
        "grad": nullcontext,
        "inference": torch.inference_mode,
    }[kind]
    with block():
        real = call(name, kind == "grad")
        with fake_mode():
            assert call(name, kind == "grad") == real
            hits = cache_info().hits
            assert call(name, kind == "grad") == real
            assert cache_info().hits > hits or "add.out" in name
            _C.check_hits(1.0)
            assert call(name, kind == "grad") == real
    assert _C.take_wrong_hits() == 0


@pytest.mark.parametrize("name", ["view", "add.Tensor", "_foreach_mul_.Scalar", "empty.memory_format"])
def test_unboxed_calls_count_memory_as_boxed_ones(name: str) -> None:
    def used(fraction: float) -> list[Any]:
        _C.check_hits(fraction)
        with fake_mode(gpu=True), torch.device("cuda"), track_memory() as memory:
            kept = [overload(name)(*CALLS[name]()) for _ in range(3)]
            del kept
            states = [memory.peak_allocated(), memory.now()]
        return [(state.event, state.allocated, state.reserved, state.by_category) for state in states]

    assert used(0) == used(1.0)


def test_unboxed_calls_on_deferred_tensors_are_recorded() -> None:
    module = deferred_init(torch.nn.Linear, 64, 64)
    for _ in range(2):
        assert is_deferred(module.weight.detach().t().mul(2.0))


def test_modes_receive_unboxed_calls() -> None:
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with fake_mode(), Mode():
        x = torch.empty(SIZE)
        for _ in range(2):
            x.view(-1)
    assert seen.count(torch.ops.aten.view.default) == 2


@pytest.mark.parametrize("name", NUMBERS)
def test_ordinary_numbers_share_an_entry(name: str) -> None:
    with fake_mode():
        x = torch.empty(SIZE)

        def apply(number: float) -> torch.Tensor:
            if name in ("lerp", "add", "sub"):
                return torch.lerp(x, x, number) if name == "lerp" else getattr(torch, name)(x, x, alpha=number)
            if name.startswith("addc"):
                return getattr(torch, name)(x, x, x, value=number)
            return getattr(torch, name)(x, number)

        apply(0.5)
        misses = cache_info().misses
        apply(-0.25)
        apply(240.0)
        assert cache_info().misses == misses
        apply(241.0)
        assert cache_info().misses == misses + 1


def test_numbers_out_of_range_raise_as_for_real_tensors() -> None:
    real = torch.ones(SIZE)
    with pytest.raises(RuntimeError) as error:
        torch.add(real, real, alpha=1e300)
    with fake_mode():
        fake = torch.empty(SIZE)
        for _ in range(2):
            torch.add(fake, fake, alpha=0.5)
            with pytest.raises(RuntimeError) as other:
                torch.add(fake, fake, alpha=1e300)
    assert str(other.value) == str(error.value)


def outcome(name: str, x: torch.Tensor, number: float) -> tuple[object, ...]:
    """Return the dtype of a result, or the error."""
    try:
        args: list[Any] = [[x]] if name.startswith("_foreach") else [x]
        args += args * (2 if "addc" in name else 1 if "lerp" in name else 0)
        run = getattr(torch, name, None) or getattr(torch.Tensor, name)
        result = run(*args, value=number) if "addc" in name else run(*args, number)
    except (RuntimeError, NotImplementedError) as error:
        return type(error), str(error)
    return ((result[0] if isinstance(result, (list, tuple)) else x if result is None else result).dtype,)


@pytest.mark.parametrize("form", ["{}", "{}_", "_foreach_{}", "_foreach_{}_"])
@pytest.mark.parametrize("name", [*NUMBERS, "addcmul"])
def test_numbers_after_others_have_the_outcome_of_real_tensors(name: str, form: str) -> None:
    called = form.format(name)
    for dtype in (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.float32, torch.complex64):
        for number in (2.0, 0.5, 200.0, 239.0, -1.5, 300.0, 1e5, 1e300):
            wanted = outcome(called, torch.ones(70, dtype=dtype), number)
            with fake_mode():
                found = outcome(called, torch.empty(70, dtype=dtype), number)
            assert found == wanted, (dtype, number)


@pytest.mark.parametrize("foreach", [True, False])
def test_later_steps_of_adamw_are_in_the_cache(foreach: bool) -> None:
    with fake_mode():
        parameter = torch.nn.Parameter(torch.empty(SIZE))
        parameter.grad = torch.empty(SIZE)
        optimizer = torch.optim.AdamW([parameter], foreach=foreach)
        for _ in range(3):
            optimizer.step()
        misses = cache_info().misses
        for _ in range(3):
            optimizer.step()
        assert cache_info().misses == misses
