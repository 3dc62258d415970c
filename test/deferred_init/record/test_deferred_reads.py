"""A constructor may read values, and call operators that cannot be deferred."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from common import (
    assert_defers_exactly,
    assert_tensors_defer_exactly,
)
from comparisons import error_of
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import fake_mode


def saved_and_loaded(module: nn.Module, is_new: bool) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file, _use_new_zipfile_serialization=is_new)
    file.seek(0)
    result: nn.Module = torch.load(file, weights_only=False)
    return result


class Pair:
    """A sequence that is neither a list nor a tuple."""

    def __init__(self, *elements: object) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, i: int) -> object:
        return self.elements[i]


OTHER_READS: dict[str, Callable[[], Tensor]] = {
    "keyword": lambda: torch.tensor(data=[torch.rand(()), 2.0]),
    "nested": lambda: torch.tensor([[(torch.rand(()),)], [(2.0,)]]),
    "sequence": lambda: torch.tensor(Pair(torch.rand(()), Pair(2.0)[0])),
    "sequences": lambda: torch.tensor([Pair(1, torch.rand(())), Pair(torch.rand(()), 2)]),
    "deque": lambda: torch.as_tensor(deque([torch.rand(()), 2.0])),
    "integers": lambda: torch.tensor([torch.arange(5)[3], 7]),
    "booleans": lambda: torch.tensor([torch.rand(()) > 0.5, True]),
    "complex": lambda: torch.tensor([torch.rand(()) * 1j, 1.0]),
    "asarray": lambda: torch.asarray([torch.rand(4)[0], 1.0]),
    "asarray of keyword": lambda: torch.asarray(obj=(torch.rand(()),), dtype=torch.float64),
    "Tensor": lambda: torch.Tensor([1, torch.rand(4)[3]]),
    "Tensor of lists": lambda: torch.Tensor([[1, 2], [torch.rand(4)[3], torch.arange(3)[1]]]),
    "FloatTensor": lambda: torch.FloatTensor([torch.rand(4)[3]]),
    "LongTensor": lambda: torch.LongTensor([torch.arange(4)[3], 1]),
    "new": lambda: torch.rand(3).new([torch.rand(()), 2.0]),
    "array": lambda: torch.tensor(np.array([torch.rand(4)[0], torch.rand(4)[1]]).tolist()),
    "text": lambda: torch.tensor([float(x) for x in str(torch.rand(3))[8:-2].split(",")]),
    "formatted": lambda: torch.tensor(float(f"{torch.rand(3)[1]:.3f}")),
}


def contains_itself() -> list[object]:
    data: list[object] = [0]
    data.append(data)
    return data


class Unreadable:
    """A sequence that has a length, but no elements."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> float:
        raise TypeError


