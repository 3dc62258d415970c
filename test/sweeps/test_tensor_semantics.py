"""Tensors and autograd: shared and own state, and memory costs, for every kind of tensor.

Tests the promises of the merge of Variable and Tensor, in the form that PyTorch has today. Each test runs on real, fake
and deferred tensors. Details are compared with the behavior of a real tensor, including errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch
from comparisons import Raised, error_of, outcome
from sweeps.operators import tensors_in
from torch import nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import fake_mode
from torchext.inspect import tensor_state


class Make(Protocol):
    """Makes a tensor of ones, of one of the kinds."""

    def __call__(self, *shape: int, **options: Any) -> torch.Tensor: ...


def make_real(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def make_fake(*shape: int, **options: Any) -> torch.Tensor:
    with fake_mode():
        return torch.ones(*shape, **options)


def make_fake_cuda(*shape: int, **options: Any) -> torch.Tensor:
    with fake_mode(gpu=True):
        return torch.ones(*shape, device="cuda", **options)


def make_deferred(*shape: int, **options: Any) -> torch.Tensor:
    return deferred_init(torch.ones, *shape, **options)


KINDS: dict[str, Make] = {
    "real": make_real,
    "fake": make_fake,
    "fake-cuda": make_fake_cuda,
    "deferred": make_deferred,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def ones(request: pytest.FixtureRequest) -> Make:
    return request.param


def storage(tensor: torch.Tensor) -> int | None:
    return tensor_state(tensor).storage


def has_autograd_metadata(tensor: torch.Tensor) -> bool:
    return tensor_state(tensor).has_autograd_metadata


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
}
METADATA_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda t: t.resize_(8),
    "resize_-grow": lambda t: t.resize_(16, 16),
    "resize_-no-op": lambda t: t.resize_(4, 4),
    "resize_as_": lambda t: t.resize_as_(t.new_ones(2)),
    "set_-tensor": lambda t: t.set_(t.new_ones(3)),
    "set_-storage": lambda t: t.set_(t.new_ones(3).untyped_storage()),
    "set_-part-of-itself": lambda t: t.set_(t.untyped_storage(), 1, (2,), (1,)),
    "set_-nothing": lambda t: t.set_(),
    "set_-other-dtype": lambda t: t.set_(t.new_ones(3).half()),
    "transpose_": lambda t: t.transpose_(0, 1),
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "as_strided_": lambda t: t.as_strided_((2,), (1,), 3),
    "set-data": lambda t: setattr(t, "data", t.new_ones(2)),
    "detach_": lambda t: t.detach_(),
}


def test_detach_shares_the_storage_and_not_the_history(ones: Make) -> None:
    tensor = ones(4, 4).requires_grad_() * 2
    detached = tensor.detach()
    assert storage(detached) == storage(tensor)
    assert (detached.requires_grad, detached.grad_fn, detached.is_leaf) == (False, None, True)
    assert not has_autograd_metadata(detached)
    assert tensor.grad_fn is not None


def test_detach_shares_the_version_and_data_does_not(ones: Make) -> None:
    tensor = ones(4, 4)
    detached, data = tensor.detach(), tensor.data
    data.add_(1)
    assert (tensor._version, detached._version, data._version) == (0, 0, 1)
    detached.add_(1)
    assert (tensor._version, detached._version, data._version) == (1, 1, 1)
    tensor.add_(1)
    assert (tensor._version, detached._version, data._version) == (2, 2, 1)


@pytest.mark.cases(112)
@pytest.mark.parametrize("change", METADATA_CHANGES.values(), ids=METADATA_CHANGES)
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_changing_shape_or_storage_of_an_alias_leaves_the_tensor(
    ones: Make, alias: Callable[[torch.Tensor], torch.Tensor], change: Callable[[torch.Tensor], Any]
) -> None:
    tensor = ones(4, 4).requires_grad_()
    before = (tensor.shape, tensor.stride(), tensor.storage_offset(), storage(tensor), tensor.dtype)
    try:
        change(alias(tensor))
    except RuntimeError as error:
        assert "Could not set tensor of type" in str(error)  # noqa: PT017
    assert (tensor.shape, tensor.stride(), tensor.storage_offset(), storage(tensor), tensor.dtype) == before


def test_writes_to_data_are_undetected_and_those_to_detached_tensors_are_detected(ones: Make) -> None:
    weight = ones(4).requires_grad_()
    result = (weight * weight).sum()
    weight.data.add_(1)
    result.backward(retain_graph=True)
    weight.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.* is at version 1; expected version 0"):
        result.backward()


def test_requires_grad_can_be_switched(ones: Make) -> None:
    tensor = ones(4)
    assert tensor.requires_grad_(True).requires_grad
    assert (tensor * 2).grad_fn is not None
    assert not tensor.requires_grad_(False).requires_grad
    assert (tensor * 2).grad_fn is None
    assert tensor.is_leaf
    # PyTorch keeps the metadata; the proposal of the merge was to drop them.
    assert has_autograd_metadata(tensor)


def test_only_leaves_of_a_differentiable_dtype_are_switched(ones: Make) -> None:
    with pytest.raises(RuntimeError, match="only Tensors of floating point dtype can require gradients"):
        ones(4, dtype=torch.int64).requires_grad_()
    with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf variables"):
        (ones(4).requires_grad_() * 2).requires_grad_(False)


def test_autograd_metadata_are_made_only_when_needed(ones: Make) -> None:
    tensor = ones(4, 4)
    for look in (
        lambda t: (t.shape, t.grad, t.grad_fn, t.is_leaf, t.requires_grad, t._version, t._base, t._is_view()),
        lambda t: (t.output_nr, t.retains_grad, t._backward_hooks, t.name),
        lambda t: (t + 1, t.add_(1), t.detach(), t.data, t.sum(0), t.clone()),
        lambda t: t.requires_grad_(False),
    ):
        look(tensor)
        assert not has_autograd_metadata(tensor)
    for result in (tensor + 1, tensor.detach(), tensor.data, tensor.clone()):
        assert not has_autograd_metadata(result)
    with torch.no_grad():
        assert not has_autograd_metadata(nn.Parameter(tensor) * 2)


NEEDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad_": lambda t: t.requires_grad_(),
    "grad": lambda t: setattr(t, "grad", t.clone()),
    "hook": lambda t: t.requires_grad_().register_hook(lambda grad: grad),
}


@pytest.mark.parametrize("need", NEEDS.values(), ids=NEEDS)
def test_autograd_metadata_are_made_when_needed(ones: Make, need: Callable[[torch.Tensor], Any]) -> None:
    tensor = ones(4, 4)
    need(tensor)
    assert has_autograd_metadata(tensor)


def test_views_and_results_have_autograd_metadata(ones: Make) -> None:
    tensor = ones(4, 4)
    assert has_autograd_metadata(tensor[0])
    assert not has_autograd_metadata(tensor)
    assert has_autograd_metadata(tensor.requires_grad_() * 2)


def test_set_data_adopts_all_but_history_and_version(ones: Make) -> None:
    weight = ones(4, 4).requires_grad_()
    weight.grad = ones(4, 4)
    view = weight[0]
    data = ones(2, dtype=torch.float64)
    data.add_(1)
    weight.data = data
    assert (weight.shape, weight.dtype) == (data.shape, data.dtype)
    assert storage(weight) == storage(data) != storage(view)
    assert weight.requires_grad
    assert weight.grad is not None
    assert (weight._version, data._version) == (0, 1)
    data.add_(1)
    assert (weight._version, data._version) == (0, 2)


OTHER_DATA: dict[str, tuple[Callable[[Make], Any], type[Exception], str]] = {
    "meta": (lambda ones: torch.ones(4, 4, device="meta"), RuntimeError, "incompatible tensor type"),
    "sparse": (lambda ones: torch.ones(4, 4).to_sparse(), RuntimeError, "incompatible tensor type"),
    "sparse-csr": (lambda ones: torch.eye(4).to_sparse_csr(), RuntimeError, "incompatible tensor type"),
    "integer": (lambda ones: ones(4, 4, dtype=torch.int64), RuntimeError, "must be floating point or complex dtype"),
    "none": (lambda ones: None, TypeError, "has to be a tensor, but got NoneType"),
    "number": (lambda ones: 3, TypeError, "has to be a tensor, but got int"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("data", "error", "message"), OTHER_DATA.values(), ids=OTHER_DATA)
def test_set_data_rejects_incompatible_tensors(
    ones: Make, data: Callable[[Make], Any], error: type[Exception], message: str
) -> None:
    weight = ones(4, 4).requires_grad_()
    before = tensor_state(weight)
    with pytest.raises(error, match=message):
        weight.data = data(ones)
    assert tensor_state(weight) == before


def test_gradients_are_accumulated_in_place(ones: Make) -> None:
    weight = ones(4, 4).requires_grad_()
    (weight * 2).sum().backward()
    first = weight.grad
    assert first is not None
    assert storage(first) != storage(weight)
    version = first._version
    (weight * 2).sum().backward()
    assert weight.grad is first
    assert first._version > version
    assert not first.requires_grad


def test_unshared_gradient_is_stolen_and_a_shared_one_is_copied(ones: Make) -> None:
    weight, gradient = ones(4, 4).requires_grad_(), ones(4, 4)
    (weight * 1).backward(gradient)
    assert weight.grad is not None
    assert storage(weight.grad) != storage(gradient)
    weight.grad = gradient
    assert weight.grad is gradient


def test_gradients_follow_the_layout_of_the_tensor(ones: Make) -> None:
    weight = ones(4, 2).t().detach().requires_grad_()
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


Described = Any


class Describe:
    """Describes everything that two runs must have in common. Storages are numbered in order of appearance."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def __call__(self, value: Any) -> Described:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        return value

    def tensor(self, tensor: torch.Tensor) -> Described:
        state = tensor_state(tensor)
        keys = [key for key in state.keys if key not in ("TESTING_ONLY_GenericWrapper", "DeferredInit", "Fake")]
        number = None if state.storage is None else self.storages.setdefault(state.storage, len(self.storages))
        flags = (state.version, state.has_autograd_metadata, state.inference, state.requires_grad)
        graph = (state.is_leaf, state.is_view, state.creation_metadata, type(tensor.grad_fn).__name__)
        return (
            (type(tensor).__name__, tensor.shape, tensor.dtype, str(tensor.device), keys, number, flags, graph),
            None if tensor.is_sparse else (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()),
        )


