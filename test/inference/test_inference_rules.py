"""The RFC's table of inference mode's effects on tensors, for real, fake and deferred ones.

The tables below are the RFC's, not derived from the implementation. Each row is also compared with
`torch.inference_mode` on real tensors.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import CreationMeta
from torch.nn.utils import parameters_to_vector

from torchext.deferred_init import deferred_init, materialize_module, materialize_tensor
from torchext.fake import fake_mode
from torchext.inference import inference_mode, is_inference_tensor
from torchext.inspect import route

SAVED = "Inference tensors cannot be saved for backward"
CHANGED = "Inplace update to inference tensor outside InferenceMode is not allowed"
VERSION = "Inference tensors do not track version counter"
MADE_TRAINABLE = "Setting requires_grad=True on inference tensor outside InferenceMode is not allowed"
MADE_INSIDE = "A view was created in inference mode and is being modified inplace in normal mode"
LEAF = "a leaf Variable that requires grad is being used in an in-place operation"

COMPOSITES = "TESTING_ONLY_GenericWrapper"  # the dispatch key of composites that read memory


class World(NamedTuple):
    """A device and a kind of tensors."""

    device: str
    kind: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        with fake_mode(gpu=True) if self.device == "fake cuda" else nullcontext():
            yield

    def make(self, function: Callable[..., Tensor]) -> Tensor:
        device = self.device.removeprefix("fake ")
        if self.kind == "deferred":
            return deferred_init(function, device=device)
        with fake_mode() if self.kind == "fake" else nullcontext():
            return function(device=device)

    def keys(self, tracked: bool) -> set[str]:
        """Return the key set of a normal tensor, which autograd tracks, or of an inference tensor."""
        backend = "CPU" if self.device == "cpu" else "CUDA"
        keys = {backend, f"Autocast{backend}"}
        if tracked:
            keys |= {"ADInplaceOrView", f"Autograd{backend}"}
        if self.kind != "real":
            keys |= {"Fake", COMPOSITES}
        if self.kind == "deferred":
            keys.add("DeferredInit")
        return keys


CPU = World("cpu", "real")
WORLDS = [
    CPU,
    World("cpu", "fake"),
    World("cpu", "deferred"),
    World("fake cuda", "fake"),
    World("fake cuda", "deferred"),
    *(pytest.param(World("cuda", kind), marks=pytest.mark.cuda) for kind in ("real", "fake", "deferred")),
]


def world_id(world: World) -> str:
    return f"{world.device} {world.kind}".replace(" ", "-")


in_every_world = pytest.mark.parametrize("world", WORLDS, ids=world_id)


class State(NamedTuple):
    """The autograd state of a tensor. `version` is None for an inference tensor, which has no version."""

    tracked: bool
    version: int | None
    requires_grad: bool
    is_leaf: bool
    is_view: bool
    creation: CreationMeta | None = None


INFERENCE = State(tracked=False, version=None, requires_grad=False, is_leaf=True, is_view=False)
FRESH = State(tracked=True, version=0, requires_grad=False, is_leaf=True, is_view=False)

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda t: t + 1,
    "view": lambda t: t.view(-1),
    "in-place": lambda t: t.add_(1),
}
TENSORS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda **device: torch.ones(2, 2, **device),
    "parameter": lambda **device: nn.Parameter(torch.ones(2, 2, **device)),
    "inference": lambda **device: torch.ones(2, 2, **device),
    "inference parameter": lambda **device: nn.Parameter(torch.ones(2, 2, **device)),
}
# The result of a call: a tensor with this state, or an error with this text.
TABLE: dict[tuple[str, str, str], State | str] = {
    ("inside", "functional", "normal"): INFERENCE,
    ("inside", "functional", "parameter"): INFERENCE,
    ("inside", "functional", "inference"): INFERENCE,
    ("inside", "functional", "inference parameter"): INFERENCE,
    # A view is an inference tensor if its base is. A view of a normal tensor records that it must not be changed
    # outside.
    ("inside", "view", "normal"): FRESH._replace(is_view=True, creation=CreationMeta.INFERENCE_MODE),
    ("inside", "view", "parameter"): FRESH._replace(
        is_view=True, creation=CreationMeta.INFERENCE_MODE, requires_grad=True
    ),
    ("inside", "view", "inference"): INFERENCE,
    ("inside", "view", "inference parameter"): INFERENCE,
    # The version of a normal tensor is bumped, because it may be saved for a backward pass.
    ("inside", "in-place", "normal"): FRESH._replace(version=1),
    ("inside", "in-place", "parameter"): FRESH._replace(version=1, requires_grad=True),
    ("inside", "in-place", "inference"): INFERENCE,
    ("inside", "in-place", "inference parameter"): INFERENCE._replace(requires_grad=True),
    ("outside", "functional", "normal"): FRESH,
    ("outside", "functional", "parameter"): FRESH._replace(requires_grad=True, is_leaf=False),
    ("outside", "functional", "inference"): FRESH,
    ("outside", "functional", "inference parameter"): FRESH._replace(requires_grad=True, is_leaf=False),
    ("outside", "view", "normal"): FRESH._replace(is_view=True, creation=CreationMeta.DEFAULT),
    ("outside", "view", "parameter"): FRESH._replace(
        is_view=True, creation=CreationMeta.DEFAULT, requires_grad=True, is_leaf=False
    ),
    ("outside", "view", "inference"): INFERENCE,
    ("outside", "view", "inference parameter"): INFERENCE,
    ("outside", "in-place", "normal"): FRESH._replace(version=1),
    ("outside", "in-place", "parameter"): LEAF,
    ("outside", "in-place", "inference"): CHANGED,
    ("outside", "in-place", "inference parameter"): LEAF,
}


CELL_IDS = ["-".join(cell).replace(" ", "-") for cell in TABLE]


def keys_of(tensor: Tensor) -> set[str]:
    return set(re.findall(r"\w+", str(torch._C._dispatch_keys(tensor)))) - {"DispatchKeySet"}


def state_of(tensor: Tensor) -> State:
    is_view = tensor._is_view()
    return State(
        tracked=not tensor.is_inference(),
        version=None if tensor.is_inference() else tensor._version,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_view=is_view,
        creation=torch._C._autograd._get_creation_meta(tensor) if is_view else None,
    )


Mode = Callable[[], AbstractContextManager[Any]]


def make_tensor(world: World, tensor: str, mode: Mode = inference_mode) -> Tensor:
    with mode() if tensor.startswith("inference") else nullcontext():
        return world.make(TENSORS[tensor])


def row(world: World, where: str, operator: str, tensor: str, mode: Mode = inference_mode) -> Tensor | str:
    """Return the result of an operator, or the text of its error."""
    argument = make_tensor(world, tensor, mode)
    try:
        with mode() if where == "inside" else nullcontext():
            return OPERATORS[operator](argument)
    except RuntimeError as error:
        return str(error)


class TestTable:
    @in_every_world
    @pytest.mark.parametrize(("where", "operator", "tensor"), TABLE, ids=CELL_IDS)
    def test_cell(self, world: World, where: str, operator: str, tensor: str) -> None:
        expected = TABLE[where, operator, tensor]
        with world.entered():
            found = row(world, where, operator, tensor)
        if isinstance(expected, str):
            assert isinstance(found, str)
            assert expected in found
        else:
            assert isinstance(found, Tensor), found
            assert state_of(found) == expected
            assert found.is_inference() is not expected.tracked
            # The key identifies an output of a fake that is not deferred itself; deferral follows the recording.
            assert keys_of(found) == world.keys(expected.tracked)

    @pytest.mark.parametrize(("where", "operator", "tensor"), TABLE, ids=CELL_IDS)
    def test_cell_is_pytorchs(self, where: str, operator: str, tensor: str) -> None:
        ours = row(CPU, where, operator, tensor)
        theirs = row(CPU, where, operator, tensor, torch.inference_mode)
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            assert isinstance(ours, Tensor)
            assert state_of(ours) == state_of(theirs)
            assert keys_of(ours) == keys_of(theirs)

    @pytest.mark.parametrize("kind", ["fake", "deferred"])
    @pytest.mark.parametrize(("where", "operator", "tensor"), TABLE, ids=CELL_IDS)
    def test_errors_are_those_of_real_tensors(self, kind: str, where: str, operator: str, tensor: str) -> None:
        theirs = row(CPU, where, operator, tensor, torch.inference_mode)
        ours = row(World("cpu", kind), where, operator, tensor)
        if isinstance(theirs, str) or isinstance(ours, str):
            assert ours == theirs

    @pytest.mark.parametrize(("where", "operator", "tensor"), TABLE, ids=CELL_IDS)
    def test_deferred_cell_materializes_as_eager(self, where: str, operator: str, tensor: str) -> None:
        eager = row(CPU, where, operator, tensor)
        deferred = row(World("cpu", "deferred"), where, operator, tensor)
        if isinstance(eager, str):
            assert deferred == eager
        else:
            assert isinstance(deferred, Tensor)
            materialize_tensor(deferred)
            assert state_of(deferred) == state_of(eager)
            assert keys_of(deferred) == keys_of(eager)
            assert torch.equal(deferred, eager)

    def test_has_every_cell(self) -> None:
        cells = {(w, o, t) for w in ("inside", "outside") for o in OPERATORS for t in TENSORS}
        assert set(TABLE) == cells


# The kernels that a call visits before the backend's, according to the RFC.
ROUTES: dict[tuple[str, str, str], list[str]] = {
    ("inside", "functional", "normal"): [],
    ("inside", "functional", "inference"): [],
    ("inside", "view", "normal"): ["ADInplaceOrView"],
    ("inside", "view", "inference"): [],
    ("inside", "in-place", "normal"): ["ADInplaceOrView"],
    ("inside", "in-place", "inference"): [],
    ("outside", "functional", "normal"): ["Autograd"],
    ("outside", "functional", "inference"): [],
    ("outside", "view", "normal"): ["Autograd", "ADInplaceOrView"],
    ("outside", "view", "inference"): ["ADInplaceOrView"],
    ("outside", "in-place", "normal"): ["Autograd", "ADInplaceOrView"],
    ("outside", "in-place", "inference"): ["ADInplaceOrView"],  # raises an error
}
CALLS: dict[str, tuple[Any, ...]] = {
    "functional": (torch.ops.aten.neg.default,),
    "view": (torch.ops.aten.view.default, [-1]),
    "in-place": (torch.ops.aten.neg_.default,),
}


@pytest.mark.parametrize(
    "world",
    [
        CPU,
        World("cpu", "fake"),
        World("fake cuda", "fake"),
        pytest.param(World("cuda", "real"), marks=pytest.mark.cuda),
    ],
    ids=world_id,
)
@pytest.mark.parametrize("mode", [inference_mode, torch.inference_mode], ids=["ours", "PyTorch's"])
@pytest.mark.parametrize(("where", "operator", "tensor"), ROUTES, ids=["-".join(cell) for cell in ROUTES])
def test_route(world: World, mode: Mode, where: str, operator: str, tensor: str) -> None:
    op, *args = CALLS[operator]
    backend = "CPU" if world.device == "cpu" else "CUDA"
    with world.entered():
        argument = make_tensor(world, tensor, mode)
        with mode() if where == "inside" else nullcontext():
            found = route(op, argument, *args).keys
        # Views get a kernel on the key of composites with the first fake of zeros without memory.
        is_extended = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), COMPOSITES)
    above = [f"Autograd{backend}" if key == "Autograd" else key for key in ROUTES[where, operator, tensor]]
    above = [*([COMPOSITES] if is_extended and world.kind != "real" else []), *above]
    assert [*found] == [*above, *([backend] if world.kind == "real" else ["Fake", "Meta"])]


@in_every_world
class TestInvariants:
    def test_inference_tensors_have_no_version(self, world: World) -> None:
        with world.entered(), pytest.raises(RuntimeError, match=VERSION):
            make_tensor(world, "inference")._version  # noqa: B018

    def test_inference_tensors_are_immutable_outside(self, world: World) -> None:
        with world.entered():
            tensor = make_tensor(world, "inference")
            for change in (
                lambda: tensor.zero_(),
                lambda: tensor.view(-1).zero_(),
                lambda: tensor[0].fill_(1),
                lambda: tensor.copy_(torch.zeros(())),
                lambda: torch.add(tensor, 1, out=tensor),
                lambda: torch._foreach_add_([tensor], 1),
            ):
                with pytest.raises(RuntimeError, match=CHANGED):
                    change()

    def test_data_of_them_is_as_mutable_as_in_pytorch(self, world: World) -> None:
        # A case in which PyTorch breaks the RFC's invariant: outside of the mode, the copy that
        # `shallow_copy_and_detach()` makes of an inference tensor keeps the enabled version counter that its
        # constructor made.
        with torch.inference_mode():
            real = torch.ones(2, 2)
        assert real.data.add_(1).is_inference()
        with world.entered():
            assert make_tensor(world, "inference").data.add_(1).is_inference()

    def test_saved_for_backward_raises(self, world: World) -> None:
        with world.entered():
            tensor = make_tensor(world, "inference")
            weight = make_tensor(world, "parameter")
            with pytest.raises(RuntimeError, match=SAVED):
                tensor * weight
            with pytest.raises(RuntimeError, match=SAVED):
                nn.functional.linear(tensor, weight)
            assert (tensor + weight).requires_grad  # saves no tensors
            assert (tensor.clone() * weight).requires_grad

    def test_views_of_normal_tensors_alias_no_inference_tensor(self, world: World) -> None:
        with world.entered():
            normal = make_tensor(world, "normal")
            with inference_mode():
                views = [normal[0], normal.t(), normal.detach(), normal.data, *normal.unbind()]
                views += [view.view(-1) for view in views if view.dim() == 1]
            for view in views:
                assert not view.is_inference()
            with inference_mode():
                version = normal._version
                normal[0].add_(1)
            assert normal._version == version + 1

    def test_views_made_inside_cannot_be_changed_outside(self, world: World) -> None:
        with world.entered():
            weight = make_tensor(world, "parameter")
            hidden = weight * 1
            with inference_mode():
                view = hidden.view(-1)
                parts = hidden.unbind()
                view.add_(1)
            assert torch._C._autograd._get_creation_meta(view) == CreationMeta.INFERENCE_MODE
            with pytest.raises(RuntimeError, match=MADE_INSIDE):
                view.add_(1)
            with pytest.raises(RuntimeError, match=MADE_INSIDE):
                parts[0].add_(1)
            with inference_mode():
                view.add_(1)

    def test_change_inside_reaches_saved_tensors(self, world: World) -> None:
        with world.entered():
            weight = make_tensor(world, "parameter")
            hidden = weight * 1
            loss = (hidden * hidden).sum()
            with inference_mode():
                hidden.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_requires_grad_can_be_set_inside_only(self, world: World) -> None:
        with world.entered():
            tensor = make_tensor(world, "inference")
            for make_trainable in (lambda: tensor.requires_grad_(), lambda: setattr(tensor, "requires_grad", True)):
                with pytest.raises(RuntimeError, match=MADE_TRAINABLE):
                    make_trainable()
            assert not tensor.requires_grad
            tensor.requires_grad_(False)
            with inference_mode():
                assert tensor.requires_grad_().requires_grad

    def test_parameters_can_be_allocated_inside(self, world: World) -> None:
        with world.entered():
            with inference_mode():
                device = world.device.removeprefix("fake ")
                if world.kind == "deferred":
                    linear = deferred_init(nn.Linear, 2, 2, device=device)
                else:
                    with fake_mode() if world.kind == "fake" else nullcontext():
                        linear = nn.Linear(2, 2, device=device)
            for parameter in (linear.weight, linear.bias):
                assert type(parameter) is nn.Parameter
                assert keys_of(parameter) == world.keys(tracked=False)
                assert state_of(parameter) == INFERENCE._replace(requires_grad=True)
            with pytest.raises(RuntimeError, match=CHANGED):
                linear.weight.view(-1).zero_()
            with inference_mode():
                result = linear(make_tensor(world, "inference"))
            assert state_of(result) == INFERENCE

    def test_factories_with_requires_grad(self, world: World) -> None:
        with world.entered(), inference_mode():
            tensor = world.make(lambda **device: torch.ones(2, requires_grad=True, **device))
            assert state_of(tensor) == INFERENCE._replace(requires_grad=True)
            assert state_of(tensor.view(1, 2)) == INFERENCE

    def test_no_mode_inside_is_training(self, world: World) -> None:
        with world.entered(), inference_mode(), inference_mode(False):
            weight = make_tensor(world, "parameter")
            assert state_of(weight) == FRESH._replace(requires_grad=True)
            assert (weight * 2).grad_fn is not None


def test_training_on_another_thread_is_not_affected() -> None:
    results: list[tuple[bool, list[float]]] = []

    def train() -> None:
        weight = nn.Parameter(torch.ones(2))
        (weight * 3).sum().backward()
        assert weight.grad is not None
        results.append((torch.is_inference_mode_enabled(), weight.grad.tolist()))

    with inference_mode():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        assert torch.is_inference_mode_enabled()
    assert results == [(False, [3.0, 3.0])]


class TestDeferredInit:
    """Materialized tensors equal those of eager construction."""

    @staticmethod
    def model(**device: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 3, **device), nn.BatchNorm1d(3, **device))
        model[0].bias.detach().fill_(0.5)
        model.register_buffer("view", model[0].weight.detach().view(-1))
        return model

    @pytest.mark.parametrize("construct", ["mode around deferred_init", "mode inside of deferred_init"])
    @pytest.mark.parametrize("materialize", ["inside", "outside"])
    def test_equals_eager(self, construct: str, materialize: str) -> None:
        def inside() -> nn.Module:
            with inference_mode():
                return self.model()

        torch.manual_seed(0)
        eager = inside()
        torch.manual_seed(0)
        if construct == "mode around deferred_init":
            with inference_mode():
                deferred = deferred_init(self.model)
        else:
            deferred = deferred_init(inside)
        with inference_mode() if materialize == "inside" else nullcontext():
            materialize_module(deferred)
        for (name, wanted), found in zip(
            eager.state_dict(keep_vars=True).items(), deferred.state_dict(keep_vars=True).values(), strict=True
        ):
            assert type(found) is type(wanted), name
            assert state_of(found) == state_of(wanted), name
            assert keys_of(found) == keys_of(wanted), name
            assert torch.equal(found, wanted), name

    def test_normal_module_stays_normal_when_materialized_inside(self) -> None:
        eager = nn.Linear(2, 2)
        deferred = deferred_init(nn.Linear, 2, 2)
        with inference_mode():
            materialize_module(deferred)
        for found, wanted in zip(deferred.parameters(), eager.parameters(), strict=True):
            assert state_of(found) == state_of(wanted)
            assert keys_of(found) == keys_of(wanted)
        parameters_to_vector(deferred.parameters()).sum().backward()
        assert torch.equal(deferred.weight.grad, torch.ones(2, 2))

    @pytest.mark.parametrize("place", [{"dtype": torch.float64}, {"device": "cpu"}], ids=["dtype", "device"])
    def test_placed_inference_tensors_stay_inference_tensors(self, place: dict[str, Any]) -> None:
        with inference_mode():
            deferred = deferred_init(nn.Linear, 2, 2)
        materialize_module(deferred, **place)
        assert all(is_inference_tensor(parameter) for parameter in deferred.parameters())

    def test_operators_that_cannot_be_deferred_bump_versions_like_eager(self) -> None:
        def write(make: Callable[..., Tensor]) -> list[int]:
            normal, real = make(torch.zeros, 2), torch.zeros(2)
            with inference_mode():
                torch._foreach_add_([normal, real], 1)
            return [normal._version, real._version]

        assert write(deferred_init) == write(lambda function, *args: function(*args)) == [1, 1]

    def test_operators_that_cannot_be_deferred_reject_inference_tensors_outside(self) -> None:
        with inference_mode():
            deferred = deferred_init(torch.zeros, 2)
        with pytest.raises(RuntimeError, match=CHANGED):
            torch._foreach_add_([torch.zeros(2), deferred], 1)
        assert materialize_tensor(deferred).tolist() == [0.0, 0.0]

    def test_constants_read_inside_have_values(self) -> None:
        def make() -> Tensor:
            with inference_mode():
                size = torch.tensor([1, 2])
                size += 1
                return torch.arange(int(size.sum()))

        assert materialize_tensor(deferred_init(make)).tolist() == [0, 1, 2, 3, 4]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t.view(2, 4),
    "same dtype": lambda t: t.view(t.dtype),
    "narrower dtype": lambda t: t.view(torch.int16),
    "wider dtype": lambda t: t.view(torch.complex64),
    "view of a dtype view": lambda t: t.view(torch.uint8)[4:],
    "dtype view of a view": lambda t: t[2:].view(torch.int32),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 2)),
    "view_as_real": lambda t: torch.view_as_real(torch.view_as_complex(t.view(4, 2))),
    "conj": lambda t: torch.view_as_complex(t.view(4, 2)).conj(),
    "imag": lambda t: torch.view_as_complex(t.view(4, 2)).imag,
    "_neg_view": torch._neg_view,
    "as_strided": lambda t: t.as_strided((2,), (1,)),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "detach": Tensor.detach,
    "data": lambda t: t.data,
    "alias": torch.ops.aten.alias,
    "expand": lambda t: t.view(2, 4).expand(3, 2, 4),
    "unbind": lambda t: t.view(2, 4).unbind()[1],
    "split": lambda t: t.split(2)[0],
    "diagonal": lambda t: t.view(2, 4).diagonal(),
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage()),
}


@pytest.mark.parametrize("is_viewed_inside", [False, True], ids=["viewed-outside", "viewed-inside"])
@pytest.mark.parametrize("is_made_inside", [False, True], ids=["made-outside", "made-inside"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_inference_tensors_where_real_ones_are(
    view: Callable[[Tensor], Tensor], is_made_inside: bool, is_viewed_inside: bool
) -> None:
    def run() -> tuple[bool, bool, int | None]:
        with torch.inference_mode(is_made_inside):
            base = torch.ones(8)
        with torch.inference_mode(is_viewed_inside):
            result = view(base)
        is_inference = result.is_inference()
        return is_inference, result._is_view(), None if is_inference else result._version

    wanted = run()
    for _ in range(2):  # the second time from the cache
        with fake_mode():
            assert run() == wanted
    assert deferred_init(run) == wanted
