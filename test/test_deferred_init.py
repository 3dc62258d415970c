"""Deferred initialization: what is recorded, and what comes out when it is replayed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch
from common import assert_defers_exactly, assert_same_module, assert_same_tensor, build_both
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_mode, is_fake


def assert_tensors_defer_exactly(fn: Callable[[], object]) -> None:
    """Asserts that the tensors that `fn` returns are the same eagerly and deferred, materialized first to last."""
    eager, deferred = (torch.utils._pytree.tree_leaves(built) for built in build_both(fn))
    assert len(eager) == len(deferred)
    for wanted, found in zip(eager, deferred, strict=True):
        assert is_deferred(found)
        assert materialize_tensor(found) is found
        assert_same_tensor(found, wanted)


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

    def test_device_dependent_code_sees_the_real_device(self) -> None:
        def foo(device: str) -> Tensor:
            a = torch.ones([1], device=device)
            return a if a.is_cuda else a + 1

        with fake_mode(fake_cuda=True):
            on_cuda = deferred_init(foo, "cuda")
        assert on_cuda.is_cuda
        assert materialize_tensor(deferred_init(foo, "cpu")).tolist() == [2.0]

    def test_view_sees_later_write_to_its_base(self) -> None:
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

    def test_tensors_of_zeros_without_memory(self) -> None:
        def build() -> list[Tensor]:
            zeros = torch._efficientzerotensor(3)
            return [zeros + torch.ones(3), zeros * 2]

        for found, wanted in zip(deferred_init(build), build(), strict=True):
            assert torch.equal(materialize_tensor(found), wanted.clone())

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

    def test_long_programs_neither_recurse_nor_keep_garbage(self) -> None:
        def build() -> Tensor:
            a = torch.zeros(1)
            for _ in range(20_000):
                a.add_(1)
            return a

        assert materialize_tensor(deferred_init(build)).item() == 20_000
        deferred_init(build)  # freed without being materialized


class TestState:
    def test_default_dtype_of_the_recording_counts(self) -> None:
        def build() -> list[Tensor]:
            torch.set_default_dtype(torch.float64)
            try:
                return [torch.ones(2), torch.ones(2, dtype=torch.int64) / 3]
            finally:
                torch.set_default_dtype(torch.float32)

        assert_tensors_defer_exactly(build)
        assert torch.get_default_dtype() == torch.float32

    def test_autocast_of_the_recording_counts(self) -> None:
        def build() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.eye(4) @ torch.arange(16.0).view(4, 4).div(3)

        assert deferred_init(build).dtype == torch.bfloat16
        assert_tensors_defer_exactly(build)

    def test_materializing_inside_other_modes_gives_the_same(self) -> None:
        def build() -> Tensor:
            return torch.ones(2, 2) @ torch.full((2, 2), 1 / 3)

        wanted = build()
        for mode in (
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(),
            torch.no_grad(),
            fake_mode(),
            torch.device("meta"),
        ):
            deferred = deferred_init(build)
            with mode:
                materialize_tensor(deferred)
            assert_same_tensor(deferred, wanted)

    def test_materializing_inside_deferred_init(self) -> None:
        def build() -> Tensor:
            return materialize_tensor(torch.arange(3.0))

        tensor = deferred_init(build)
        assert not is_deferred(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0]

    def test_cast_of_a_fake_is_not_in_autocasts_cache_when_it_is_real(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight = deferred_init(lambda: nn.Parameter(torch.ones(2, 2)))
            torch.mm(torch.ones(2, 2), weight)
            materialize_tensor(weight)
            assert not is_fake(torch.mm(torch.ones(2, 2), weight))

    def test_user_mode_decides_what_an_operator_does(self) -> None:
        class AddTen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
                result = func(*args, **(kwargs or {}))
                return result + 10 if func.overloadpacket is torch.ops.aten.mul else result

        def build() -> Tensor:
            with AddTen():  # type: ignore[no-untyped-call]
                return torch.ones(2) * 2

        assert materialize_tensor(deferred_init(build)).tolist() == build().tolist() == [12.0, 12.0]

    def test_default_device_of_the_recording_counts(self) -> None:
        def build() -> Tensor:
            with torch.device("meta"):
                return torch.ones(2)

        assert deferred_init(build).device.type == "meta"

    def test_nests(self) -> None:
        def outer() -> tuple[Tensor, Tensor]:
            inner = deferred_init(torch.ones, 2)
            return inner, torch.zeros(2)

        first, second = deferred_init(outer)
        assert is_deferred(first)
        assert is_deferred(second)
        assert not is_fake(torch.ones(1))

    def test_nests_with_fake_mode(self) -> None:
        def build() -> Tensor:
            with fake_mode():
                a = torch.ones(2)
            return a + torch.ones(2)

        assert materialize_tensor(deferred_init(build)).tolist() == [2.0, 2.0]

    def test_exception_of_the_constructor_is_the_users_own(self) -> None:
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))
                raise LookupError("mine")

        with pytest.raises(LookupError, match="^mine$"):
            deferred_init(Broken)
        assert not is_fake(torch.ones(1))

    def test_two_threads_at_once(self) -> None:
        torch.manual_seed(0)
        wanted = {n: nn.Sequential(*(nn.Linear(n, n) for _ in range(20))) for n in (3, 4)}
        results: dict[int, nn.Module] = {}
        start = threading.Barrier(2)

        def build(n: int) -> None:
            start.wait()
            module = deferred_init(lambda: nn.Sequential(*(nn.Linear(n, n) for _ in range(20))))
            assert is_deferred(module)
            materialize_module(module)
            results[n] = module

        threads = [threading.Thread(target=build, args=(n,)) for n in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, module in results.items():
            assert [p.shape for p in module.parameters()] == [p.shape for p in wanted[n].parameters()]
            assert not is_deferred(module)
        assert len(results) == 2

    def test_deferred_on_one_thread_and_materialized_on_another(self) -> None:
        eager, deferred = build_both(lambda: nn.Linear(5, 5))
        thread = threading.Thread(target=materialize_module, args=(deferred,))
        thread.start()
        thread.join()
        assert_same_module(deferred, eager)


class TestThreads:
    def test_reading_does_not_wait_with_the_interpreters_lock(self) -> None:
        # These are replayed by a kernel in Python, those are read with the interpreter's lock held.
        slow = deferred_init(lambda: [nn.init.trunc_normal_(torch.empty(500, 200), a=-1, b=1) for _ in range(5)])
        read = deferred_init(lambda: [torch.full((), 2) + i for i in range(300)])
        reader = threading.Thread(target=lambda: [torch.zeros(4000)[index] for index in read], daemon=True)
        reader.start()
        materialize_module(nn.ParameterList(slow))
        reader.join(timeout=60)
        assert not reader.is_alive()

    def test_viewing_and_materializing_at_once(self) -> None:
        tensors = deferred_init(lambda: [torch.ones(3) for _ in range(300)])

        def view() -> None:
            for tensor in tensors:
                for _ in range(5):
                    tensor.data  # noqa: B018

        def materialize() -> None:
            for tensor in tensors:
                materialize_tensor(tensor)

        threads = [threading.Thread(target=target) for target in (view, materialize, materialize)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(is_fake(tensor) for tensor in tensors)

    def test_threads_do_not_get_the_same_numbers(self) -> None:
        tensors: list[Tensor] = []

        def draw() -> None:
            tensors.extend(deferred_init(torch.randn, 20) for _ in range(200))

        threads = [threading.Thread(target=draw) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({tuple(materialize_tensor(tensor).tolist()) for tensor in tensors}) == 600


class TestIdentity:
    def test_every_holder_sees_the_real_tensor(self) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        weight = module.weight
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        reference = weakref.ref(weight)
        view, alias = weight[0], weight.data
        grads: list[Tensor] = []
        weight.register_hook(grads.append)

        materialize_module(module)

        assert module.weight is weight
        assert reference() is weight
        assert optimizer.param_groups[0]["params"][0] is weight
        assert not is_fake(view)
        assert not is_fake(alias)
        assert torch.equal(view, weight[0])
        assert torch.equal(alias, weight)
        module(torch.ones(1, 3)).sum().backward()
        before = weight.detach().clone()
        optimizer.step()
        assert len(grads) == 1
        assert not torch.equal(before, weight)

    def test_materialized_tensors_are_ordinary(self) -> None:
        tensor = materialize_tensor(deferred_init(torch.ones, 2, 2))
        assert "Fake" not in str(torch._C._dispatch_keys(tensor))
        assert "DeferredInit" not in str(torch._C._dispatch_keys(tensor))
        assert tensor.data_ptr() != 0
        tensor.resize_(8)
        assert copy.deepcopy(tensor).shape == (8,)
        assert tensor[:4].numpy().tolist() == [1.0, 1.0, 1.0, 1.0]

    def test_parameter_keeps_class_attributes_and_requires_grad(self) -> None:
        class Tagged(nn.Parameter):
            pass

        def build() -> nn.Parameter:
            parameter = Tagged(torch.ones(2), requires_grad=False)
            parameter.tag = "mine"  # type: ignore[attr-defined]
            return parameter

        parameter = materialize_tensor(deferred_init(build))
        assert type(parameter) is Tagged
        assert parameter.tag == "mine"  # type: ignore[attr-defined]
        assert not parameter.requires_grad

    def test_graph_of_autograd_survives(self) -> None:
        def build() -> tuple[Tensor, Tensor]:
            weight = nn.Parameter(torch.arange(3.0))
            return weight, weight.exp().mul(2)

        weight, result = deferred_init(build)
        materialize_tensor(weight)
        materialize_tensor(result)
        result.sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, 2 * torch.arange(3.0).exp())

    def test_saved_and_loaded(self, tmp_path: object) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        materialize_module(module)
        torch.save(module.state_dict(), f"{tmp_path}/state.pt")
        other = nn.Linear(2, 2)
        other.load_state_dict(torch.load(f"{tmp_path}/state.pt"))
        assert_same_tensor(other.weight.detach().clone(), module.weight.detach().clone())

    def test_real_tensor_that_was_given_deferred_data_becomes_real_too(self) -> None:
        real = torch.zeros(1)
        deferred = deferred_init(torch.arange, 3.0)
        real.data = deferred
        assert is_deferred(real)
        materialize_tensor(deferred)
        assert not is_deferred(real)
        assert (real + 1).tolist() == [1.0, 2.0, 3.0]
        assert "Fake" not in str(torch._C._dispatch_keys(real))


class TestAfterConstruction:
    """A deferred tensor carries its key with it: what is done to it later is recorded as well."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: m.half(),
            lambda m: m.to(torch.float64),
            lambda m: m.requires_grad_(False),
            lambda m: setattr(m[1], "weight", m[0].weight),
            lambda m: m[0].weight.data.zero_(),
            lambda m: setattr(m[0].weight, "data", m[1].weight.data * 2),
            lambda m: nn.init.normal_(m[0].weight),
            lambda m: m.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False),
            lambda m: nn.utils.parametrizations.weight_norm(m[0]),
            lambda m: m.append(copy.deepcopy(m[0])),
            lambda m: m.register_buffer("shard", m[0].weight.detach().chunk(2)[1]),
        ],
        ids=[
            "half",
            "to_dtype",
            "freeze",
            "tie",
            "zero_data",
            "set_data",
            "init",
            "load_part",
            "parametrize",
            "deepcopy",
            "shard",
        ],
    )
    def test_change_is_recorded(self, change: Callable[[nn.Module], object]) -> None:
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        eager, deferred = build_both(build)
        state = torch.get_rng_state()
        change(eager)
        torch.set_rng_state(state)
        change(deferred)
        materialize_module(deferred)
        assert_same_module(deferred, eager)

    def test_forward_computes_fakes_and_records_them(self) -> None:
        eager, deferred = build_both(lambda: nn.Linear(3, 2))
        output = deferred(torch.ones(1, 3))
        assert is_deferred(output)
        assert torch.equal(materialize_tensor(output), eager(torch.ones(1, 3)))

    def test_forward_with_fake_input_computes_fakes_that_nobody_can_materialize(self) -> None:
        module = deferred_init(nn.Linear, 3, 2)
        with fake_mode():
            output = module(torch.ones(1, 3))
        assert is_fake(output)
        assert not is_deferred(output)

    def test_backward_computes_fake_gradients(self) -> None:
        module = deferred_init(nn.Linear, 3, 2)
        module(torch.ones(1, 3)).sum().backward()
        assert is_fake(module.weight.grad)


