"""Sparse fakes have the metadata of real sparse tensors, and errors name unsupported layouts.

Each function runs on real tensors and on fakes of them, and the results are compared.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from common import RecordOperators
from comparisons import PROPERTIES, Raised, metadata, outcome
from sweeps.operators import tensors_in
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_map

from torchext.deferred_init import deferred_init, is_deferred
from torchext.fake import (
    DataDependentError,
    UnsupportedOperatorError,
    fake_like,
    fake_mode,
    is_fake,
    meta_like,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support", "ignore:Sparse invariant checks are implicitly disabled"
)

INDICES = torch.tensor([[0, 1, 3], [2, 0, 4]])


def coo() -> Tensor:
    return torch.sparse_coo_tensor(INDICES, torch.arange(3.0), (4, 5), is_coalesced=True)


def uncoalesced() -> Tensor:
    return torch.sparse_coo_tensor(INDICES[:, [1, 0, 1]], torch.arange(3.0), (4, 5))


def hybrid() -> Tensor:
    return torch.sparse_coo_tensor(INDICES[:1], torch.ones(3, 5), (4, 5), is_coalesced=True)


def csr() -> Tensor:
    return torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 2, 3]), INDICES[1], torch.arange(3.0), (4, 5))


def csc() -> Tensor:
    return torch.sparse_csc_tensor(torch.tensor([0, 1, 1, 2, 2, 3]), INDICES[0], torch.arange(3.0), (4, 5))


def bsr() -> Tensor:
    return torch.sparse_bsr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2, 2, 3), (4, 6))


def bsc() -> Tensor:
    return torch.sparse_bsc_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2, 2, 3), (4, 6))


COO = [coo, uncoalesced, hybrid]
COMPRESSED = [csr, csc, bsr, bsc]


def members(tensor: Tensor) -> list[Tensor]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def described(result: Any) -> Any:
    """Return the metadata of tensors, and of the members of sparse ones."""
    return tree_map(lambda leaf: described_tensor(leaf) if isinstance(leaf, Tensor) else leaf, result)


def described_tensor(tensor: Tensor) -> dict[str, object]:
    keys = str(torch._C._dispatch_keys(tensor)).replace("Fake, ", "").replace(", TESTING_ONLY_GenericWrapper", "")
    found = metadata(tensor, PROPERTIES | {"grad_fn", "is_leaf", "version", "storage_offset"}) | {"keys": keys}
    if tensor.layout is torch.strided:
        return found
    return found | {
        "sparse_dim": tensor.sparse_dim(),
        "dense_dim": tensor.dense_dim(),
        "nnz": tensor._nnz(),
        "is_coalesced": tensor.layout is torch.sparse_coo and tensor.is_coalesced(),
        "members": metadata(members(tensor)),
    }


def assert_same(function: Callable[..., Any], *arguments: Tensor) -> None:
    """Run `function` on real tensors and on fakes, in and outside of the mode."""
    wanted = described(function(*arguments))
    fakes = [fake_like(argument) for argument in arguments]
    outside = function(*fakes)
    with fake_mode():
        inside = function(*fakes)
    for found in (outside, inside):
        assert described(found) == wanted
        assert all(is_fake(tensor) for tensor in tensors_in(found))


def backward_of_mm(sparse: Tensor, dense: Tensor) -> list[Tensor | None]:
    sparse, dense = sparse.clone().requires_grad_(), dense.clone().requires_grad_()
    torch.sparse.mm(sparse, dense).sum().backward()
    return [sparse.grad, dense.grad]


def backward_of_to_dense(sparse: Tensor) -> Tensor | None:
    sparse = sparse.clone().requires_grad_()
    sparse.to_dense().sum().backward()
    return sparse.grad


def backward_of_gather(source: Tensor) -> Tensor | None:
    index = torch.zeros(1, 4, dtype=torch.int64, device=source.device)
    torch.gather(source.requires_grad_(), 0, index, sparse_grad=True).sum().backward()
    return source.grad


def trained(module: nn.Module, optimizer: Callable[..., Any]) -> list[Tensor]:
    """Return the parameter, its last gradient and the state of the optimizer after two steps."""
    [weight] = module.parameters()
    steps = optimizer([weight], lr=0.1)
    for _ in range(2):
        steps.zero_grad()
        module(torch.tensor([[1, 2, 2], [4, 0, 9]], device=weight.device)).sum().backward()
        steps.step()
    assert weight.grad is not None
    return [weight, weight.grad, *(value for value in tensors_in(steps.state[weight]) if value.dim())]


def on_other_device(value: Any) -> Any:
    return fake_like(value, device="cuda:1") if isinstance(value, Tensor) else value


def in_place(sparse: Tensor) -> Tensor:
    return sparse.clone().mul_(2).neg_().zero_()


class TestConstruction:
    @pytest.mark.parametrize("make", COO + COMPRESSED, ids=lambda f: f.__name__)
    def test_makes_fakes_in_the_mode(self, make: Callable[[], Tensor]) -> None:
        given = members(make())
        shape, layout = make().shape, make().layout

        def construct(*parts: Tensor) -> Tensor:
            if layout is torch.sparse_coo:
                return torch.sparse_coo_tensor(*parts, shape)
            return torch.sparse_compressed_tensor(*parts, shape, layout=layout)

        assert_same(construct, *given)

    def test_makes_fakes_of_lists_in_the_mode(self) -> None:
        for construct in (
            lambda: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0]),
            lambda: torch.sparse_coo_tensor([[0, 1]], [1, 2], (5,), dtype=torch.float64, requires_grad=True),
            lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0]),
            lambda: torch.sparse_coo_tensor((3, 4)),
            lambda: torch.zeros(3, 4, layout=torch.sparse_coo),
            lambda: torch.empty(3, 4, layout=torch.sparse_csr),
        ):
            with fake_mode():
                found = construct()
            assert is_fake(found)
            assert described(found) == described(construct())
            assert not is_fake(construct())

    def test_costs_no_memory(self) -> None:
        with fake_mode():
            indices = torch.zeros(2, 2**36, dtype=torch.int64)
            sparse = torch.sparse_coo_tensor(indices, torch.ones(2**36), (2**30, 2**20))
            assert (sparse * 2)._nnz() == 2**36
            assert sparse.to_dense().shape == (2**30, 2**20)
            assert (sparse @ torch.ones(2**20, 2**10)).shape == (2**30, 2**10)

    def test_real_arguments_stay_real_in_the_mode(self) -> None:
        sparse, values = coo(), torch.ones(3)
        with fake_mode():
            assert not is_fake(torch.sparse_coo_tensor(INDICES, values, (4, 5)))
            assert not is_fake(sparse * 2)
            assert not is_fake(sparse.relu())

    def test_real_member_becomes_fake_next_to_a_fake_one(self) -> None:
        sparse = torch.sparse_coo_tensor(INDICES, fake_like(torch.ones(3)), (4, 5))
        assert is_fake(sparse._indices())
        assert is_fake(sparse._values())


class TestOperators:
    @pytest.mark.cases(124)
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.to_dense(),
            lambda x: x.to_dense(dtype=torch.float64),
            lambda x: members(x),
            lambda x: x.values() if x.layout is not torch.sparse_coo else x._values(),
            lambda x: (x.sparse_dim(), x.dense_dim(), x._nnz()),
            lambda x: x.clone(),
            lambda x: x.detach(),
            lambda x: x * 2,
            lambda x: x / 2,
            lambda x: -x,
            lambda x: in_place(x),
            lambda x: x.to(torch.float64),
            lambda x: x.half(),
            lambda x: x.to("cpu", copy=True),
            lambda x: x.t(),
            lambda x: x.transpose(0, 1),
            lambda x: torch.zeros_like(x),
            lambda x: torch.empty_like(x),
            lambda x: x.clone().copy_(x),
            lambda x: x.detach().requires_grad_(),
            lambda x: x.clone().requires_grad_().to_dense(),
            lambda x: (x.clone().requires_grad_() * 2).to_dense(),
        ],
        ids=[
            *["to_dense", "to_dense_dtype", "members", "values", "dims", "clone", "detach", "mul", "div", "neg"],
            *["in_place", "to_dtype", "half", "to_device", "t", "transpose", "zeros_like", "empty_like", "copy_"],
            *["requires_grad_", "to_dense_with_gradient", "mul_with_gradient"],
        ],
    )
    @pytest.mark.parametrize("make", [coo, uncoalesced, csr, csc, bsr, bsc], ids=lambda f: f.__name__)
    def test_has_the_results_of_real_tensors(
        self, make: Callable[[], Tensor], function: Callable[[Tensor], Any]
    ) -> None:
        try:
            function(make())
        except (RuntimeError, NotImplementedError):  # like the dtype argument of `to_dense()` for most layouts
            with pytest.raises((RuntimeError, NotImplementedError)):
                function(fake_like(make()))
            return
        assert_same(function, make())

    @pytest.mark.parametrize(
        "function",
        [torch.relu, torch.abs, torch.sqrt, torch.isnan, torch.sin, lambda x: x.clone().relu_(), lambda x: x.sum()],
        ids=["relu", "abs", "sqrt", "isnan", "sin", "relu_", "sum"],
    )
    @pytest.mark.parametrize("make", [coo, hybrid, csr], ids=lambda f: f.__name__)
    def test_has_the_results_of_real_tensors_without_repeated_indices(
        self, make: Callable[[], Tensor], function: Callable[[Tensor], Any]
    ) -> None:
        assert_same(function, make())

    @pytest.mark.parametrize(
        "function",
        [
            torch.mm,
            torch.sparse.mm,
            torch.matmul,
            lambda x, y: x @ y[:, 0],
            lambda x, y: torch.addmm(torch.ones(4, 2), x, y),
            lambda x, y: torch.sparse.addmm(y.new_ones(4, 2), x, y),
            lambda x, y: y.t() @ x.t(),
        ],
        ids=["mm", "sparse.mm", "matmul", "mv", "addmm", "sparse.addmm", "transposed"],
    )
    @pytest.mark.parametrize("make", [coo, uncoalesced, csr, csc], ids=lambda f: f.__name__)
    def test_multiplies_by_strided_tensors(
        self, make: Callable[[], Tensor], function: Callable[[Tensor, Tensor], Any]
    ) -> None:
        assert_same(function, make(), torch.ones(5, 2))

    @pytest.mark.parametrize(
        "function",
        [
            lambda x, y: y + x,
            lambda x, y: y.clone().add_(x, alpha=-1),
            lambda x, y: y.clone().requires_grad_() + x,
        ],
        ids=["add", "add_", "add_with_gradient"],
    )
    @pytest.mark.parametrize("make", [coo, uncoalesced, hybrid, csr], ids=lambda f: f.__name__)
    def test_adds_to_strided_tensors(
        self, make: Callable[[], Tensor], function: Callable[[Tensor, Tensor], Any]
    ) -> None:
        assert_same(function, make(), torch.ones(4, 5))

    def test_batches_multiply(self) -> None:
        batch = torch.stack([coo(), coo()])
        assert_same(torch.bmm, batch, torch.ones(2, 5, 3))

    @pytest.mark.parametrize("make", [coo, csr], ids=lambda f: f.__name__)
    def test_gradients_of_mm(self, make: Callable[[], Tensor]) -> None:
        assert_same(backward_of_mm, make(), torch.ones(5, 2))

    @pytest.mark.parametrize("make", [coo, csr], ids=lambda f: f.__name__)
    def test_gradients_of_to_dense(self, make: Callable[[], Tensor]) -> None:
        assert_same(backward_of_to_dense, make())

    def test_masks_strided_tensors(self) -> None:
        assert_same(lambda x, mask: x.sparse_mask(mask), torch.ones(4, 5), coo())

    def test_softmax_keeps_the_elements(self) -> None:
        assert_same(lambda x: torch.sparse.softmax(x, 1), coo())

    def test_compresses_coalesced_tensors(self) -> None:
        assert_same(lambda x: x.to_sparse_csr(), coo())
        assert_same(lambda x: x.to_sparse_csr(), csc())
        assert_same(lambda x: x.to_sparse(), csr())
        assert_same(lambda x: x.coalesce(), coo())

    def test_inference_mode_makes_inference_tensors(self) -> None:
        with torch.inference_mode():
            assert_same(lambda x: x * 2, coo())

    def test_real_sparse_tensors_mix_with_fakes(self) -> None:
        result = torch.mm(coo(), fake_like(torch.ones(5, 2)))
        assert is_fake(result)
        assert result.shape == (4, 2)

    def test_real_tensors_are_not_written(self) -> None:
        real = torch.ones(4, 5)
        with pytest.raises(RuntimeError, match="into the real tensor `self`"):
            real.add_(fake_like(coo()))
        with pytest.raises(RuntimeError, match="into the real tensor `self`"):
            coo().copy_(fake_like(coo()))
        assert torch.equal(real, torch.ones(4, 5))

    def test_errors_of_real_tensors_have_the_same_messages(self) -> None:
        with pytest.raises(RuntimeError, match="matrices expected, got 1D tensor"):
            torch.mm(fake_like(hybrid()), torch.ones(5, 2))
        with pytest.raises(RuntimeError, match="coalesce expected sparse coordinate tensor layout but got SparseCsr"):
            fake_like(csr()).coalesce()
        with pytest.raises(RuntimeError, match="Cannot get indices on an uncoalesced tensor"):
            fake_like(uncoalesced()).indices()

    def test_a_refused_call_leaves_its_arguments_as_they_were(self) -> None:
        fake = fake_like(uncoalesced())
        for _ in range(2):
            with pytest.raises(DataDependentError, match="aten::add.out.*torch.sparse_coo"):
                fake.add_(fake)
            assert described(fake) == described(fake_like(uncoalesced()))

    def test_modes_see_the_calls_that_they_see_on_real_tensors(self) -> None:
        def run(sparse: Tensor, dense: Tensor) -> list[str]:
            with RecordOperators() as log:
                backward_of_mm(sparse, dense)
                backward_of_to_dense(sparse)
            return log.seen

        assert run(fake_like(coo()), fake_like(torch.ones(5, 2))) == run(coo(), torch.ones(5, 2))

    def test_calls_with_sparse_tensors_are_not_cached(self) -> None:
        indices, values = fake_like(INDICES), fake_like(torch.ones(3))
        for size in ((4, 5), (4, 6), (4, 5)):
            sparse = [torch.sparse_coo_tensor(indices, values, size) for _ in range(2)]
            assert sparse[0] is not sparse[1]
            assert [described(s) for s in sparse] == [described(sparse[0])] * 2
            assert sparse[0].shape == size


# The operators of `op_db` that multiply sparse tensors or reduce over sparse dimensions in at least one sample.
UNKNOWN_ELEMENTS = {"mul", "sum", *(f"masked.{name}" for name in ("amax", "amin", "mean", "prod", "sum"))}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_sparse_samples_of_op_db_match_real_tensors(layout: torch.layout) -> None:
    compared = 0
    for op, arguments, kwargs in samples(layout):
        try:
            wanted = described(op(*arguments, **kwargs))
        except Exception:  # a sample that this build of PyTorch cannot run
            continue
        fakes: dict[int, Tensor] = {}

        def to_fake(value: object, fakes: dict[int, Tensor] = fakes) -> object:
            return fakes.setdefault(id(value), fake_like(value)) if isinstance(value, Tensor) else value

        fake_arguments, fake_kwargs = tree_map(to_fake, (arguments, kwargs))
        try:
            with fake_mode():
                found = op(*fake_arguments, **fake_kwargs)
        except (DataDependentError, UnsupportedOperatorError):
            assert op.name in UNKNOWN_ELEMENTS
            continue
        assert described(found) == wanted
        compared += 1
    assert compared > 10


def samples(layout: torch.layout) -> Iterator[tuple[OpInfo, tuple[Any, ...], dict[str, Any]]]:
    for op in op_db:
        with contextlib.suppress(NotImplementedError, unittest.SkipTest):  # an operator without such samples
            for sample in op.sample_inputs_sparse(layout, "cpu", torch.float32):
                yield op, (sample.input, *sample.args), sample.kwargs


class TestElements:
    """The number of elements of the result depends on values."""

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (lambda x: x.coalesce(), "aten::_coalesce"),
            (lambda x: x.relu(), "aten::_coalesce"),
            (lambda x: x + x, "aten::add.out"),
            (lambda x: x * x, "aten::mul.out"),
            (lambda x: torch.sparse.mm(x, x.t()), "aten::_coalesce|aten::_sparse_sparse_matmul"),
            (lambda x: x.index_select(0, torch.tensor([0])), "aten::index_select"),
        ],
        ids=["coalesce", "relu", "add", "mul", "mm", "index_select"],
    )
    def test_operator_and_layout_are_named(self, function: Callable[[Tensor], Tensor], name: str) -> None:
        with pytest.raises(DataDependentError, match=f"`({name})` needs the values.*torch.sparse_coo"):
            function(fake_like(uncoalesced()))

    @pytest.mark.parametrize("method", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
    def test_those_of_a_strided_tensor_are_unknown(self, method: str) -> None:
        with fake_mode(), pytest.raises(DataDependentError, match=f"aten::_{method}.*how many elements"):
            getattr(torch.ones(3, 3), method)()

    def test_one_element_is_coalesced(self) -> None:
        single = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (4, 5))
        assert_same(lambda x: x.coalesce(), single)

    def test_kernels_that_read_memory_are_named(self) -> None:
        with pytest.raises(UnsupportedOperatorError, match="aten::_to_sparse.*torch.sparse_bsr"):
            fake_like(bsr()).to_sparse()


class TestOptimizers:
    @pytest.mark.parametrize(
        "optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad], ids=lambda c: c.__name__
    )
    def test_embeddings_train(self, optimizer: Callable[..., Any]) -> None:
        def train() -> list[Any]:
            embedding = nn.Embedding(10, 3, sparse=True)
            steps = optimizer(embedding.parameters(), lr=0.1)
            seen: list[Any] = []
            for _ in range(2):
                steps.zero_grad()
                embedding(torch.tensor([[1, 2, 2], [4, 0, 9]])).sum().backward()
                seen.append(described(embedding.weight.grad))
                steps.step()
            seen.append(described(embedding.weight))
            return [*seen, *(described(state) for state in steps.state.values())]

        with fake_mode():
            found = train()
        assert found == train()
        assert found[0]["nnz"] == 6

    def test_gradients_of_embedding_bags_are_sparse(self) -> None:
        def train() -> Tensor:
            bag = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")
            bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 2])).sum().backward()
            assert bag.weight.grad is not None
            return bag.weight.grad

        with fake_mode():
            found = train()
        assert is_fake(found)
        assert described(found) == described(train())

    def test_gradients_accumulate(self) -> None:
        def train() -> Any:
            embedding = nn.Embedding(10, 3, sparse=True)
            for _ in range(2):
                embedding(torch.zeros(4, dtype=torch.int64)).sum().backward()
            return described(embedding.weight.grad)

        with fake_mode():
            found = train()
        assert found == train()
        assert found["nnz"] == 8

    def test_momentum_has_an_unknown_number_of_elements(self) -> None:
        with fake_mode():
            embedding = nn.Embedding(10, 3, sparse=True)
            steps = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
            embedding(torch.zeros(4, dtype=torch.int64)).sum().backward()
            steps.step()
            with pytest.raises(DataDependentError, match="aten::add.out.*torch.sparse_coo"):
                steps.step()


class TestCopies:
    @pytest.mark.parametrize("make", COO + COMPRESSED, ids=lambda f: f.__name__)
    @pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
    def test_fake_like_keeps_all_but_the_values(self, make: Callable[[], Tensor], requires_grad: bool) -> None:
        real = make().requires_grad_(requires_grad)
        fake = fake_like(real)
        assert is_fake(fake)
        assert not is_fake(real)
        assert all(is_fake(member) for member in members(fake))
        assert described(fake) == described(real)
        assert described(fake_like(fake)) == described(real)

    def test_fake_like_keeps_ties_classes_and_gradients(self) -> None:
        module = nn.Module()
        module.register_buffer("sparse", coo())
        module.register_buffer("same", module.sparse)
        module.weight = nn.Parameter(torch.ones(4, 5))
        module.weight.grad = coo()
        module.compressed = nn.Parameter(csr())
        fake = fake_like(module)
        assert fake.sparse is fake.same
        assert described(fake.weight.grad) == described(coo())
        assert is_fake(fake.weight.grad)
        assert isinstance(fake.compressed, nn.Parameter)
        assert described(fake.compressed) == described(module.compressed)

    def test_members_share_storages_with_their_copies(self) -> None:
        real = csr()
        sparse, values = fake_like([real, real.values()])
        assert sparse.values().untyped_storage()._cdata == values.untyped_storage()._cdata

    def test_deepcopy_behaves_like_on_real_tensors(self) -> None:
        for make in COO:
            fake = fake_like(make()).requires_grad_()
            copied = copy.deepcopy(fake)
            assert copied is not fake
            assert is_fake(copied)
            assert described(copied) == described(copy.deepcopy(make().requires_grad_()))
        for tensor in (csr(), fake_like(csr())):
            with pytest.raises(NotImplementedError, match="Cannot access storage of SparseCsrTensorImpl"):
                copy.deepcopy(tensor)

    def test_prints_its_layout(self) -> None:
        assert repr(fake_like(coo())) == (
            "tensor(..., size=(4, 5), dtype=torch.float32, device='cpu', layout=torch.sparse_coo, nnz=3, fake=True)"
        )
        assert "layout=torch.sparse_csr, nnz=3, requires_grad=True" in repr(fake_like(csr()).requires_grad_())

    def test_data_cannot_be_saved(self) -> None:
        with pytest.raises(RuntimeError, match="fake"):
            torch.save(fake_like(coo()), io.BytesIO())

    def test_meta_like_names_the_layout(self) -> None:
        with pytest.raises(NotImplementedError, match="strided.*layout Sparse"):
            meta_like(fake_like(coo()))

    def test_data_can_be_set(self) -> None:
        real = coo()
        real.data = fake_like(coo())
        assert is_fake(real)
        assert described(real * 2) == described(coo() * 2)
        real.data = coo()
        assert not is_fake(real)
        assert real.to_dense().sum() == 3.0


class TestCuda:
    """On a build without CUDA, the kernels for the CPU are run."""

    @pytest.mark.parametrize("make", [coo, csr], ids=lambda f: f.__name__)
    def test_operators_stay_on_the_device(self, make: Callable[[], Tensor]) -> None:
        with fake_mode(gpu=True):
            sparse = fake_like(make(), device="cuda")
            assert fake_like(make()).cuda().device == torch.device("cuda:0")
            dense = torch.ones(5, 2, device="cuda")
            results = [sparse @ dense, sparse.to_dense(), -sparse, sparse.t(), sparse.sum(), sparse.double()]
            assert all(result.device == torch.device("cuda:0") for result in results)
            assert results[2]._nnz() == 3
            assert described(sparse.cpu()) == described(make())
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                sparse @ torch.ones(5, 2)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
    @pytest.mark.parametrize(
        "program",
        [
            *(lambda device, make=make: fake_like(make(), device=device) for make in COO + COMPRESSED),
            *(lambda device, make=make: fake_like(make()).to(device) for make in COO + COMPRESSED),
            lambda device: torch.zeros(4, 4, layout=torch.sparse_coo, device=device),
            lambda device: torch.zeros(4, 4, layout=torch.sparse_csr, device=device),
            lambda device: torch.empty(4, 4, layout=torch.sparse_coo, device=device),
            lambda device: fake_like(coo(), device=device).new_empty(3, 3),
            lambda device: torch.sparse_coo_tensor(INDICES.to(device), torch.ones(3, device=device), (4, 5)),
            lambda device: torch.sparse_coo_tensor(INDICES.tolist(), [1.0, 2.0, 3.0], (4, 5), device=device),
            lambda device: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device=device),
            lambda device: copy.deepcopy(fake_like(coo(), device=device)),
            lambda device: fake_like(coo(), device="cuda:0").to(device) @ torch.ones(5, 2, device=device),
            lambda device: backward_of_to_dense(fake_like(coo(), device=device)),
            lambda device: backward_of_gather(torch.ones(3, 4, device=device)),
            lambda device: trained(nn.Embedding(10, 3, sparse=True, device=device), torch.optim.SparseAdam),
            lambda device: trained(nn.Embedding(10, 3, sparse=True).to(device), torch.optim.Adagrad),
            lambda device: trained(nn.EmbeddingBag(10, 3, sparse=True, mode="sum", device=device), torch.optim.SGD),
        ],
    )
    def test_results_do_not_depend_on_the_current_device(self, program: Callable[[str], Any]) -> None:
        with fake_mode(gpu=2):
            found = described(program("cuda:1"))
            with torch.cuda.device(1):
                assert found == described(program("cuda:1"))
        assert all(tensor["device"].index == 1 for tensor in (found if isinstance(found, list) else [found]))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
    @pytest.mark.cases(1)
    @pytest.mark.filterwarnings("ignore")
    def test_samples_of_op_db_do_not_depend_on_the_current_device(self) -> None:
        def run(*call: Any) -> Any:
            op, arguments, kwargs = tree_map(on_other_device, call)
            return outcome(lambda: described(op(*arguments, **kwargs)))

        compared = 0
        for call in samples(torch.sparse_coo):
            with fake_mode(gpu=2):
                found = run(*call)
                with torch.cuda.device(1):
                    assert found == run(*call)
            compared += not isinstance(found, Raised)
        assert compared > 10

    def test_carries_the_keys_of_the_device(self) -> None:
        with fake_mode(gpu=True):
            keys = str(torch._C._dispatch_keys(fake_like(coo(), device="cuda")))
        for key in ("SparseCUDA", "Fake", "ADInplaceOrView", "AutogradCUDA", "AutocastCUDA"):
            assert key in keys


class TestDeferred:
    def test_sparse_tensors_are_real_in_deferred_init(self) -> None:
        def construct() -> list[Tensor]:
            return [
                torch.eye(3).to_sparse(),
                torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.int64), torch.ones(3), (4, 5)),
                torch.zeros(3, 3, layout=torch.sparse_coo),
                torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2)),
                torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1)),
            ]

        for found, wanted in zip(deferred_init(construct), construct(), strict=True):
            assert not is_fake(found)
            assert torch.equal(found.to_dense(), wanted.to_dense())

    def test_sparse_fakes_are_not_deferred(self) -> None:
        fake = fake_like(coo())
        assert not is_deferred(fake)
        found = deferred_init(lambda: fake * 2)
        assert is_fake(found)
        assert not is_deferred(found)


class TestOtherLayouts:
    @pytest.mark.parametrize(
        ("construct", "what"),
        [
            (lambda x: torch.nested.nested_tensor([x, x[:2]]), "returns a nested tensor of layout torch.strided"),
            (lambda x: torch.nested.as_nested_tensor([x, x[:2]]), "returns a nested tensor of layout torch.strided"),
            (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "returns a quantized tensor"),
            (lambda x: x.to_mkldnn(), "returns a tensor of layout torch._mkldnn"),
        ],
        ids=["nested", "as_nested", "quantized", "mkldnn"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize.*")
    def test_error_names_the_unsupported_result(self, construct: Callable[[Tensor], Tensor], what: str) -> None:
        with fake_mode(), pytest.raises(UnsupportedOperatorError, match=f"strided or sparse, but `aten::.*` {what}"):
            construct(torch.ones(3))

    @pytest.mark.parametrize(
        ("make", "what"),
        [
            (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]), "a nested tensor"),
            (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor of shape"),
            (lambda: torch.ones(3, 3).to_mkldnn(), "a tensor of layout Mkldnn"),
        ],
        ids=["nested", "quantized", "mkldnn"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize.*")
    def test_error_names_the_unsupported_argument(self, make: Callable[[], Tensor], what: str) -> None:
        with pytest.raises(UnsupportedOperatorError, match=f"strided or sparse, but `aten::mul.Tensor` takes {what}"):
            fake_like(torch.ones(3)) * make()

    def test_jagged_nested_tensors_are_made_of_fakes(self) -> None:
        with fake_mode():
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert is_fake(nested._values)

    def test_permanent_state_of_jagged_nested_tensors_is_real(self) -> None:
        def make() -> Tensor:
            return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

        kept = torch.nested._internal.nested_tensor
        with mock.patch.object(kept, "_dummy_instance", None):
            with fake_mode():
                deferred_init(make)
                make()
            assert not is_fake(kept._dummy_instance._values)
            assert make().sum(1).tolist() == [2.0, 3.0]

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors_are_real_in_deferred_init(self) -> None:
        nested = deferred_init(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        assert not is_fake(nested)
        assert [part.tolist() for part in nested.unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_new_takes_its_keywords_in_any_order() -> None:
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.ones(2)
    real = torch.sparse_coo_tensor(indices, values, (2, 2))
    fake = fake_like(real).new(values=fake_like(values), indices=fake_like(indices), size=(2, 2))
    assert fake.shape == real.new(values=values, indices=indices, size=(2, 2)).shape


FromIndices = Callable[[Callable[..., Tensor]], Tensor]

# Constructors that read their indices, which are known, and take values, which may not be.
FROM_INDICES: dict[str, FromIndices] = {
    "size of indices": lambda values: torch.sparse_coo_tensor([[1, 2]], values(2)),
    "size of a tensor of indices": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values(2)),
    "hybrid": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2], [0, 5]]), values(2, 3)),
    "dtype": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values(2), dtype=torch.float64),
    "int32": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]).int(), values(2)),
    "gradient": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values(2), requires_grad=True),
    "no elements": lambda values: torch.sparse_coo_tensor(torch.zeros(1, 0).long(), values(0)),
    "no dimensions": lambda values: torch.sparse_coo_tensor(torch.zeros(0, 0).long(), values(0)),
    "negative": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, -2]]), values(2)),
    "number": lambda values: torch.sparse_coo_tensor(torch.tensor([[1]]), values(())),
    "other number of values": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values(3)),
    "vector of indices": lambda values: torch.sparse_coo_tensor(torch.tensor([1, 2]), values(2)),
    "floating point": lambda values: torch.sparse_coo_tensor(torch.tensor([[1.0, 2.0]]), values(2)),
    "checked": lambda values: torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values(2), (3,), check_invariants=True),
    "checked number": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[1]]), values(()), (3,), check_invariants=True
    ),
    "checked size of indices": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[1, 2]]), values(2), check_invariants=True
    ),
    "checked, too large": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[1, 2]]), values(2), (2,), check_invariants=True
    ),
    "checked rows": lambda values: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 1]), values(2), (2, 2), check_invariants=True
    ),
    "checked, more rows than elements": lambda values: torch.sparse_csc_tensor(
        torch.tensor([0, 2, 1]), torch.tensor([0, 1]), values(2), (2, 2), check_invariants=True
    ),
    "checked blocks, too far": lambda values: torch.sparse_bsr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([0, 5]), values(2, 2, 2), (4, 4), check_invariants=True
    ),
    "checked, coalesced": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [0, 1]]), values(2), (2, 2), is_coalesced=True, check_invariants=True
    ),
    "checked, not sorted": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[1, 0], [0, 1]]), values(2), (2, 2), is_coalesced=True, check_invariants=True
    ),
    "checked, not coalesced": lambda values: torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), values(2), (3,), is_coalesced=True, check_invariants=True
    ),
}


@pytest.mark.parametrize("name", FROM_INDICES)
def test_constructors_read_known_indices(name: str) -> None:
    wanted = outcome(lambda: FROM_INDICES[name](torch.ones))
    with fake_mode():
        for values in (torch.ones, torch.empty):
            found = outcome(lambda values=values: FROM_INDICES[name](values))
            if isinstance(wanted, Raised):
                assert found == wanted
                continue
            assert is_fake(found)
            assert metadata(found) == metadata(wanted)
            assert found._nnz() == wanted._nnz()
            assert wanted.layout is not torch.sparse_coo or found.is_coalesced() == wanted.is_coalesced()


def test_unknown_indices_are_valid_but_have_no_size() -> None:
    with fake_mode():
        indices, values = torch.empty(1, 2).long(), torch.ones(2)
        assert torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True).shape == (3,)
        rows = torch.empty(3).long()
        assert torch.sparse_csr_tensor(rows, indices[0], values, (2, 2), check_invariants=True).shape == (2, 2)
        with pytest.raises(DataDependentError, match=r"needs the values of its argument `indices`"):
            torch.sparse_coo_tensor(indices, values)


SPARSE_OF_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "to_dense": Tensor.to_dense,
    "product": lambda sparse: torch.sparse.mm(sparse, torch.ones(3, 2, device=sparse.device)),
    "values": lambda sparse: (sparse * 2).values(),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("name", SPARSE_OF_VALUES)
def test_values_of_a_sparse_tensor_have_gradients(name: str, device: str) -> None:
    with fake_mode(gpu=2):
        values = torch.ones(2, device=device, requires_grad=True)
        indices = torch.tensor([[0, 1], [2, 0]], device=device)
        sparse = torch.sparse_coo_tensor(indices, values, (3, 3), is_coalesced=True, check_invariants=False)
        SPARSE_OF_VALUES[name](sparse).sum().backward()
        assert is_fake(values.grad)
        assert values.grad.shape == (2,)
        assert values.grad.device == values.device


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
def test_mask_on_another_device_is_refused() -> None:
    with fake_mode(gpu=2):
        indices, values = torch.tensor([[0], [1]], device="cuda:0"), torch.ones(1, device="cuda:0")
        mask = torch.sparse_coo_tensor(indices, values, (3, 3), is_coalesced=True, check_invariants=False)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, 3, device="cuda:1").sparse_mask(mask)


@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masked_tensor_has_the_indices_of_the_mask(dtype: torch.dtype, is_coalesced: bool) -> None:
    def build() -> Tensor:
        indices, values = torch.tensor([[0, 1], [2, 0]]), torch.ones(2, 4)
        mask = torch.sparse_coo_tensor(indices, values, (3, 3, 4), is_coalesced=is_coalesced, check_invariants=False)
        return torch.ones(3, 3, 4, dtype=dtype).sparse_mask(mask)

    wanted = build()
    with fake_mode():
        found = build()
    assert metadata(found) == metadata(wanted)
    assert (found._nnz(), found.is_coalesced()) == (wanted._nnz(), wanted.is_coalesced())


def matrix_of(dtype: torch.dtype, batch: tuple[int, ...] = ()) -> Tensor:
    indices = torch.tensor([[0, 1], [2, 0]])
    indices = torch.cat([torch.tensor([[0, 1]]), indices]) if batch else indices
    return torch.sparse_coo_tensor(indices, torch.ones(2, dtype=dtype), (*batch, 5, 6), check_invariants=False)


Product = Callable[[torch.dtype, torch.dtype], Tensor]
PRODUCTS: dict[str, Product] = {
    "mm": lambda a, b: matrix_of(a) @ torch.ones(6, 3, dtype=b),
    "mv": lambda a, b: matrix_of(a) @ torch.ones(6, dtype=b),
    "addmm": lambda a, b: torch.addmm(torch.ones(5, 3, dtype=b), matrix_of(a), torch.ones(6, 3, dtype=b)),
    "addmm, other sum": lambda a, b: torch.addmm(torch.ones(5, 3, dtype=b), matrix_of(a), torch.ones(6, 3, dtype=a)),
    "addmm_": lambda a, b: torch.ones(5, 3, dtype=a).addmm_(matrix_of(a), torch.ones(6, 3, dtype=b)),
    "sparse.mm": lambda a, b: torch.sparse.mm(matrix_of(a), torch.ones(6, 3, dtype=b)),
    "bmm": lambda a, b: torch.bmm(matrix_of(a, (2,)), torch.ones(2, 6, 3, dtype=b)),
    "add": lambda a, b: torch.ones(5, 6, dtype=b) + matrix_of(a),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
@pytest.mark.parametrize("dtypes", [*itertools.product((torch.float32, torch.float64), repeat=2)], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrices_of_different_dtypes_have_the_outcome_of_real_ones(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    wanted = outcome(lambda: PRODUCTS[name](*dtypes))
    with fake_mode():
        found = outcome(lambda: PRODUCTS[name](*dtypes))
    with fake_mode(gpu=1), torch.device("cuda"):
        on_cuda = outcome(lambda: PRODUCTS[name](*dtypes))
    if isinstance(wanted, Raised):
        assert found == wanted
        assert isinstance(on_cuda, Raised)
    else:
        assert metadata(found) == metadata(wanted)
        assert (on_cuda.shape, on_cuda.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
def test_sums_on_cuda_have_the_elements_of_both() -> None:
    """As `add_out_sparse_cuda()`, which merges elements only where there are more than places."""
    with fake_mode(gpu=2):
        embedding = nn.Embedding(10, 4, sparse=True, device="cuda:1")
        for _ in range(2):
            embedding(torch.tensor([1, 2], device="cuda:1")).sum().backward()
        gradient = embedding.weight.grad
        assert (gradient._nnz(), gradient.is_coalesced(), gradient.device.index) == (4, False, 1)
        assert (gradient - gradient)._nnz() == 8
        assert gradient.sub_(gradient) is embedding.weight.grad
        assert gradient._nnz() == 8
        few = torch.sparse_coo_tensor([[0, 1]], torch.ones(2), (3,), device="cuda", check_invariants=False)
        with pytest.raises(DataDependentError, match=r"aten::add.* needs the values"):
            few + few
        with pytest.raises(DataDependentError, match=r"aten::add.* needs the values"):
            few + few.double()
        integers = torch.sparse_coo_tensor([[0, 1]], [1, 2], (9,), device="cuda", check_invariants=False)
        with pytest.raises(RuntimeError, match="argument alpha must not be a floating point number"):
            torch.add(integers, integers, alpha=0.5)