def holding(
    get: Callable[[torch.Tensor], torch.Tensor], change: Callable[[torch.Tensor], Any]
) -> Callable[[Make], Any]:
    """Change the result of `get`, and describe both afterwards."""

    def run(ones: Make) -> Any:
        tensor = ones(4, 4)
        got = get(tensor)
        error = outcome(lambda: change(got))
        return error if isinstance(error, Raised) else None, tensor, got

    return run


def set_data(get: Callable[[Make], torch.Tensor], data: Callable[[Make], Any]) -> Callable[[Make], Any]:
    """Set the data of the result of `get`, and then write to it."""

    def run(ones: Make) -> Any:
        tensor, value = get(ones), data(ones)
        set_error = outcome(lambda: setattr(tensor, "data", value))
        write_error = outcome(lambda: tensor.add_(1))
        return set_error, write_error if isinstance(write_error, Raised) else None, tensor, value

    return run


def with_grad(ones: Make) -> torch.Tensor:
    tensor = ones(4, 4).requires_grad_()
    tensor.grad = ones(4, 4)
    return tensor


def inference(ones: Make) -> torch.Tensor:
    with torch.inference_mode():
        return ones(4, 4)


def saved_for_backward(write: Callable[[torch.Tensor], Any]) -> Callable[[Make], Any]:
    def run(ones: Make) -> Any:
        weight = ones(4, 4).requires_grad_()
        result = (weight * weight).sum()
        return outcome(lambda: write(weight)), outcome(result.backward), weight, weight.grad

    return run


