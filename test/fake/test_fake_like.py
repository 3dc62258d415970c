"""`fake_like`: the properties of tensors, modules, optimizers and containers that copies to fakes keep."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from comparisons import PROPERTIES, metadata
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from torchext.deferred_init import deferred_init, is_deferred
from torchext.fake import fake_like, fake_mode, is_fake, meta_like

Pair = namedtuple("Pair", ["first", "second"])

KEPT = PROPERTIES | {"storage_offset", "storage_size"}


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Model(nn.Module):
    """Holds tensors in all the places where modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("passing", torch.ones(4), persistent=False)
        self.plain = torch.ones(2)
        self.hidden = [{"row": self.kept[1:]}, (self.plain, 3)]
        self.first.weight.tag = "tied"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.kept


class Tagged(torch.Tensor):
    """A subclass without behavior."""


class TestTensors:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.ones(3, 4),
            lambda: torch.ones(3, 4, requires_grad=True),
            lambda: torch.ones(3, 4).t(),
            lambda: torch.ones(3, 4)[1:, ::2],
            lambda: torch.ones(6).expand(2, 6),
            lambda: torch.ones(()),
            lambda: torch.ones(0, 3),
            lambda: torch.ones(3, dtype=torch.complex64).conj(),
            lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
            lambda: torch.ones(4).view(torch.int16),
            lambda: torch.empty(8).as_strided((2, 2), (1, 1), 3),
            lambda: torch.ones(4, device="meta"),
            lambda: nn.Parameter(torch.ones(2)),
            lambda: nn.Parameter(torch.ones(2), requires_grad=False),
            lambda: nn.Parameter(torch.ones(4)[1:]),
            lambda: torch.ones(4).as_subclass(Tagged),
            lambda: torch.ones(4).as_subclass(Tagged)[1:],
            lambda: torch.ones(4, requires_grad=True)[1:],
        ],
        ids=[
            "plain",
            "requires_grad",
            "transposed",
            "sliced",
            "expanded",
            "scalar",
            "empty",
            "conjugated",
            "negated",
            "dtype-view",
            "overlapping",
            "meta",
            "parameter",
            "frozen-parameter",
            "parameter-on-a-view",
            "subclass",
            "view-of-subclass",
            "view-that-requires-grad",
        ],
    )
    def test_metadata_is_kept(self, make: Callable[[], torch.Tensor]) -> None:
        real = make()
        before = (metadata(real, KEPT), is_fake(real), real._version)
        for fake in (fake_like(real), fake_like([real])[0]):
            assert is_fake(fake)
            assert fake.is_leaf
            assert metadata(fake, KEPT) == metadata(real, KEPT)
        assert (metadata(real, KEPT), is_fake(real), real._version) == before

    def test_fake_of_a_fake_is_another(self) -> None:
        fake = fake_like(torch.ones(3, 4).t())
        again = fake_like(fake)
        assert is_fake(again)
        assert metadata(again, KEPT) == metadata(fake, KEPT)
        assert storage_id(again) != storage_id(fake)

    def test_fake_of_a_deferred_tensor_is_not_deferred(self) -> None:
        deferred = deferred_init(torch.ones, 3)
        fake, module = fake_like(deferred), fake_like(deferred_init(nn.Linear, 2, 2))
        assert is_fake(fake)
        assert not is_deferred(fake)
        assert not is_deferred(module)
        assert is_deferred(deferred)

    def test_inside_deferred_init_fakes_are_not_deferred(self) -> None:
        real = [torch.ones(3), torch.ones(4)[1:]]
        fakes = deferred_init(lambda: fake_like(real, device="cpu"))
        assert not any(map(is_deferred, fakes))

    def test_results_of_operators_become_leaves(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        result = weight * 2
        result.retain_grad()
        result.sum().backward()
        fake = fake_like(result)
        assert fake.is_leaf
        assert fake.requires_grad
        assert is_fake(fake.grad)

    def test_gradients_are_fake(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        (weight * 2).sum().backward()
        fake = fake_like(weight)
        assert is_fake(fake.grad)
        assert fake.grad.shape == (3,)
        (fake * 2).sum().backward()

    def test_attributes_are_copied(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        weight.shards = [torch.ones(2)]
        weight.owner = weight
        fake = fake_like(weight)
        assert is_fake(fake.shards[0])
        assert fake.owner is fake
        assert not is_fake(weight.shards[0])

    def test_slots_are_copied(self) -> None:
        class Slotted(torch.Tensor):
            __slots__ = ("scale",)

        real = torch.ones(3).as_subclass(Slotted)
        real.scale = torch.ones(1)
        fake = fake_like(real)
        assert type(fake) is Slotted
        assert is_fake(fake.scale)

    def test_wrappers_are_rewrapped(self) -> None:
        first = torch.ones(3)
        fake, alias = fake_like((TwoTensor(first, torch.zeros(3)), first))
        assert type(fake) is TwoTensor
        assert fake.a is alias
        assert is_fake(fake.b)
        assert type(fake + 1) is TwoTensor
        assert is_fake((fake + 1).a)

    def test_returns_arguments_for_meta_like(self) -> None:
        assert meta_like(fake_like(torch.ones(3, 4).t())).stride() == (1, 4)

    def test_is_hidden_from_modes(self) -> None:
        class Record(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        class RecordDispatch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        real = {"view": torch.ones(4)[1:], "weight": nn.Parameter(torch.ones(2))}
        seen: list[Any] = []
        with RecordDispatch():
            fake_like(real)
        assert seen == []
        with Record():
            fake_like(real["view"])
        assert all("get" in repr(func) or "method" in repr(func) for func in seen)


class TestAliasing:
    def test_one_tensor_stays_one(self) -> None:
        real = torch.ones(3)
        first, (second,) = fake_like([real, (real,)])
        assert first is second

    def test_tensors_on_one_storage_share_a_fake_one(self) -> None:
        real = torch.ones(4, 4)
        fakes = fake_like([real[1], real.detach(), real.view(torch.int32), nn.Parameter(real[2:])])
        assert len({storage_id(fake) for fake in fakes}) == 1
        assert [fake.storage_offset() for fake in fakes] == [4, 0, 0, 8]

    def test_others_do_not(self) -> None:
        first, second = fake_like([torch.ones(3), torch.ones(3)])
        assert storage_id(first) != storage_id(second)

    @pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["base-first", "view-first"])
    def test_a_view_is_a_view_of_the_fake_base(self, order: list[int]) -> None:
        base = torch.ones(4, 4)
        real = [base, base[1]]
        fakes = fake_like([real[i] for i in order])
        fake_base, view = (fakes[i] for i in order)
        assert view._base is fake_base
        assert view._is_view()
        fake_base.add_(1)
        assert view._version == 1

    def test_a_view_alone_has_a_fake_base(self) -> None:
        fake = fake_like(torch.ones(4, 4)[1])
        assert is_fake(fake._base)
        assert fake._base.shape == (4, 4)

    def test_a_view_that_requires_grad_shares_the_storage_only(self) -> None:
        base = torch.ones(4, 4, requires_grad=True)
        fake_base, view = fake_like((base, base[1]))
        assert view._base is None
        assert storage_id(view) == storage_id(fake_base)

    def test_a_view_that_has_outgrown_its_storage_is_kept(self) -> None:
        base = torch.ones(4)
        view = base[1:]
        base.untyped_storage().resize_(0)
        fake = fake_like(view)
        assert fake.untyped_storage().nbytes() == 0
        assert fake.shape == (3,)


class TestContainers:
    def test_containers_are_kept(self) -> None:
        fake = fake_like(
            {"pair": Pair(torch.ones(1), 2), "ordered": OrderedDict(a=torch.ones(1)), "none": None, "name": "x"}
        )
        assert type(fake["pair"]) is Pair
        assert is_fake(fake["pair"].first)
        assert is_fake(fake["ordered"]["a"])
        assert (fake["pair"].second, fake["none"], fake["name"]) == (2, None, "x")

    def test_registered_dataclasses_are_containers(self) -> None:
        @dataclasses.dataclass
        class Batch:
            inputs: torch.Tensor
            size: int

        pytree.register_dataclass(Batch)
        fake = fake_like(Batch(torch.ones(3), 3))
        assert is_fake(fake.inputs)
        assert fake.size == 3

    def test_other_objects_pass_through(self) -> None:
        thing = object()
        assert fake_like([thing, torch.ones(1)])[0] is thing

    def test_containers_without_tensors_are_fine(self) -> None:
        state = torch.optim.SGD([torch.ones(1)]).state_dict()
        assert fake_like(state) == state

    def test_storages_are_copied(self) -> None:
        real = torch.ones(4)
        tensor, storage = fake_like((real, real.untyped_storage()))
        assert storage._cdata == storage_id(tensor)
        assert storage.nbytes() == 16

    @pytest.mark.parametrize("thing", [3, "x", None, object()], ids=lambda thing: type(thing).__name__)
    def test_error_names_the_object_that_is_not_a_container(self, thing: object) -> None:
        with pytest.raises(TypeError, match=f"fake_like\\(\\) takes a tensor, .* `obj` is a {type(thing).__name__}"):
            fake_like(thing)


class TestModules:
    def test_every_tensor_is_fake_and_the_original_is_not(self) -> None:
        real = Model()
        values = {name: value.clone() for name, value in real.state_dict().items()}
        fake = fake_like(real)
        tensors = [*fake.parameters(), *fake.buffers(), fake.plain, fake.hidden[0]["row"], fake.hidden[1][0]]
        assert all(map(is_fake, tensors))
        for name, value in real.state_dict().items():
            assert not is_fake(value)
            assert torch.equal(value, values[name])

    def test_names_and_metadata_are_kept(self) -> None:
        real = Model()
        fake = fake_like(real)
        assert type(fake) is Model
        for names in ("named_parameters", "named_buffers"):
            pairs = [dict(getattr(model, names)()) for model in (real, fake)]
            assert metadata(pairs[0], KEPT) == metadata(pairs[1], KEPT)
        assert list(fake.state_dict()) == list(real.state_dict())
        assert fake._non_persistent_buffers_set == {"passing"}

    def test_ties_and_aliases_are_kept(self) -> None:
        fake = fake_like(Model())
        assert fake.second.weight is fake.first.weight
        assert fake.hidden[0]["row"]._base is fake.kept
        assert fake.hidden[1][0] is fake.plain
        assert fake.first.weight.tag == "tied"

    def test_hooks_and_flags_are_kept(self) -> None:
        real = Model().eval()
        calls: list[str] = []
        real.first.register_forward_hook(lambda *_: calls.append("forward"))
        real.first.bias.requires_grad_(False)
        fake = fake_like(real)
        assert not fake.training
        assert not fake.first.bias.requires_grad
        fake(fake_like(torch.ones(3, 4)))
        assert calls == ["forward"]

    def test_trains(self) -> None:
        fake = fake_like(Model())
        optimizer = torch.optim.SGD(fake.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            fake(fake_like(torch.ones(3, 4))).sum().backward()
            optimizer.step()
        assert all(is_fake(parameter.grad) for parameter in fake.parameters())
        assert all(is_fake(state["momentum_buffer"]) for state in optimizer.state.values())

    def test_costs_no_memory(self) -> None:
        real = nn.Linear(4096, 4096)
        real.hidden = {"cache": torch.ones(4096, 4096)}
        before = psutil.Process().memory_info().rss
        fakes = [fake_like(real) for _ in range(8)]
        assert psutil.Process().memory_info().rss - before < 64 << 20
        assert is_fake(fakes[0].hidden["cache"])

    def test_lazy_modules_stay_lazy(self) -> None:
        fake = fake_like(nn.LazyLinear(3))
        assert isinstance(fake.weight, nn.UninitializedParameter)
        assert fake(fake_like(torch.ones(2, 5))).shape == (2, 3)
        assert fake.weight.shape == (3, 5)
        assert is_fake(fake.weight)

    @pytest.mark.parametrize(
        "parametrize",
        [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.weight_norm],
        ids=["weight_norm", "spectral_norm", "old-weight_norm"],
    )
    def test_parametrized_modules(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        real = parametrize(nn.Linear(4, 4))
        fake = fake_like(real)
        assert all(map(is_fake, fake.parameters()))
        assert type(fake).__name__ == type(real).__name__
        assert fake(fake_like(torch.ones(3, 4))).shape == (3, 4)

    def test_two_modules_share_the_same_tensors(self) -> None:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        fakes = fake_like({"first": first, "second": second})
        assert fakes["first"].weight is fakes["second"].weight

    def test_an_optimizer_stays_with_its_module(self) -> None:
        real = Model()
        optimizer = torch.optim.AdamW(real.parameters())
        real(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        fake, fake_optimizer = fake_like((real, optimizer))
        parameters = list(fake.parameters())
        assert all(a is b for a, b in zip(fake_optimizer.param_groups[0]["params"], parameters, strict=True))
        assert all(is_fake(fake_optimizer.state[parameter]["exp_avg"]) for parameter in parameters)
        assert not any(is_fake(state["exp_avg"]) for state in optimizer.state.values())

    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.SGD])
    def test_a_copied_optimizer_steps(self, optimizer: type[torch.optim.Optimizer]) -> None:
        real = Model()
        first = optimizer(real.parameters(), lr=0.1)
        real(torch.randn(3, 4)).sum().backward()
        first.step()
        counts = [float(state["step"]) for state in first.state.values() if "step" in state]
        fake, second = fake_like((real, first))
        second.step()
        assert all(map(is_fake, fake.parameters()))
        assert [float(state["step"]) for state in first.state.values() if "step" in state] == counts

    def test_modules_that_cannot_be_copied_are_named(self) -> None:
        real = Model()
        real.lock = threading.Lock()
        with pytest.raises(TypeError, match=r"copies a Model with copy.deepcopy\(\), which raised.*lock"):
            fake_like(real)

    def test_scripted_modules_are_refused(self) -> None:
        scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="cannot copy a RecursiveScriptModule"):
            fake_like(scripted)

    def test_real_modules_are_deep_copied_as_before(self) -> None:
        fake_like(torch.ones(1))
        real = Model()
        clone = copy.deepcopy(real)
        assert not is_fake(clone.first.weight)
        assert torch.equal(clone.first.weight, real.first.weight)


class TestDevices:
    def test_device_is_taken(self) -> None:
        base = torch.ones(4, 4)
        with fake_mode(gpu=2):
            fake, view, module = fake_like((base, base[1], nn.BatchNorm1d(4)), device="cuda:1")
            assert view._base is fake
        assert {t.device for t in (fake, view, *module.parameters(), *module.buffers())} == {torch.device("cuda:1")}

    def test_index_defaults_to_the_current_one(self) -> None:
        with fake_mode(gpu=True):
            assert fake_like(torch.ones(1), device="cuda").device == torch.device("cuda:0")

    def test_meta_tensors_get_a_device(self) -> None:
        fake = fake_like(torch.ones(3, device="meta"), device="cpu")
        assert is_fake(fake)
        assert fake.device.type == "cpu"

    def test_fake_cuda_tensors_come_to_the_cpu(self) -> None:
        with fake_mode(gpu=True):
            fake = torch.ones(3, device="cuda")
        assert fake_like(fake).device.type == "cuda"
        assert fake_like(fake, device="cpu").device.type == "cpu"

    def test_meta_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cannot put fakes on the meta device.*meta_like"):
            fake_like(torch.ones(1), device="meta")

    def test_missing_device_is_named(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        with pytest.raises(RuntimeError, match=r"no such device.*fake_mode\(gpu=True\)"):
            fake_like(torch.ones(1), device="cuda")


class TestLayouts:
    @pytest.mark.parametrize(
        ("make", "found"),
        [
            (lambda: torch.eye(3).to_mkldnn(), "has the layout torch._mkldnn"),
            (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantized"),
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "is nested"),
        ],
        ids=["mkldnn", "quantized", "nested"],
    )
    @pytest.mark.filterwarnings("ignore:.*quantize.*")
    def test_others_than_strided_and_sparse_are_named(self, make: Callable[[], torch.Tensor], found: str) -> None:
        module = nn.Linear(2, 2)
        module.hidden = [make()]
        for holder in (make(), [make()], module):
            with pytest.raises(NotImplementedError, match=f"takes strided and sparse tensors, but.*{found}"):
                fake_like(holder)

    def test_error_names_opaque_wrappers(self) -> None:
        class Opaque(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise NotImplementedError

        opaque = torch.Tensor._make_wrapper_subclass(Opaque, (3,))
        with pytest.raises(NotImplementedError, match="Opaque of shape \\(3,\\).*__tensor_flatten__"):
            fake_like(opaque)


class TestStateDicts:
    def test_keeps_the_versions_of_modules(self) -> None:
        state = Model().state_dict()
        fake = fake_like(state)
        assert fake._metadata == state._metadata
        assert all(map(is_fake, fake.values()))

    def test_real_state_loads_into_a_fake_module(self) -> None:
        real = Model()
        fake = fake_like(real)
        assert "All keys matched" in repr(fake.load_state_dict(real.state_dict()))
        assert all(map(is_fake, fake.state_dict().values()))

    def test_fake_state_loads_into_a_fake_module(self) -> None:
        real = Model()
        fake = fake_like(real)
        fake.load_state_dict(fake_like(real.state_dict()))
        assert all(map(is_fake, fake.state_dict().values()))

    def test_assign_puts_the_real_tensors_into_a_fake_module(self) -> None:
        real = Model()
        fake = fake_like(real)
        fake.load_state_dict(real.state_dict(), assign=True)
        assert not any(map(is_fake, fake.state_dict().values()))
        assert torch.equal(fake.first.weight, real.first.weight)
        assert isinstance(fake.first.weight, nn.Parameter)

    def test_fake_state_does_not_load_into_a_real_module(self) -> None:
        real = Model()
        with pytest.raises(RuntimeError, match="would write the result of fake tensors into the real tensor"):
            real.load_state_dict(fake_like(real.state_dict()))

    def test_names_and_shapes_are_checked(self) -> None:
        fake = fake_like(nn.Linear(4, 4))
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            fake.load_state_dict(nn.Linear(4, 5).state_dict())
        with pytest.raises(RuntimeError, match='Missing key.*"bias".*\\s*Unexpected key.*"other"'):
            fake.load_state_dict({"weight": torch.ones(4, 4), "other": torch.ones(1)})

    @pytest.mark.parametrize("is_state_fake", [False, True], ids=["real-state", "fake-state"])
    @pytest.mark.parametrize(
        ("make", "key"),
        [
            (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), "momentum_buffer"),
            (lambda parameters: torch.optim.AdamW(parameters), "exp_avg"),
        ],
        ids=["SGD", "AdamW"],
    )
    def test_optimizers_load_state(
        self, make: Callable[[Any], torch.optim.Optimizer], key: str, is_state_fake: bool
    ) -> None:
        real = Model()
        optimizer = make(real.parameters())
        real(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        fake = fake_like(real)
        fake_optimizer = make(fake.parameters())
        fake_optimizer.load_state_dict(fake_like(state) if is_state_fake else state)
        for parameter in fake.parameters():
            assert is_fake(fake_optimizer.state[parameter][key])
            assert fake_optimizer.state[parameter][key].shape == parameter.shape
        assert not any(is_fake(s[key]) for s in optimizer.state.values())

    @pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
    def test_an_optimizer_steps_from_loaded_real_state(self, optimizer: type[torch.optim.Optimizer]) -> None:
        real = Model()
        real(torch.randn(3, 4)).sum().backward()
        first = optimizer(real.parameters(), lr=0.1)
        first.step()
        fake = fake_like(real)
        second = optimizer(fake.parameters(), lr=0.1)
        second.load_state_dict(first.state_dict())
        second.step()
        assert all(map(is_fake, fake.parameters()))
        assert not any(map(is_fake, real.parameters()))