class TestReads:
    """A constructor may look at values."""

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
    def test_read_gives_what_eager_gives(self, read: Callable[[Tensor], object]) -> None:
        def build() -> object:
            return read(torch.arange(4.0))

        assert deferred_init(build) == build()

    def test_results_of_reads_are_deferred_too(self) -> None:
        def build() -> list[Tensor]:
            t = torch.randn(8)
            return [t[t > 0], t.nonzero(), t.unique() * 2]

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
        ],
        ids=["number", "list", "tensor", "as_tensor", "new_tensor", "new_tensor_of_tensor"],
    )
    @pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
    def test_tensors_are_made_from_deferred_values(self, make: Callable[[], Tensor]) -> None:
        assert_tensors_defer_exactly(lambda: [torch.rand(1), make(), torch.rand(1)])

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


class TestModules:
    def test_buffers_are_right(self) -> None:
        class Buffers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("kept", torch.arange(5))
                self.register_buffer("not_kept", torch.linspace(0, 1, 5), persistent=False)
                self.plain = torch.eye(2)
                self.table = {"a": [torch.ones(1), torch.zeros(1)]}

        eager, deferred = build_both(Buffers)
        materialize_module(deferred)
        assert_same_module(deferred, eager)
        assert_same_tensor(deferred.plain, eager.plain)
        assert_same_tensor(deferred.table["a"][0], eager.table["a"][0])

    def test_tied_parameters_stay_tied(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(5, 3)
                self.head = nn.Linear(3, 5, bias=False)
                self.head.weight = self.embedding.weight

        assert_defers_exactly(Tied)

    def test_lazy_module_with_a_dry_run(self) -> None:
        def build() -> nn.Module:
            module = nn.LazyLinear(3)
            module(torch.zeros(1, 4))
            return module

        assert_defers_exactly(build)

    def test_copies_of_a_layer(self) -> None:
        assert_defers_exactly(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3))

    def test_containers_may_contain_themselves(self) -> None:
        tensor = deferred_init(torch.ones, 2)
        table: dict[str, object] = {"tensor": tensor}
        table["self"] = table
        module = nn.Identity()
        module.__dict__["table"] = table
        materialize_module(module)
        assert not is_deferred(tensor)

    def test_buffers_only_leaves_parameters(self) -> None:
        module = deferred_init(nn.BatchNorm1d, 3)
        materialize_module(module, buffers_only=True)
        assert is_deferred(module.weight)
        assert not is_deferred(module.running_mean)

    def test_check_fn_chooses_modules(self) -> None:
        module = deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        materialize_module(module, check_fn=lambda m: m is module[1])
        assert is_deferred(module[0].weight)
        assert not is_deferred(module[1].weight)
        assert is_deferred(module)
        materialize_module(module)
        assert not is_deferred(module)

    def test_materializing_twice_changes_nothing(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        materialize_module(module)
        before = module.weight.detach().clone()
        materialize_module(module)
        assert torch.equal(module.weight, before)


class TestErrors:
    def test_changed_external_tensor_is_named(self) -> None:
        real = torch.ones(2)
        deferred = deferred_init(lambda: torch.zeros(2) + real)
        real.mul_(3)
        with pytest.raises(RuntimeError, match=r"`aten::add.Tensor` was recorded with a real tensor of shape \[2\]"):
            materialize_tensor(deferred)
        assert is_deferred(deferred)

    def test_failed_materialization_leaves_the_module_as_it_was(self) -> None:
        real = torch.ones(2)

        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fine = nn.Parameter(torch.rand(2))
                self.broken = nn.Parameter(torch.zeros(2) + real)

        module = deferred_init(Module)
        real.add_(1)
        with pytest.raises(RuntimeError, match="changed in place since"):
            materialize_module(module)
        assert is_deferred(module.fine)
        assert is_deferred(module.broken)
        with torch.no_grad():
            module.broken.zero_()
            module.broken.data = torch.zeros(2)
        materialize_module(module)
        assert not is_deferred(module)

    def test_materializing_a_real_tensor_is_a_no_op(self) -> None:
        real = torch.ones(2)
        assert materialize_tensor(real) is real

    def test_materializing_a_plain_fake_raises(self) -> None:
        with fake_mode():
            fake = torch.ones(2)
        with pytest.raises(ValueError, match="was not constructed by deferred_init"):
            materialize_tensor(fake)

    def test_wrong_types_are_named(self) -> None:
        with pytest.raises(TypeError, match="takes a tensor or a module, but `obj` is a int"):
            is_deferred(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a tensor, but `tensor` is a Linear"):
            materialize_tensor(nn.Linear(1, 1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a module, but `module` is a Tensor"):
            materialize_module(torch.ones(1))  # type: ignore[arg-type]

    def test_failing_operator_inside_is_the_users_own_error(self) -> None:
        with pytest.raises(RuntimeError, match="must match the size|broadcast"):
            deferred_init(lambda: torch.ones(2) + torch.ones(3))
        assert not is_fake(torch.ones(1))

    def test_write_from_an_unrecorded_fake_cannot_be_materialized(self) -> None:
        with fake_mode():
            fake = torch.ones(2)
        deferred = deferred_init(torch.zeros, 2)
        deferred.copy_(fake)
        with pytest.raises(RuntimeError, match=r"`aten::copy_` was recorded with a fake tensor .* not constructed by"):
            materialize_tensor(deferred)


class TestMemory:
    @staticmethod
    def resident_bytes() -> int:
        return psutil.Process().memory_info().rss

    def test_construction_costs_no_memory(self) -> None:
        before = self.resident_bytes()
        module = deferred_init(nn.Linear, 50_000, 50_000)
        assert module.weight.untyped_storage().nbytes() == 10**10
        assert self.resident_bytes() - before < 2**26

    def test_intermediate_results_are_freed(self) -> None:
        def build() -> Tensor:
            t = torch.ones(2**24)
            for _ in range(30):
                t = t + 1
            return t

        deferred = deferred_init(build)
        before = self.resident_bytes()
        materialize_tensor(deferred)
        assert self.resident_bytes() - before < 4 * 2**26  # four tensors; kept, they would be thirty

    def test_a_thousand_rounds_leave_memory_flat(self) -> None:
        def rounds(count: int) -> None:
            for _ in range(count):
                module = deferred_init(lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
                materialize_module(module)
                deferred_init(nn.Linear, 16, 16)

        rounds(200)
        gc.collect()
        before = self.resident_bytes()
        rounds(1000)
        gc.collect()
        assert self.resident_bytes() - before < 2**21