def accumulated(into: Callable[[Make], Any] = lambda ones: None) -> Callable[[Make], Any]:
    def run(ones: Make) -> Any:
        weight = ones(4, 4).requires_grad_()
        weight.grad = given = into(ones)
        seen: list[Any] = []
        weight.register_hook(lambda grad: seen.append(grad.shape))
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad is given))
        errors = [outcome(lambda: (weight * weight).sum().backward()) for _ in range(2)]
        return errors, seen, weight, weight.grad, given

    return run


def assigned_grads(ones: Make) -> Any:
    tensor = ones(4, 4).requires_grad_()
    candidates = (
        ones(4, 4),
        ones(2),
        ones(4, 4, dtype=torch.float64),
        torch.ones(4, 4, device="meta"),
        tensor,
        3,
        None,
    )
    return [(outcome(lambda grad=grad: setattr(tensor, "grad", grad)), tensor.grad) for grad in candidates]


def views_that_became_views_of_a_leaf(ones: Make) -> Any:
    tensor = ones(4)
    view = tensor[:2]
    with torch.no_grad():
        unseen = tensor[:2]
    tensor.requires_grad_()
    return view, unseen, [outcome(lambda v=v: v.add_(1)) for v in (view, unseen)]


def writes_through_views(ones: Make) -> Any:
    base = ones(4, 4).requires_grad_() * 1
    view = base[0]
    view.mul_(2)
    base.sum().backward()
    return base, view, outcome(view.detach_)


