"""Devices of materialized tensors, progress reports, and the state after a failure."""

from __future__ import annotations

import collections
import functools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import forked
import pytest
import torch
from common import BuiltOn, assert_same_module, assert_same_tensor, build_both, too_large_to_copy
from torch import Tensor, nn

from torchext import _C
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_mode, is_fake


class Model(nn.Module):
    """One of everything: ties, buffers of several dtypes, an integer parameter, plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.lookup = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("phases", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
        self.plain = torch.linspace(0, 1, 5)


def pieces() -> list[Tensor]:
    """A tensor, views of it, and an alias."""
    whole = torch.rand(6, 4)
    return [whole, whole[2:4], whole.t(), whole.detach(), whole.view(-1)[5:]]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda)])
def other_device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestDtype:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_module_equals_the_converted_eager_one(self, dtype: torch.dtype) -> None:
        eager, deferred = build_both(Model)
        del eager.phases, deferred.phases
        materialize_module(deferred, dtype=dtype)
        same_but_versions(deferred, eager.to(dtype))
        assert not is_deferred(deferred)

    def test_complex_dtype_and_complex_tensors(self) -> None:
        eager, deferred = build_both(Model)
        materialize_module(deferred, dtype=torch.complex128)
        with pytest.warns(UserWarning, match="Complex modules are a new feature"):
            eager.to(torch.complex128)
        same_but_versions(deferred, eager)

    def test_integers_and_plain_attributes_keep_their_dtype(self) -> None:
        module = deferred_init(Model)
        del module.phases
        materialize_module(module, dtype=torch.float16)
        assert module.lookup.dtype == module.norm.num_batches_tracked.dtype == torch.int64
        assert module.plain.dtype == torch.float32
        assert module.norm.running_mean.dtype == torch.float16

    def test_recorded_dtype_is_the_plain_way(self) -> None:
        eager, deferred = build_both(lambda: nn.Linear(3, 3))
        materialize_module(deferred, dtype=torch.float32, device="cpu")
        assert_same_module(deferred, eager)

    def test_views_and_aliases_keep_sharing(self) -> None:
        eager, deferred = build_both(pieces)
        materialize_tensor(deferred[1], dtype=torch.float64)
        assert not any(is_deferred(tensor) for tensor in deferred)
        for found, wanted in zip(deferred, eager, strict=True):
            assert found.dtype == torch.float64
            assert found.stride() == wanted.stride()
            assert torch.equal(found, wanted.double())
        deferred[0].fill_(3)
        assert all((tensor == 3).all() for tensor in deferred)

    def test_conjugate_views_are_converted(self) -> None:
        def build() -> list[Tensor]:
            z = torch.complex(torch.arange(3.0), torch.ones(3))
            return [z, z.conj()]

        z, conjugate = deferred_init(build)
        materialize_tensor(z, dtype=torch.complex128)
        assert torch.equal(conjugate.resolve_conj(), build()[1].to(torch.complex128))

    def test_views_of_another_dtype_forbid_it_before_anything_changes(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fine = nn.Parameter(torch.rand(2))
                self.weight = nn.Parameter(torch.rand(4, 4))
                self.bits = self.weight.data.view(torch.int32)

        module = deferred_init(Mixed)
        with pytest.raises(ValueError, match=r"\[4, 4\] and dtype Float shares its memory .* and dtype Int, so it"):
            materialize_module(module, dtype=torch.float16)
        assert is_deferred(module.fine)
        assert is_deferred(module.weight)
        materialize_module(module)
        assert not is_deferred(module)

    def test_dtype_that_modules_cannot_have_is_refused(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        with pytest.raises(TypeError, match="`dtype` was expected to be floating point or complex, but it is Int"):
            materialize_module(module, dtype=torch.int32)
        assert is_deferred(module.weight)

    def test_inference_tensors_stay_inference_tensors(self) -> None:
        with torch.inference_mode():
            tensor = deferred_init(torch.ones, 3)
            view = tensor[1:]
        materialize_tensor(tensor, dtype=torch.float64)
        assert tensor.is_inference()
        assert view.is_inference()
        assert view.tolist() == [1.0, 1.0]

    def test_real_tensor_with_deferred_data_is_converted_on_request(self) -> None:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(1))
        module.weight.data = deferred_init(torch.arange, 3.0)
        materialize_module(module, dtype=torch.float64)
        assert module.weight.dtype == torch.float64
        assert module.weight.tolist() == [0.0, 1.0, 2.0]

    def test_real_tensor_with_deferred_data_stays_deferred_by_default(self) -> None:
        real = torch.zeros(1)
        deferred = deferred_init(torch.arange, 3.0)
        real.data = deferred
        materialize_tensor(deferred, dtype=torch.float64)
        assert is_deferred(real)
        assert materialize_tensor(real).tolist() == [0.0, 1.0, 2.0]
        assert real.dtype == torch.float32


class TestIdentity:
    def test_every_holder_gets_the_converted_tensor(self) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        weight, view, alias = module.weight, module.weight[0], module.weight.data
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        grads: list[Tensor] = []
        weight.register_hook(grads.append)

        materialize_module(module, dtype=torch.float64)

        assert module.weight is weight
        assert optimizer.param_groups[0]["params"][0] is weight
        assert view.dtype == alias.dtype == torch.float64
        assert alias.data_ptr() == view.data_ptr() == weight.data_ptr()
        module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        before = weight.detach().clone()
        optimizer.step()
        assert grads[0].dtype == torch.float64
        assert not torch.equal(before, weight)

    def test_gradients_accumulate_though_the_accumulator_had_been_made(self) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        module(torch.ones(1, 3)).sum().backward()  # makes the node, and a deferred gradient
        module.zero_grad()
        materialize_module(module, dtype=torch.float64)
        module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert module.weight.grad.dtype == torch.float64

    def test_deferred_gradient_goes_with_its_parameter(self) -> None:
        module = deferred_init(nn.Linear, 3, 1)
        module(torch.ones(1, 3)).sum().backward()
        grad = module.weight.grad
        materialize_module(module, dtype=torch.float64)
        assert module.weight.grad is grad
        assert grad.dtype == torch.float64
        assert grad.tolist() == [[1.0, 1.0, 1.0]]

    def test_buffers_only_and_check_fn_choose(self) -> None:
        module = deferred_init(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
        materialize_module(module, buffers_only=True, check_fn=lambda m: m is module[1], dtype=torch.float64)
        assert is_deferred(module[0].running_mean)
        assert is_deferred(module[1].weight)
        assert module[1].running_mean.dtype == torch.float64

    def test_real_tensors_are_unchanged(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        materialize_tensor(module.weight)
        materialize_module(module, dtype=torch.float64)
        assert module.weight.dtype == torch.float32
        assert module.bias.dtype == torch.float64


class TestDevice:
    def test_meta_is_refused(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        with pytest.raises(ValueError, match="cannot be materialized on the device `meta`, where they have no values"):
            materialize_module(module, device="meta")
        assert is_deferred(module.weight)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    @pytest.mark.parametrize("is_faked", [False, True], ids=["absent", "faked"])
    def test_device_that_does_not_exist_is_refused(self, is_faked: bool) -> None:
        module = deferred_init(nn.Linear, 2, 2)

        def move() -> None:
            materialize_module(module, device="cuda")

        def move_under_fake_cuda() -> None:
            with fake_mode(gpu=True):
                move()

        with pytest.raises(ValueError, match="cannot be materialized on cuda, because this machine has no CUDA device"):
            (move_under_fake_cuda if is_faked else move)()
        assert is_deferred(module.weight)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    @pytest.mark.parametrize(
        "build",
        [
            lambda: torch.rand(3, device="cuda"),
            lambda: torch.rand(3, device="cuda").cpu(),
            lambda: torch.ones(3).to("cuda"),
            lambda: torch.zeros_like(torch.ones(3, device="cuda")),
        ],
        ids=["factory", "moved_away", "moved_there", "like"],
    )
    @pytest.mark.parametrize("device", [None, "cpu"], ids=["as_recorded", "on_cpu"])
    def test_recording_on_fake_cuda_gives_the_reason_why_it_cannot_be_computed(
        self, build: Callable[[], Tensor], device: str | None
    ) -> None:
        with fake_mode(gpu=True):
            tensor = deferred_init(build)
        with pytest.raises(RuntimeError, match=r"`aten::.*` was recorded on cuda.*, but this machine has no CUDA dev"):
            materialize_tensor(tensor, device=device)
        assert is_deferred(tensor)

    def test_module_lands_there_with_the_bits_of_the_recorded_device(self, other_device: str) -> None:
        eager, deferred = build_both(Model)
        weight, view = deferred.head.weight, deferred.head.weight[1:]
        optimizer = torch.optim.SGD(deferred.parameters(), lr=0.1)
        materialize_module(deferred, device=other_device)
        same_but_versions(deferred, eager.to(other_device), cpu=True)
        assert deferred.head.weight is weight
        assert any(parameter is weight for parameter in optimizer.param_groups[0]["params"])
        assert view.device.type == other_device
        assert view.data_ptr() == weight[1:].data_ptr()
        assert deferred.plain.device.type == "cpu"

    def test_module_is_moved_and_converted_at_once(self, other_device: str) -> None:
        eager, deferred = build_both(lambda: nn.Linear(5, 5))
        materialize_module(deferred, device=other_device, dtype=torch.bfloat16)
        same_but_versions(deferred, eager.to(other_device, torch.bfloat16), cpu=True)

    def test_moved_parameters_train(self, other_device: str) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        module(torch.ones(1, 3)).sum().backward()  # makes the nodes that accumulate gradients, for the CPU
        module.zero_grad()
        materialize_module(module, device=other_device)
        optimizer = torch.optim.AdamW(module.parameters())
        before = module.weight.detach().clone()
        with torch.autocast(other_device, dtype=torch.bfloat16):
            output = module(torch.ones(1, 3, device=other_device))
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        optimizer.step()
        assert not torch.equal(before, module.weight)

    def test_the_recorded_device_by_another_name_copies_nothing(self, other_device: str) -> None:
        tensor = deferred_init(torch.ones, 3, device=other_device)
        storage = tensor.untyped_storage()._cdata
        materialize_tensor(tensor, device=other_device)
        assert tensor.untyped_storage()._cdata == storage
        assert tensor.tolist() == [1.0, 1.0, 1.0]

    def test_tensors_recorded_there_come_to_the_cpu(self, other_device: str) -> None:
        tensor = deferred_init(torch.arange, 3.0, device=other_device)
        assert materialize_tensor(tensor, device="cpu").numpy().tolist() == [0.0, 1.0, 2.0]


class TestFailure:
    def test_computed_tensors_are_real_and_the_rest_is_deferred(self) -> None:
        outside = too_large_to_copy()
        module = deferred_init(BuiltOn, outside)
        first, last = _C.evaluate(module.first).double(), _C.evaluate(module.last).double()
        outside.add_(1)
        with pytest.raises(RuntimeError, match="changed in place since"):
            materialize_module(module, dtype=torch.float64)
        assert torch.equal(module.first, first)
        assert is_deferred(module.broken)
        assert is_deferred(module.last)
        del module.broken
        materialize_module(module, dtype=torch.float64)
        assert torch.equal(module.last, last)

    def test_plain_fake_is_found_before_anything_changes(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        with fake_mode():
            module.register_buffer("fake", torch.ones(1))
        with pytest.raises(ValueError, match="was not constructed by deferred_init"):
            materialize_module(module, dtype=torch.float64)
        assert is_deferred(module.weight)
        assert is_fake(module.fake)


class TestMemory:
    @pytest.mark.ci
    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
    @pytest.mark.parametrize(
        "materialize",
        ["materialize_module(module, dtype=torch.float16)", "materialize_module(module.half())"],
        ids=["converted", "recorded_conversion"],
    )
    def test_memory_holds_one_tensor_twice_at_most(self, materialize: str) -> None:
        code = f"""
