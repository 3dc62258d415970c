"""The graph of storage values: its contents after recording, and the results of replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from common import (
    assert_defers_exactly,
    assert_same_tensor,
    assert_tensors_defer_exactly,
)
from torch import Tensor, nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import fake_mode
from torchext.internals.patching import TORCH_RELEASE


class TestSeedExamples:
    """The examples of the design note on fake tensors and deferred module initialization."""

    def test_zeros_like_a_cpu_buffer_materializes_on_the_cpu(self) -> None:
        class MyModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("buf1", torch.ones([3], device="cpu"))
                self.register_buffer("buf2", torch.zeros_like(self.buf1))

        module = deferred_init(MyModule)
        assert materialize_tensor(module.buf1).tolist() == [1.0, 1.0, 1.0]
        assert materialize_tensor(module.buf2).tolist() == [0.0, 0.0, 0.0]
        assert module.buf2.device.type == "cpu"

    def test_device_dependent_code_gets_the_real_device(self) -> None:
        def foo(device: str) -> Tensor:
            a = torch.ones([1], device=device)
            return a if a.is_cuda else a + 1

        with fake_mode(gpu=True):
            on_cuda = deferred_init(foo, "cuda")
        assert on_cuda.is_cuda
        assert materialize_tensor(deferred_init(foo, "cpu")).tolist() == [2.0]

    def test_view_reflects_later_write_to_its_base(self) -> None:
        def build() -> Tensor:
            a = torch.ones([2, 2])
            b = a.view(-1)
            a.add_(2)
            return b

        assert materialize_tensor(deferred_init(build)).tolist() == [3.0, 3.0, 3.0, 3.0]

    def test_dropped_view_that_wrote_to_its_base_counts(self) -> None:
        def build() -> Tensor:
            a = torch.ones(4)
            a.view(2, 2)[0].mul_(5)
            return a

        assert materialize_tensor(deferred_init(build)).tolist() == [5.0, 5.0, 1.0, 1.0]


class TestGraph:
    def test_copy_keeps_the_value_that_it_saw(self) -> None:
        def build() -> tuple[Tensor, Tensor]:
            a = torch.ones(2)
            b = a.clone()
            a.fill_(7)
            return a, b

        for first, second in ((0, 1), (1, 0)):
            pair = deferred_init(build)
            materialize_tensor(pair[first])
            materialize_tensor(pair[second])
            assert (pair[0].tolist(), pair[1].tolist()) == ([7.0, 7.0], [1.0, 1.0])

    def test_two_deferred_readers_of_one_overwritten_base(self) -> None:
        def build() -> list[Tensor]:
            a = torch.arange(4.0)
            results = [a * 2]
            a[1:].add_(10)
            results.append(a.flip(0))
            a.data = torch.zeros(2)
            results.append(a)
            return results

        assert_tensors_defer_exactly(build)

    def test_chunks_share_the_storage_of_the_whole(self) -> None:
        def build() -> list[Tensor]:
            whole = torch.zeros(6)
            parts = list(whole.chunk(3))
            nn.init.normal_(parts[1])
            return [*parts, whole]

        *parts, whole = deferred_init(build)
        materialize_tensor(whole)
        assert not any(is_deferred(part) for part in parts)
        parts[2].fill_(3)
        assert whole[4:].tolist() == [3.0, 3.0]

    def test_expanded_and_strided_views(self) -> None:
        def build() -> list[Tensor]:
            row = torch.arange(3.0)
            grid = row.expand(2, 3)
            strided = torch.zeros(4, 4).as_strided((2, 2), (5, 1), 1)
            strided.add_(grid[:, :2])
            return [grid, strided]

        assert_tensors_defer_exactly(build)

    def test_out_argument_is_written(self) -> None:
        def build() -> Tensor:
            out = torch.empty(3)
            torch.add(torch.ones(3), torch.arange(3.0), out=out)
            return out

        assert_tensors_defer_exactly(build)

    def test_operator_with_several_outputs(self) -> None:
        def build() -> list[Tensor]:
            values, indices = torch.tensor([3.0, 1.0, 2.0]).sort()
            q, r = torch.linalg.qr(torch.arange(9.0).view(3, 3) + torch.eye(3))
            return [values, indices, q, r]

        assert_tensors_defer_exactly(build)

    def test_one_of_several_outputs_alone(self) -> None:
        def build() -> Tensor:
            return torch.tensor([3.0, 1.0, 2.0]).sort()[1]

        assert_tensors_defer_exactly(build)

    def test_lists_of_tensors_are_arguments(self) -> None:
        def build() -> list[Tensor]:
            parts = [torch.ones(2), torch.arange(2.0)]
            torch._foreach_add_(parts, 1.0)
            return [torch.cat(parts), torch.stack(parts)]

        assert_tensors_defer_exactly(build)

    def test_advanced_indexing_writes(self) -> None:
        def build() -> Tensor:
            tensor = torch.zeros(4, 4)
            tensor[torch.tensor([0, 2]), torch.tensor([1, 3])] = torch.tensor([5.0, 6.0])
            tensor[tensor > 5] = -1.0
            tensor[1] = 2
            return tensor

        assert_tensors_defer_exactly(build)

    def test_resize_and_set(self) -> None:
        def build() -> list[Tensor]:
            a = torch.arange(4.0)
            a.resize_(2)
            b = torch.empty(0).set_(torch.ones(3))
            c = torch.arange(6.0).view(2, 3)
            c.t_()
            return [a, b, c]

        assert_tensors_defer_exactly(build)

    def test_growing_a_storage(self) -> None:
        def build() -> Tensor:
            a = torch.arange(4.0)
            a.resize_(8)
            a[4:] = 1
            return a

        assert_tensors_defer_exactly(build)

    def test_conjugate_views(self) -> None:
        def build() -> list[Tensor]:
            z = torch.complex(torch.arange(3.0), torch.ones(3))
            conjugate = z.conj()
            z.imag.mul_(2)
            return [conjugate.resolve_conj(), (conjugate * 1j).real.clone(), z]

        assert_tensors_defer_exactly(build)

    def test_running_statistics_that_no_schema_declares_are_written(self) -> None:
        def build() -> nn.Module:
            module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
            module(torch.randn(8, 3) + 3)
            return module

        assert_defers_exactly(build)

    def test_out_argument_that_is_resized_keeps_the_order_of_its_values(self) -> None:
        def build() -> Tensor:
            return torch.add(torch.arange(6.0).view(2, 3).t(), 0, out=torch.empty(0))

        assert torch.equal(materialize_tensor(deferred_init(build)), build())

    @pytest.mark.parametrize("factor", [-1.0, float("inf"), float("nan")])
    def test_products_with_zeros_without_memory_stay_such_zeros(self, factor: float) -> None:
        def build() -> list[Tensor]:
            zeros, factors = torch._efficientzerotensor(3), torch.full((3,), factor)
            products = [zeros * factors, zeros * factor, zeros / factors, zeros.view(3, 1) * factors]
            products += [torch.ops.aten.mul.Scalar(zeros, factor), zeros.dot(factors), factors.vdot(zeros)]
            return [
                *products,
                zeros,
                zeros + factors,
                zeros.clone() * factors,
                factors.clone().copy_(zeros),
                zeros.sin(),
            ]

        for found, wanted in zip(deferred_init(build), build(), strict=True):
            assert_same_tensor(materialize_tensor(found), wanted, strictly=False)
            assert found._is_zerotensor() == wanted._is_zerotensor()

    @pytest.mark.parametrize("operator", ["add_", "copy_", "fill_"])
    def test_zeros_without_memory_are_immutable(self, operator: str) -> None:
        def build() -> Tensor:
            return getattr(torch._efficientzerotensor(3), operator)(torch.ones(()))

        for call in (build, lambda: deferred_init(build)):
            with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
                call()

    def test_tangents_that_are_zero_hide_infinities_and_nans(self) -> None:
        def build() -> tuple[Tensor, Tensor]:
            x = torch.tensor([float("inf"), float("nan"), -1.0]).clone()
            gradient = torch.func.grad(lambda x: (x[0] * x[1].detach() + x[2].exp()).sum())
            return torch.func.jvp(gradient, (x,), (x,))[1], torch.func.hessian(lambda x: x.prod())(x.clone())

        for found, wanted in zip(deferred_init(build), build(), strict=True):
            assert_same_tensor(materialize_tensor(found), wanted, strictly=False)

    def test_argument_that_is_passed_twice_is_one_tensor(self) -> None:
        """`native_multi_head_attention_cpu()` multiplies query, key and value together if they are one tensor."""

        def attend() -> Tensor:
            module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
            x = torch.randn(2, 3, 8)
            with torch.no_grad():
                output: Tensor = module(x, x, x)[0]
            return output

        assert_tensors_defer_exactly(attend)

    @pytest.mark.parametrize("count", [2, 20])
    def test_kernels_see_which_arguments_are_one_tensor(self, count: int) -> None:
        with torch.library._scoped_library("torchext_test", "DEF") as library:
            library.define("count_different(Tensor[] tensors) -> Tensor")
            library.impl("count_different", lambda tensors: torch.tensor(len({id(t) for t in tensors})), "CPU")
            library.impl("count_different", lambda tensors: torch.empty((), dtype=torch.int64, device="meta"), "Meta")

            def build() -> Tensor:
                tensors = [torch.ones(2) for _ in range(count)]
                result: Tensor = torch.ops.torchext_test.count_different([*tensors, *tensors, tensors[0].detach()])
                return result

            assert materialize_tensor(deferred_init(build)) == build() == count + 1

    def test_outputs_that_are_resized_are_warned_of_once(self) -> None:
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            tensor = deferred_init(lambda: torch.add(torch.ones(3), 1, out=torch.empty(8)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert materialize_tensor(tensor).tolist() == [2, 2, 2]

    def test_likeness_does_not_depend_on_values(self) -> None:
        real = torch.ones(2)
        deferred = deferred_init(torch.zeros_like, real)
        real.add_(1)
        assert materialize_tensor(deferred).tolist() == [0.0, 0.0]

    def test_memory_shared_with_numpy_is_not_trusted(self) -> None:
        array = np.ones(3, dtype=np.float32)
        deferred = deferred_init(lambda: torch.zeros(3) + torch.from_numpy(array))
        array[:] = 7
        assert materialize_tensor(deferred).tolist() == [1.0, 1.0, 1.0]

    @pytest.mark.parametrize("number", [2, 2**62 + 1, 2.5, float("nan"), -0.0, True, 1.5 + 2j], ids=repr)
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str)
    def test_python_numbers_promote_as_they_do_eagerly(self, number: complex, dtype: torch.dtype) -> None:
        def build() -> list[Tensor]:
            tensor = torch.ones(3, dtype=dtype)
            return [tensor + number, number * tensor.to(torch.float32), tensor.eq(number), tensor[0] * number]

        if dtype is torch.bfloat16 and isinstance(number, complex) and TORCH_RELEASE >= (2, 14):
            pytest.skip("promotes to complex bfloat16, for which PyTorch has no addition yet")
        assert_tensors_defer_exactly(build)

    def test_long_programs_neither_recurse_nor_keep_garbage(self) -> None:
        def build() -> Tensor:
            a = torch.zeros(1)
            for _ in range(20_000):
                a.add_(1)
            return a

        assert materialize_tensor(deferred_init(build)).item() == 20_000
        deferred_init(build)  # freed without being materialized


def write_into_input(reduce: Callable[..., object], *args: object) -> Tensor:
    x = torch.randn(4, 3)
    reduce(x, *args, out=x)
    return x


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.nansum])
@pytest.mark.parametrize("args", [(0,), (1, True)], ids=["a dimension that goes", "a dimension that stays"])
def test_out_that_is_the_input_is_read_by_its_new_shape(
    reduce: Callable[..., object], args: tuple[object, ...]
) -> None:
    assert_tensors_defer_exactly(lambda: write_into_input(reduce, *args))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_two_results_of_which_one_is_the_input() -> None:
    def construct() -> tuple[Tensor, Tensor]:
        x, indices = torch.randn(5), torch.empty(0, dtype=torch.long)
        torch.max(x, 0, out=(x, indices))
        return x, indices

    assert_tensors_defer_exactly(construct)


def test_view_that_autograd_forbids_to_use_is_materialized() -> None:
    def construct() -> tuple[Tensor, Tensor]:
        base = torch.zeros(3)
        with torch.no_grad():
            view = base.view(3)
        base.add_(torch.ones(3, requires_grad=True))
        return base, view

    _, view = deferred_init(construct)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        view.is_leaf  # noqa: B018
    assert materialize_tensor(view).tolist() == [1.0, 1.0, 1.0]