class Endless:
    """A sequence whose elements are sequences like it."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Endless:
        return Endless()


class TestReads:
    """A constructor may read values."""

    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t.sum().item(),
            lambda t: t.tolist(),
            lambda t: t.numpy().copy().tolist(),
            lambda t: float(t[1]),
            lambda t: int(t[1]),
            lambda t: bool((t > 1).any()),
            lambda t: t.nonzero().shape,
            lambda t: t.unique().numel(),
            lambda t: t[t > 1].shape,
            lambda t: torch.equal(t, t.clone()),
            lambda t: torch.allclose(t, t + 1e-9),
            lambda t: [x.item() for x in torch.linspace(0, 1, 5)],
            lambda t: torch.nn.functional.one_hot(t.long()).shape,
            lambda t: torch.repeat_interleave(t, t.long()).shape,
            lambda t: f"{t.max():.2f}",
        ],
        ids=[
            "item",
            "tolist",
            "numpy",
            "float",
            "int",
            "bool",
            "nonzero",
            "unique",
            "mask",
            "equal",
            "allclose",
            "linspace",
            "one_hot",
            "repeat",
            "format",
        ],
    )
    def test_read_returns_the_eager_value(self, read: Callable[[Tensor], object]) -> None:
        def build() -> object:
            return read(torch.arange(4.0))

        assert deferred_init(build) == build()

    def test_results_of_reads_are_deferred_too(self) -> None:
        def build() -> list[Tensor]:
            t = torch.randn(8)
            return [t[t > 0], t.nonzero(), t.unique() * 2]

        assert_tensors_defer_exactly(build)

    def test_composites_that_read_memory_are_given_values(self) -> None:
        def build() -> list[Tensor]:
            x, lengths = torch.randn(6, 2, 4), torch.full((2,), 3) + 1
            loss = nn.functional.ctc_loss(x, torch.tensor([[1, 2], [3, 1]]), lengths, lengths // 2, reduction="none")
            parts = [*x.tensor_split(lengths.cumsum(0)[:1] // 2), *x.tensor_split(lengths[0] // 2)]
            return [loss, *(part.clone() for part in parts)]

        assert_tensors_defer_exactly(build)

    def test_random_values_can_be_read(self) -> None:
        def build() -> tuple[float, Tensor]:
            t = torch.rand(4)
            u = torch.rand(4)
            return t.sum().item(), u

        torch.manual_seed(0)
        wanted, wanted_u = build()
        torch.manual_seed(0)
        found, found_u = deferred_init(build)
        assert found == wanted
        assert torch.equal(materialize_tensor(found_u), wanted_u)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.tensor([torch.rand(()), 2.0]),
            lambda: torch.tensor(list(torch.rand(4))),
            lambda: torch.tensor(torch.rand(3)),
            lambda: torch.as_tensor([x * 2 for x in torch.rand(2)]),
            lambda: torch.rand(3).new_tensor([1, 2]),
            lambda: torch.arange(3).new_tensor(torch.rand(2) * 5),
            *OTHER_READS.values(),
        ],
        ids=["number", "list", "tensor", "as_tensor", "new_tensor", "new_tensor_of_tensor", *OTHER_READS],
    )
    @pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
    def test_tensors_are_made_from_deferred_values(self, make: Callable[[], Tensor]) -> None:
        assert_tensors_defer_exactly(lambda: [torch.rand(1), make(), torch.rand(1)])

    @pytest.mark.parametrize("data", [contains_itself(), [[1, 2], contains_itself()], Unreadable(), Endless()])
    def test_sequences_that_pytorch_refuses_are_refused_by_it(self, data: object) -> None:
        with pytest.raises(
            Exception, match=r"self-referential|could not determine the shape|too many dimensions"
        ) as eager:
            torch.tensor(data)
        with pytest.raises(eager.type) as deferred:
            deferred_init(lambda: torch.tensor(data))
        assert str(deferred.value) == str(eager.value)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.rand(3),
            lambda: torch.rand(3, 2, dtype=torch.float64)[1:],
            lambda: nn.Parameter(torch.rand(2)),
            lambda: torch.rand(2, requires_grad=True) * 2,
            lambda: torch.arange(1000),
            lambda: torch.rand(2, 0),
            lambda: torch.rand(()) * 1j,
            lambda: torch.tensor(3.0),
            lambda: (torch.rand(3) * 1j).conj().imag,
        ],
        ids=["vector", "view", "parameter", "result", "integers", "empty", "complex", "constant", "negated"],
    )
    @pytest.mark.parametrize(
        "show", [str, repr, "{}".format, lambda t: f"{t!r:>50}"], ids=["str", "repr", "format", "f"]
    )
    def test_tensors_are_printed_as_eagerly(self, make: Callable[[], Tensor], show: Callable[[Tensor], str]) -> None:
        def build() -> str:
            torch.manual_seed(0)
            return show(make())

        assert deferred_init(build) == build()

    def test_large_tensors_are_not_computed_to_be_printed(self) -> None:
        assert deferred_init(lambda: str(torch.rand(1001))).startswith("tensor(..., size=(1001,)")

    def test_array_shares_memory_with_its_tensor(self) -> None:
        def build() -> tuple[Tensor, Tensor]:
            tensor = torch.zeros(3)
            tensor.numpy()[0] = 7
            return tensor, tensor * 2

        tensor, doubled = deferred_init(build)
        assert materialize_tensor(tensor).tolist() == [7.0, 0.0, 0.0]
        assert materialize_tensor(doubled).tolist() == [14.0, 0.0, 0.0]

    def test_checkpoint_is_loaded_in_a_constructor(self, tmp_path: object) -> None:
        path = f"{tmp_path}/state.pt"
        torch.save({"weight": torch.randn(2, 3)}, path)

        def build() -> nn.Module:
            module = nn.Linear(3, 2, bias=False)
            module.load_state_dict(torch.load(path))
            return module

        assert_defers_exactly(build)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: nn.utils.parametrizations.orthogonal(nn.Linear(17, 33)),
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
        ],
        ids=["orthogonal", "spectral_norm"],
    )
    def test_operators_without_meta_kernel_run_at_once(self, build: Callable[[], nn.Module]) -> None:
        assert_defers_exactly(build)

    @pytest.mark.parametrize(
        "build",
        [
            lambda: list(torch.randn(7).tensor_split(torch.tensor([2, 4])))[1:2],
            lambda: [torch.quasirandom.SobolEngine(3, scramble=True).draw(4)],
            lambda: [torch.quasirandom.SobolEngine(3, scramble=True, seed=1).sobolstate],
            lambda: [
                nn.functional.ctc_loss(
                    torch.randn(5, 2, 4).log_softmax(2),
                    torch.tensor([[1, 2], [3, 1]]),
                    torch.tensor([5, 5]),
                    torch.tensor([2, 1]),
                )
            ],
        ],
        ids=["tensor_split", "sobol", "sobol_state", "ctc_loss"],
    )
    def test_composites_read_the_memory_of_their_arguments(self, build: Callable[[], list[Tensor]]) -> None:
        assert_tensors_defer_exactly(lambda: [*build(), torch.rand(1)])

    def test_views_of_composites_that_read_memory_are_views(self) -> None:
        def build() -> Tensor:
            base = torch.zeros(4)
            base.tensor_split(torch.tensor([1]))[1].fill_(1)
            return base

        assert materialize_tensor(deferred_init(build)).tolist() == [0.0, 1.0, 1.0, 1.0]

    def test_custom_operators_without_a_fake_run_at_once(self) -> None:
        @torch.library.custom_op("torchext_test::reads_memory", mutates_args=())
        def reads_memory(x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy() * 2)

        assert_tensors_defer_exactly(lambda: [reads_memory(torch.randn(3)), torch.rand(1)])

    def test_real_results_of_a_custom_operator_are_the_users(self) -> None:
        with torch.library._scoped_library("torchext_test", "FRAGMENT") as library:
            library.define("first_row(Tensor(a) x, Tensor y) -> Tensor(a)")
            library.impl("first_row", lambda x, y: x[0], "CPU")
            real = torch.zeros(2, 3)
            row = deferred_init(lambda: torch.ops.torchext_test.first_row(real, torch.ones(1)))
        row.add_(1)
        assert real.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]

    def test_interrupt_in_the_fake_of_a_custom_operator_is_not_a_missing_fake(self) -> None:
        @torch.library.custom_op("torchext_test::is_interrupted", mutates_args=())
        def run(x: Tensor) -> Tensor:
            return x.clone()

        @run.register_fake
        def _(x: Tensor) -> Tensor:
            raise KeyboardInterrupt("in a fake")

        with pytest.raises(KeyboardInterrupt, match="in a fake"):
            deferred_init(lambda: run(torch.ones(2)))

    def test_error_of_a_custom_operator_is_its_own(self) -> None:
        @torch.library.custom_op("torchext_test::raises", mutates_args=())
        def raises(x: Tensor) -> Tensor:
            raise ValueError(f"no good: {x.tolist()}")

        with pytest.raises(ValueError, match=r"no good: \[1.0\]"):
            deferred_init(lambda: raises(torch.ones(1)))

    def test_sparse_tensors_are_real(self) -> None:
        sparse = deferred_init(lambda: torch.eye(3).to_sparse())
        assert torch.equal(sparse.to_dense(), torch.eye(3))

    def test_out_argument_of_a_read_is_resized(self) -> None:
        def build() -> Tensor:
            return torch.nonzero(torch.tensor([0.0, 1.0]), out=torch.empty(0, dtype=torch.int64))

        assert_tensors_defer_exactly(lambda: [build()])

    def test_write_into_a_real_tensor_counts_as_one(self) -> None:
        real = torch.zeros(3)
        deferred_init(lambda: real.copy_(torch.ones(3)))
        assert real._version == 1
        leaf = nn.Parameter(torch.zeros(3))
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            deferred_init(lambda: leaf.copy_(torch.ones(3)))

    def test_write_into_a_real_tensor_happens_at_once(self) -> None:
        real = torch.zeros(3)

        def build() -> None:
            real[:] = torch.arange(3.0)
            real.add_(torch.ones(3))

        deferred_init(build)
        assert real.tolist() == [1.0, 2.0, 3.0]


class TestMemory:
    """A constructor that accesses the memory of a tensor gets it; all tensors that share it are materialized."""

    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    @pytest.mark.parametrize(
        "use",
        [
            lambda t: t[0].data_ptr() - t[1].data_ptr(),
            lambda t: t.untyped_storage().data_ptr() == t.T.untyped_storage().data_ptr(),
            lambda t: t.untyped_storage().tolist(),
            lambda t: t._typed_storage().tolist(),
            lambda t: t.untyped_storage().fill_(0).nbytes(),
            lambda t: t.untyped_storage().copy_(torch.rand_like(t).untyped_storage()).nbytes(),
            lambda t: t.share_memory_().is_shared(),
            lambda t: t.apply_(lambda x: x + 1).shape,
            lambda t: t.map_(torch.rand_like(t), lambda x, y: x + y).shape,
        ],
        ids=["data_ptr", "storage", "tolist", "typed", "fill", "copy", "share", "apply", "map"],
    )
    def test_memory_of_a_tensor_is_used(self, use: Callable[[Tensor], object]) -> None:
        told: list[object] = []

        def build() -> nn.Module:
            module = nn.Linear(4, 4)
            told.append(use(module.weight.detach()))
            return nn.ModuleList([module, nn.Linear(2, 2)])

        assert_defers_exactly(build)
        assert told[0] == told[1]

    @pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
    @pytest.mark.parametrize(
        "copied",
        [
            lambda module: pickle.loads(pickle.dumps(module)),
            lambda module: saved_and_loaded(module, is_new=True),
            lambda module: saved_and_loaded(module, is_new=False),
        ],
        ids=["pickle", "save", "legacy"],
    )
    def test_module_is_copied_by_way_of_a_file(self, copied: Callable[[nn.Module], nn.Module]) -> None:
        def build() -> nn.Module:
            module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            return nn.ModuleList([module, copied(module), nn.Linear(2, 2)])

        assert_defers_exactly(build)

    def test_afterwards_memory_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="This tensor is fake"):
            deferred_init(torch.ones, 2).data_ptr()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_constructor_may_call_compiled_code(backend: str) -> None:
    @torch.compile(backend=backend)
    def scaled(tensor: Tensor) -> Tensor:
        return (tensor * 2 + 1).clamp(-1, 1).t().contiguous()

    assert_tensors_defer_exactly(lambda: [scaled(torch.randn(3, 4)), torch.rand(2)])


@pytest.mark.ci
def test_constructor_may_call_code_compiled_by_inductor() -> None:
    @torch.compile(backend="inductor")
    def noisy(tensor: Tensor) -> Tensor:
        return (tensor * 2 + torch.rand_like(tensor)).sin()

    def build() -> nn.Module:
        first = nn.Linear(4, 4)
        second = nn.Linear(4, 4)
        second.weight = nn.Parameter(noisy(first.weight.detach()))
        return nn.ModuleList([first, second, nn.Linear(2, 2)])

    assert_defers_exactly(build)


@pytest.mark.parametrize(
    "check",
    [
        lambda: torch.linalg.inv(torch.zeros(2, 2).add_(0)),
        lambda: torch.linalg.cholesky(-torch.eye(300)),
        lambda: torch.linalg.solve(torch.zeros(2, 2), torch.ones(2)),
        lambda: torch._assert_async(torch.zeros(1)),
        lambda: torch._assert_async(torch.rand(300) > 2, "no value is that large"),
    ],
    ids=["inv", "cholesky", "solve", "assert", "assert with a message"],
)
def test_operator_that_only_checks_values_raises_where_eager_construction_does(check: Callable[[], object]) -> None:
    torch.manual_seed(0)
    wanted = error_of(check, RuntimeError)
    torch.manual_seed(0)
    assert error_of(lambda: deferred_init(check)) == wanted


def test_operator_that_only_checks_values_keeps_valid_tensors_deferred() -> None:
    def build() -> Tensor:
        positive = torch.rand(300, 300)
        torch._assert_async((positive >= 0).all())
        torch.ops.aten._assert_tensor_metadata(positive, [300, 300])
        return torch.linalg.cholesky(positive @ positive.T + torch.eye(300))

    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    deferred = deferred_init(build)
    assert is_deferred(deferred)
    assert torch.equal(materialize_tensor(deferred), eager)


def test_operator_that_only_checks_values_cannot_look_at_those_of_a_fake_device() -> None:
    with fake_mode(gpu=1):
        inverse = deferred_init(lambda: torch.linalg.inv(torch.eye(4, device="cuda")))
        assert is_deferred(inverse)
        assert inverse.device == torch.device("cuda:0")


def test_kernels_that_run_for_a_composite_output_are_those_of_the_device() -> None:
    """The decomposition for the meta device multiplies booleans, which the kernel rejects."""

    def multiply() -> torch.Tensor:
        mask = torch.ones(3, dtype=torch.bool)
        return torch.matmul(mask, mask, out=torch.empty(0, dtype=torch.bool))

    for run in (multiply, lambda: deferred_init(multiply)):
        with pytest.raises(NotImplementedError, match="\"dot\" not implemented for 'Bool'"):
            run()