import resource, torch
from torch import nn
from torchext.deferred_init import deferred_init, materialize_module
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def build(): return nn.ParameterList(torch.ones(2**22) for _ in range(12))
module = deferred_init(nn.Linear, 2, 2)
{materialize}
before = peak()
module = deferred_init(build)
{materialize}
print((peak() - before) / 2**20)
"""
        # A fork maps pages of libraries on first use, which would count here.
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert float(result.stdout) < 12 * 8 + 16 + 8 + 16  # all in half, one in float, one copy, and some more


class TestProgress:
    @pytest.fixture
    def bars(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Return a mock of progress bars that counts."""
        tqdm = pytest.importorskip("tqdm.auto", reason="tqdm is not installed")
        shown: list[Any] = []

        class Bar:
            def __init__(self, total: int, **kwargs: object) -> None:
                self.total, self.done, self.calls = total, 0, 0
                shown.append(self)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *args: object) -> None:
                pass

            def update(self, nbytes: int) -> None:
                self.done += nbytes
                self.calls += 1

        monkeypatch.setattr(tqdm, "tqdm", Bar)
        return shown

    @pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as_recorded", "converted"])
    def test_counts_the_bytes_that_become_real(self, bars: list[Any], dtype: torch.dtype | None) -> None:
        module = deferred_init(Model)
        del module.phases
        materialize_tensor(module.head.bias)
        becoming_real = [*module.parameters(), *module.buffers(), module.plain]
        nbytes = sum(tensor.nbytes for tensor in becoming_real) - module.head.bias.nbytes
        materialize_module(module, dtype=dtype, progress=True)
        assert [(bar.done, bar.total, bar.calls) for bar in bars] == [(nbytes, nbytes, 8)]

    def test_lazy_parameters_are_counted(self, bars: list[Any]) -> None:
        module = deferred_init(nn.LazyLinear, 3)
        materialize_module(module, dtype=torch.float64, progress=True)
        assert [(bar.done, bar.total, bar.calls) for bar in bars] == [(0, 0, 2)]
        assert module(torch.ones(1, 4, dtype=torch.float64)).shape == (1, 3)

    def test_nothing_is_shown_by_default(self, bars: list[Any]) -> None:
        materialize_module(deferred_init(Model))
        assert not bars

    def test_interrupting_leaves_everything_as_it_was(self, bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        import tqdm.auto

        def interrupt(bar: object, nbytes: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(tqdm.auto.tqdm, "update", interrupt)
        module = deferred_init(nn.Linear, 2, 2)
        with pytest.raises(KeyboardInterrupt):
            materialize_module(module, progress=True)
        assert is_deferred(module.weight)

    def test_missing_tqdm_names_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
        module = deferred_init(nn.Linear, 2, 2)
        with pytest.raises(ImportError, match="pip install tqdm"):
            materialize_module(module, progress=True)
        assert is_deferred(module.weight)
        materialize_module(module)


def same_but_versions(actual: nn.Module, expected: nn.Module, cpu: bool = False) -> None:
    """Assert equal tensors, ignoring versions, which differ between `Module.to()` and `materialize_module()`."""
    found, wanted = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers(remove_duplicate=False))}
        for m in (actual, expected)
    )
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.device == wanted[name].device
        sides = [t.detach().cpu() if cpu else t for t in (tensor, wanted[name])]
        assert_same_tensor(sides[0], sides[1], name, strictly=False)
    assert len({id(t) for t in found.values()}) == len({id(t) for t in wanted.values()})


