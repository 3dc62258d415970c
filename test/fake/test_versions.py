"""Tensors get the versions of eager execution where PyTorch's kernels, not its autograd layer, count writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparisons import metadata
from torch import Tensor

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import fake_mode

aten = torch.ops.aten

Outputs = list[Tensor]


def pair() -> list[Tensor]:
    return [torch.ones(3), torch.ones(2)]


def step(weights: list[Tensor]) -> None:
    gradients = [weight + 1 for weight in weights]
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    aten._fused_sgd_(weights, gradients, [], weight_decay=0, momentum=0, lr=0.1, dampening=0, **flags)


# Operators without a kernel on `ADInplaceOrView` that write to `out`, and the shapes of their outputs.
WITH_OUT: dict[str, tuple[Callable[[Outputs], object], list[tuple[int, ...]]]] = {
    "_foreach_abs": (lambda out: aten._foreach_abs.out(pair(), out=out), [(3,), (2,)]),
    "_foreach_add": (lambda out: aten._foreach_add.Scalar_out(pair(), 1, out=out), [(3,), (2,)]),
    "_foreach_copy": (lambda out: aten._foreach_copy.out(pair(), pair(), out=out), [(3,), (2,)]),
    "_foreach_norm": (lambda out: aten._foreach_norm.Scalar_out(pair(), 2, out=out), [(), ()]),
    "_foreach_zero": (lambda out: aten._foreach_zero.out(pair(), out=out), [(3,), (2,)]),
    "_fused_sgd_": (step, [(3,), (2,)]),
    "_histogramdd_bin_edges": (
        lambda out: aten._histogramdd_bin_edges.out(torch.rand(3, 2), [2, 2], out=out),
        [(3,), (3,)],
    ),
    "adaptive_avg_pool1d": (lambda out: aten.adaptive_avg_pool1d.out(torch.ones(1, 2, 4), 2, out=out[0]), [(1, 2, 2)]),
    "avg_pool1d": (lambda out: aten.avg_pool1d.out(torch.ones(1, 2, 4), 2, out=out[0]), [(1, 2, 2)]),
    "empty": (lambda out: torch.empty(3, out=out[0]), [(3,)]),
    "kron": (lambda out: torch.kron(torch.ones(2), torch.ones(2), out=out[0]), [(4,)]),
    "randn": (lambda out: torch.randn(3, out=out[0]), [(3,)]),
    "split_copy": (lambda out: aten.split_copy.Tensor_out(torch.ones(4, 3), 2, out=out), [(2, 3), (2, 3)]),
    "split_with_sizes_copy": (
        lambda out: aten.split_with_sizes_copy.out(torch.ones(4, 3), [2, 2], out=out),
        [(2, 3), (2, 3)],
    ),
    "tensordot": (lambda out: torch.tensordot(torch.ones(2, 3), torch.ones(3, 2), 1, out=out[0]), [(2, 2)]),
    "unbind_copy": (lambda out: aten.unbind_copy.int_out(torch.ones(2, 3), 0, out=out), [(3,), (3,)]),
    "unsafe_split": (lambda out: aten.unsafe_split.Tensor_out(torch.ones(4, 3), 2, out=out), [(2, 3), (2, 3)]),
    "upsample_nearest2d": (
        lambda out: aten.upsample_nearest2d.vec_out(torch.ones(1, 2, 4, 4), [8, 8], None, out=out[0]),
        [(1, 2, 8, 8)],
    ),
}

NEVER_RESIZE = {"_fused_sgd_", "split_copy"}

OUTPUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "of the size": torch.zeros,
    "that grow": lambda _shape: torch.zeros(0),
    "that change their shape": lambda _shape: torch.zeros(7),
}

# Factories as C++ calls them. Python's exclude the key, so their results have version 0.
FACTORIES: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: aten.arange(3),
    "eye": lambda: aten.eye(3),
    "full": lambda: aten.full([3], 2.0),
    "linspace": lambda: aten.linspace(0, 1, 3),
    "logspace": lambda: aten.logspace(0, 1, 3),
    "ones": lambda: aten.ones([3]),
    "rand": lambda: aten.rand([3]),
    "range": lambda: aten.range(0, 3),
    "zeros": lambda: aten.zeros([3]),
    "zeros without elements": lambda: aten.zeros([0]),
    "zeros_like": lambda: aten.zeros_like(torch.ones(3)),
    "torch.arange": lambda: torch.arange(3),
    "torch.zeros": lambda: torch.zeros(3),
    "one_hot": lambda: torch.nn.functional.one_hot(torch.tensor([1, 2]), 4),
}


def versions(tensors: Outputs) -> Any:
    return metadata(tensors, {"version"})


def assert_same_versions(fn: Callable[[], Outputs], mode: Callable[[], Any], what: str = "") -> None:
    for _ in range(2):  # the second call is answered by the cache
        with mode():
            wanted = versions(fn())
            with fake_mode():
                assert versions(fn()) == wanted, what
            deferred = deferred_init(fn)
            assert versions(deferred) == wanted, what
            assert versions([materialize_tensor(tensor) for tensor in deferred]) == wanted, what


# Tensors that are not fake in `fake_mode`, or have no storage.
OTHERS: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: aten.zeros([3], device="meta"),
    "meta, full": lambda: aten.full([3], 2.0, device="meta"),
    "COO": lambda: aten.zeros([3], layout=torch.sparse_coo),
    "CSR": lambda: aten.zeros([3, 3], layout=torch.sparse_csr),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR tensor support|invariant checks)")
@pytest.mark.parametrize("name", OTHERS)
def test_tensor_without_a_fake_storage_has_the_eager_version(name: str) -> None:
    wanted = OTHERS[name]()._version
    with fake_mode():
        assert OTHERS[name]()._version == wanted


def test_writes_to_real_tensors_are_counted_once_in_fake_mode() -> None:
    tensors = pair()
    with fake_mode():
        torch._foreach_add_(tensors, 1)
        aten._foreach_add.Scalar_out(tensors, 1, out=tensors)
    assert [tensor._version for tensor in tensors] == [2, 2]


def test_one_hot_of_unknown_numbers_has_the_eager_version() -> None:
    with fake_mode():
        assert torch.nn.functional.one_hot(torch.empty(3).long(), 4)._version == 2


MODES = [torch.enable_grad, torch.inference_mode, torch._C._AutoDispatchBelowADInplaceOrView]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WITH_OUT)
def test_outputs_have_the_eager_version(name: str, mode: Callable[[], Any]) -> None:
    write, shapes = WITH_OUT[name]
    for kind, make in OUTPUTS.items() if name not in NEVER_RESIZE else [("of the size", torch.zeros)]:

        def fn(make: Callable[[tuple[int, ...]], Tensor] = make) -> Outputs:
            out = [make(shape) for shape in shapes]
            write(out)
            return out

        assert_same_versions(fn, mode, kind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FACTORIES)
def test_new_tensor_has_the_eager_version(name: str, mode: Callable[[], Any]) -> None:
    assert_same_versions(lambda: [FACTORIES[name]()], mode)