def version_is_preserved_and_set(ones: Make) -> Any:
    tensor = ones(4)
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.add_(1)
    version = tensor._version
    torch._C._autograd._unsafe_set_version_counter((tensor,), (7,))
    return version, tensor, tensor.detach(), tensor.data


def data_shared_by_two(ones: Make) -> Any:
    weight, data = ones(4).requires_grad_(), ones(4)
    weight.data = data
    data.add_(1)
    data.resize_(2)
    return weight, data, weight.data, data.data.data


def data_set_between(ones: Make) -> Any:
    weight = ones(4, 4).requires_grad_()
    result = (weight * weight).sum()
    weight.data = ones(4, 4)
    return weight, outcome(result.backward), weight.grad


def data_of_other_shape_set_between(ones: Make) -> Any:
    weight = ones(4, 4).requires_grad_()
    result = (weight * weight).sum()
    weight.data = ones(2, 2)
    # Only the class of the error: its message comes from the kernel, and Meta kernels have other messages.
    return weight, error_of(result.backward).error, weight.grad


def swapped(ones: Make) -> Any:
    first, second = ones(2), ones(3).requires_grad_()
    torch.utils.swap_tensors(first, second)
    return first, second


def copied(ones: Make) -> Any:
    result = copy.deepcopy(with_grad(ones))
    return result, result.grad


def shallow_copies(ones: Make) -> Any:
    base = ones(4, 4)
    tensor = base.t()[1:]
    copies = [tensor.detach(), tensor.data, torch.ops.aten.alias(tensor), nn.Parameter(tensor), tensor.view_as(tensor)]
    base.add_(1)
    return tensor, copies