class Schedule:
    """Holds tensors in slots and in attributes."""

    __slots__ = ("__dict__", "betas", "unset")

    def __init__(self) -> None:
        self.betas = torch.linspace(0, 1, 4)
        self.owner: object = self


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self) -> Tensor:
        return self.tensor


class LooksLikeNothing:
    """Raises when its class is read, like an unbound proxy."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not bound")


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


class OfUnhashableClass(metaclass=Unhashable):
    pass


class WithoutReadableDict:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not readable")


class ListOfItsOwn(list[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        raise RuntimeError("iterated")


class DictOfItsOwn(dict[str, Tensor]):
    def values(self) -> Any:
        raise RuntimeError("iterated")


class TestTensorsInOtherObjects:
    """A model may hold tensors in objects that are neither modules nor containers."""

    @pytest.mark.parametrize(
        "hold",
        [
            lambda t: torch.distributions.Normal(t, torch.ones(2)),
            lambda t: {"sampler": [types.SimpleNamespace(table={"t": t})]},
            lambda t: functools.partial(torch.add, t),
            lambda t: lambda x: x + t,
            lambda t: Holder(t).read,
            lambda t: collections.deque([t]),
            lambda t: types.SimpleNamespace(inner=types.SimpleNamespace(t=t)),
            lambda t: [nn.ParameterList([t])],
        ],
        ids=["distribution", "nested", "partial", "closure", "method", "deque", "namespace", "hidden_module"],
    )
    def test_materializes_tensors_in_objects(self, hold: Callable[[Tensor], object]) -> None:
        tensor = None

        def build() -> nn.Module:
            nonlocal tensor
            module = nn.Sequential(nn.Linear(2, 2))
            tensor = torch.randn(2)
            module[0].held = hold(tensor)  # type: ignore[assignment]
            return module

        module = deferred_init(build)
        assert is_fake(tensor)  # type: ignore[arg-type]
        materialize_module(module)
        assert not is_fake(tensor)  # type: ignore[arg-type]

    @pytest.mark.parametrize("cls", [LooksLikeNothing, OfUnhashableClass, WithoutReadableDict])
    def test_calls_no_code_of_objects(self, cls: type) -> None:
        def build() -> nn.Module:
            module = nn.Linear(2, 2)
            module.held = [cls()]  # type: ignore[assignment]
            return module

        module = deferred_init(build)
        materialize_module(module)
        assert not is_fake(module.weight)

    @pytest.mark.parametrize("hold", [lambda t: ListOfItsOwn([t]), lambda t: DictOfItsOwn(t=t)], ids=["list", "dict"])
    def test_materializes_tensors_in_containers_with_custom_iteration(self, hold: Callable[[Tensor], object]) -> None:
        self.test_materializes_tensors_in_objects(hold)

    def test_materializes_slots_and_attributes_of_tensors(self) -> None:
        def build() -> nn.Module:
            module = nn.Linear(2, 2)
            module.schedule = Schedule()  # type: ignore[assignment]
            module.weight.scale = torch.ones(2)  # type: ignore[attr-defined]
            return module

        module = deferred_init(build)
        materialize_module(module)
        assert not is_fake(module.schedule.betas)
        assert not is_fake(module.weight.scale)

    def test_parent_that_a_child_refers_to_stays_deferred(self) -> None:
        def build() -> nn.Module:
            module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            module[0].parent = [module]  # type: ignore[assignment]
            return module

        child, sibling = deferred_init(build).children()
        materialize_module(child)
        assert not is_deferred(child)
        assert is_deferred(sibling)

    def test_fakes_in_other_objects_are_left_alone(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        with fake_mode():
            module.other = types.SimpleNamespace(t=torch.ones(2))  # type: ignore[assignment]
        materialize_module(module)
        assert is_fake(module.other.t)


def test_other_threads_may_query_fakes_during_materialization() -> None:
    """Threads that hold the GIL wait for the lock of storages, and vice versa."""
    program = """if True:
        import faulthandler, threading, torch
        from torchext.deferred_init import deferred_init, is_deferred, materialize_module

        faulthandler.dump_traceback_later(120, exit=True)
        model = deferred_init(lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(200)]))
        other = deferred_init(torch.ones, 2)
        views = [[parameter.detach() for _ in range(20)] for parameter in model.parameters()]
        done = threading.Event()

        def ask():
            while not done.is_set():
                is_deferred(other)
                other.detach()

        thread = threading.Thread(target=ask)
        thread.start()
        materialize_module(model, dtype=torch.float64)
        done.set()
        thread.join()
    """
    ended = forked.run([sys.executable, "-c", program])
    assert ended.returncode == 0, ended.stderr