def differentiated_twice(ones: Make) -> Any:
    weight = ones(4).requires_grad_()
    (first,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    return first, second, weight.grad


def retained(ones: Make) -> Any:
    result = ones(4).requires_grad_() * 2
    result.retain_grad()
    result.sum().backward()
    return result, result.grad


TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "detached-view": lambda t: t[:2].detach(),
    "view": lambda t: t.view(-1).view(4, 4),
    "leaf": lambda t: t.requires_grad_(),
    "result": lambda t: t.requires_grad_() * 1,
    "parameter": nn.Parameter,
}
OWNERS: dict[str, Callable[[Make], torch.Tensor]] = {
    "tensor": lambda ones: ones(4, 4),
    "leaf": lambda ones: ones(4, 4).requires_grad_(),
    "leaf-with-grad": with_grad,
    "result": lambda ones: ones(4, 4).requires_grad_() * 1,
    "view": lambda ones: ones(4, 4)[1],
    "parameter": lambda ones: nn.Parameter(ones(4, 4)),
    "inference": inference,
}
DATA: dict[str, Callable[[Make], Any]] = {
    "same": lambda ones: ones(4, 4),
    "shape": lambda ones: ones(2),
    "dtype": lambda ones: ones(4, 4, dtype=torch.float64),
    "integer": lambda ones: ones(4, 4, dtype=torch.int64),
    "complex": lambda ones: ones(4, 4, dtype=torch.complex64),
    "view": lambda ones: ones(4, 4)[1],
    "leaf": lambda ones: ones(4, 4).requires_grad_(),
    "result": lambda ones: ones(4, 4).requires_grad_() * 2,
    "parameter": lambda ones: nn.Parameter(ones(4, 4)),
    "inference": inference,
    "meta": lambda ones: torch.ones(4, 4, device="meta"),
    "sparse": lambda ones: torch.ones(4, 4).to_sparse(),
}
PROGRAMS: dict[str, Callable[[Make], Any]] = {
    **{
        f"{change}-of-{target}": holding(get, run)
        for target, get in TARGETS.items()
        for change, run in METADATA_CHANGES.items()
    },
    **{f"set-data-of-{owner}-to-{data}": set_data(OWNERS[owner], DATA[data]) for owner in OWNERS for data in DATA},
    "save-and-write": saved_for_backward(lambda weight: weight.detach().add_(1)),
    "save-and-write-data": saved_for_backward(lambda weight: weight.data.add_(1)),
    "save-and-resize-data": saved_for_backward(lambda weight: weight.data.resize_(2)),
    "save-and-write-to-leaf": saved_for_backward(lambda weight: weight.add_(1)),
    "save-and-write-to-view-of-leaf": saved_for_backward(lambda weight: weight[0].add_(1)),
    "save-and-set-data": data_set_between,
    "save-and-set-data-of-other-shape": data_of_other_shape_set_between,
    "accumulate": accumulated(),
    "accumulate-into-given": accumulated(lambda ones: ones(4, 4)),
    "accumulate-into-view": accumulated(lambda ones: ones(4, 8)[:, :4]),
    "accumulate-into-expanded": accumulated(lambda ones: ones(4, 1).expand(4, 4)),
    "assign-grads": assigned_grads,
    "views-of-a-later-leaf": views_that_became_views_of_a_leaf,
    "writes-through-views": writes_through_views,
    "versions": version_is_preserved_and_set,
    "shared-data": data_shared_by_two,
    "swap_tensors": swapped,
    "deepcopy": copied,
    "shallow-copies": shallow_copies,
    "twice-differentiated": differentiated_twice,
    "retain_grad": retained,
}


@pytest.mark.cases(160)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("ones", [make_fake, make_deferred], ids=["fake", "deferred"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_behaves_like_a_real_tensor(program: Callable[[Make], Any], ones: Make) -> None:
    assert Describe()(outcome(lambda: program(ones))) == Describe()(outcome(lambda: program(make_real)))


# Uninitialized memory has no value to compare.
@pytest.mark.cases(204)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith("resize_-grow")])
def test_deferred_tensors_get_the_values_of_real_ones(name: str) -> None:
    deferred = tensors_in(outcome(lambda: PROGRAMS[name](make_deferred)))
    real = tensors_in(outcome(lambda: PROGRAMS[name](make_real)))
    for tensor in filter(is_deferred, deferred):
        materialize_tensor(tensor)
    for ours, theirs in zip(deferred, real, strict=True):
        assert ours.is_meta or ours.is_sparse or torch.equal(ours, theirs)
