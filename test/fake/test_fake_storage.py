"""Storages, views and changes of metadata: each function affects fake tensors like real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparisons import ALL_PROPERTIES, LOOSE_PROPERTIES, Raised, metadata, outcome
from torch import nn
from torch.utils._pytree import tree_map_only

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import fake_like, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE


def described(result: Any) -> Any:
    """Return all properties of tensors, and the size and device of storages."""

    def described_storage(storage: torch.UntypedStorage) -> object:
        return "storage", storage.nbytes(), str(storage.device)

    return metadata(tree_map_only(torch.UntypedStorage, described_storage, result), ALL_PROPERTIES)


def after(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Also compare the tensor and a view of it after the call."""

    def run(tensor: torch.Tensor) -> Any:
        view = tensor[1:]
        return function(tensor), tensor, view

    return run


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def linear_like(tensor: torch.Tensor) -> nn.Linear:
    real = copy.deepcopy(nn.Linear(4, 4))
    return fake_like(real) if is_fake(tensor) else real


def swapped(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.utils.swap_tensors(first, second)
    return first, second


def module_to(tensor: torch.Tensor) -> list[torch.Tensor]:
    module = linear_like(tensor)
    return [module.to(torch.float64).weight, module.half().bias, module.bfloat16().weight, module.to("meta").weight]


def parametrized(tensor: torch.Tensor) -> list[torch.Tensor]:
    module = nn.utils.parametrizations.weight_norm(linear_like(tensor))
    return [module.weight, nn.utils.parametrize.remove_parametrizations(module, "weight").weight]


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "views": lambda t: [t.view(-1), t[1], t.t(), t.diagonal(), t.chunk(2), t.unfold(0, 2, 1), t.narrow(0, 1, 2)],
    "more-views": lambda t: [t.select(0, 1), t.split(1), t.unbind(), t.view_as(t), t.movedim(0, 1), t.expand(2, 4, 4)],
    "aliases": lambda t: [t.detach(), t.data, t.alias() if hasattr(t, "alias") else 0],
    "storage": lambda t: (
        t.untyped_storage(),
        t.untyped_storage().size(),
        len(t.untyped_storage()),
        t.untyped_storage().resizable(),
        t.untyped_storage().element_size(),
        t.untyped_storage().is_cuda,
        t.untyped_storage().is_shared(),
        t.untyped_storage().filename,
        t.untyped_storage() == t.untyped_storage(),
        t.nbytes,
    ),
    "storage-of-view": lambda t: t.untyped_storage()._cdata == t.view(-1)[3:].untyped_storage()._cdata,
    "set_-tensor": lambda t: t.new_empty(0).set_(t),
    "set_-tensor-part": lambda t: t.new_empty(0).set_(t, 1, (2, 2), (2, 1)),
    "set_-storage": lambda t: t.new_empty(0).set_(t.untyped_storage()),
    "set_-storage-part": lambda t: t.new_empty(0).set_(t.untyped_storage(), 1, (2, 2), (2, 1)),
    "set_-storage-sizes": lambda t: t.new_empty(0).set_(t.untyped_storage(), 1, (2, 2)),
    "set_-storage-grow": after(lambda t: t.new_empty(0).set_(t.untyped_storage(), 1, (20, 20), (20, 1))),
    "set_-storage-other-dtype": lambda t: t.new_empty(0, dtype=torch.int32).set_(t.untyped_storage()),
    "set_-nothing": after(lambda t: t.set_()),
    "set_-other-dtype": lambda t: t.new_empty(0, dtype=torch.int32).set_(t),
    "is_set_to": lambda t: (t.is_set_to(t.detach()), t.is_set_to(t[1:]), t.is_set_to(t.clone())),
    "resize_-grow": after(lambda t: t.resize_(8, 8)),
    "resize_-shrink": after(lambda t: t.resize_(2, 2)),
    "resize_-channels-last": after(lambda t: t.resize_(1, 2, 3, 4, memory_format=torch.channels_last)),
    "resize_-same": after(lambda t: (t.resize_(4, 4), t.t().resize_(4, 4), t[0].resize_(4))),
    "resize_-same-format": after(lambda t: t.view(1, 2, 2, 4).resize_(1, 2, 2, 4, memory_format=torch.channels_last)),
    "resize_-zero": after(lambda t: t.resize_(0)),
    "resize_-view": after(lambda t: t[1].resize_(20)),
    "resize_-negative": after(lambda t: t.resize_(-1)),
    "resize_-requires-grad": lambda t: t.requires_grad_().resize_(2),
    "resize_as_": after(lambda t: t.resize_as_(t.new_empty(3, 3))),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 1), 3),
    "as_strided-negative-stride": lambda t: t.as_strided((2,), (-1,)),
    "as_strided-negative-offset": lambda t: t.as_strided((2,), (1,), -1),
    "as_strided_": after(lambda t: t.as_strided_((2, 2), (1, 1), 3)),
    "as_strided_-outside": after(lambda t: t.as_strided_((8, 8), (8, 1))),
    "set-data": after(lambda t: set_data(t, t.new_ones(3))),
    "set-data-dtype": after(lambda t: set_data(t, t.half())),
    "set-data-no-gradient": lambda t: set_data(t.requires_grad_(), t.int()),
    "base": lambda t: (t[1]._base is t, t[1][0]._base is t, t.detach()._base, t.view(-1)[1]._base is t),
    "is_contiguous": lambda t: (
        t.t().is_contiguous(),
        t.t().contiguous(),
        t.view(1, 2, 2, 4).is_contiguous(memory_format=torch.channels_last),
        t.view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        t.view(1, 2, 2, 4).to(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last),
    ),
    "t_": after(lambda t: t.t_()),
    "swapaxes_": after(lambda t: t.swapaxes_(0, 1)),
    "transpose_": after(lambda t: t.transpose_(0, 1)),
    "squeeze_": after(lambda t: t.unsqueeze_(0).squeeze_()),
    "squeeze_-dim": after(lambda t: t.unsqueeze_(0).squeeze_(0)),
    "unsqueeze_": after(lambda t: t.unsqueeze_(2)),
    "view-dtype": lambda t: [t.view(dtype) for dtype in (torch.int16, torch.int32, torch.float64, torch.uint8)],
    "view-dtype-indivisible": lambda t: t[:, :3].view(torch.float64),
    "view-impossible": lambda t: t.t().view(-1),
    "view-wrong-size": lambda t: t.view(-1, 5),
    "complex-views": lambda t: [torch.complex(t, t).conj().imag, torch.view_as_real(torch.complex(t, t))],
    "storage-resize_": after(lambda t: t.untyped_storage().resize_(0)),
    "storage-resize_-back": after(lambda t: t.untyped_storage().resize_(0).resize_(64)),
    "storage-resize_-grow": after(lambda t: t.untyped_storage().resize_(128)),
    "storage-resize_-negative": after(lambda t: t.untyped_storage().resize_(-1)),
    "typed-storage-resize_": after(lambda t: t._typed_storage()._resize_(0)),
    "copy-onto-itself": lambda t: t[:1].expand(4, 4).copy_(t[:1].expand(4, 4)),
    "write-to-expanded": lambda t: t[:1].expand(4, 4).add_(1),
    "copy-to-overlapping": lambda t: t[1:].copy_(t[:-1]),
    "out-overlaps": lambda t: torch.add(t[:-1], 1, out=t[1:]),
    "swap_tensors": lambda t: swapped(t, t.new_ones(2)),
    "swap_tensors-parameters": lambda t: swapped(nn.Parameter(t), nn.Parameter(t.new_ones(2))),
    "to": lambda t: [t.to(torch.half), t.to("cpu"), t.to("cpu", torch.int64), t.to(t.int()), t.to("meta"), t.double()],
    "to-same": lambda t: (t.to(torch.float32) is t, t.cpu() is t, t.to("cpu") is t, t.to(torch.float32, copy=True)),
    "type": lambda t: [t.type(torch.int8), t.type("torch.DoubleTensor"), t.type(), t.type_as(t.half())],
    "module-to": module_to,
    "to_empty": lambda t: linear_like(t).to_empty(device="cpu").weight,
    "weight_norm": parametrized,
    "spectral_norm": lambda t: nn.utils.parametrizations.spectral_norm(linear_like(t)).weight,
    "assign-item": after(lambda t: t.__setitem__(0, 1.0)),
    "write-to-views": after(lambda t: (t[0].add_(1), t.t().zero_())),
    "write-to-view-of-leaf": lambda t: t.requires_grad_()[0].add_(1),
    "write-to-view-of-result": lambda t: ((b := t.requires_grad_() * 1)[0].mul_(2), b),
    "versions": lambda t: (t._version, t.add_(1)._version, t.detach().add_(1)._version, t.data.add_(1)._version),
    "set-grad": lambda t: setattr(t.requires_grad_(), "grad", t.new_ones(2)),
    "integer-gradient": lambda t: t.int().requires_grad_(),
    "new": lambda t: [
        t.new(),
        t.new(2, 3),
        t.new(torch.Size([2])),
        t.new([1, 2]),
        t.new(t),
        t.new(t.untyped_storage()),
    ],
    "flatten-and-back": lambda t: torch._utils._unflatten_dense_tensors(t.new_ones(32), [t, t]),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t, t.t().contiguous()]),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_affects_fakes_like_real_tensors(
    function: Callable[[torch.Tensor], Any], request: pytest.FixtureRequest
) -> None:
    if "negative-stride" in request.node.name and TORCH_RELEASE < (2, 13):
        pytest.skip("the Meta kernel replaces negative strides by others before 2.13")
    real, fake = torch.ones(4, 4), fake_like(torch.ones(4, 4))
    found, wanted = (outcome(lambda tensor=tensor: described(function(tensor))) for tensor in (fake, real))
    if isinstance(found, Raised) and isinstance(wanted, Raised):  # other tests compare messages
        assert found.error is wanted.error
    else:
        assert found == wanted
    assert is_fake(fake)


@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("function", [torch.neg, torch.linalg.inv, torch.geqrf], ids=lambda function: function.__name__)
def test_a_freed_storage_can_be_computed_with(function: Callable[[torch.Tensor], Any], size: int) -> None:
    fake = fake_like(torch.ones(size, size))
    fake.untyped_storage().resize_(0)
    result = torch.utils._pytree.tree_leaves(function(fake))[0]
    assert result.untyped_storage().nbytes() == 4 * size * size


def test_resizing_the_storage_of_a_deferred_tensor_is_recorded() -> None:
    def make() -> torch.Tensor:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(32)
        return tensor

    deferred = deferred_init(make)
    assert is_deferred(deferred)
    assert deferred.untyped_storage().nbytes() == 32
    assert materialize_tensor(deferred).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert deferred.untyped_storage().nbytes() == 32


def test_real_storages_are_resized_as_before() -> None:
    fake_like(torch.ones(1))
    real = torch.ones(4)
    real.untyped_storage().resize_(32)
    assert real.untyped_storage().nbytes() == 32
    assert real.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert real.new(2).shape == (2,)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.functional.mse_loss,
        nn.functional.smooth_l1_loss,
        nn.functional.huber_loss,
        nn.functional.l1_loss,
        nn.functional.binary_cross_entropy,
        nn.functional.soft_margin_loss,
    ],
)
def test_losses_have_storages_as_large_as_real_ones(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    for sizes in ((3, 50), (3, 50), (1,), (0, 4)):  # repeated: the second result comes from the cache
        real = torch.zeros(sizes)
        expected = described(loss(real, real.clone(), reduction=reduction))
        assert described(loss(fake_like(real), fake_like(real), reduction=reduction)) == expected


@pytest.mark.parametrize("sizes", [(3, 4), (300, 400)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("loss", [nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.functional.soft_margin_loss])
def test_losses_of_two_dtypes_have_storages_as_large_as_real_ones(
    loss: Callable[..., torch.Tensor], dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int]
) -> None:
    x, target = (torch.ones(sizes, dtype=dtype) for dtype in dtypes)
    assert described(loss(fake_like(x), fake_like(target))) == described(loss(x, target))


def test_views_that_must_not_have_been_written_to_are_printed() -> None:
    with fake_mode():
        x = torch.ones(4, requires_grad=True) * 1
        first, _ = x.split(2)
        with torch.no_grad():
            first.mul_(2)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="multiple views"):
            first.grad_fn  # noqa: B018
        assert repr(first) == "tensor(..., size=(2,), dtype=torch.float32, device='cpu', grad_fn=<Invalid>, fake=True)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.functional.fold(torch.ones(1, 8, 9), (4, 4), 2),
        lambda: nn.functional.fold(torch.ones(8, 9), (4, 4), 2),
        lambda: nn.functional.unfold(torch.ones(1, 2, 4, 4), 2),
        lambda: torch.kaiser_window(7),
        lambda: torch.kaiser_window(7, periodic=False),
        lambda: torch.kaiser_window(2, dtype=torch.float64),
        lambda: torch.kaiser_window(1),
    ],
)
def test_storages_that_kernels_make_too_large_are_that_large(make: Callable[[], torch.Tensor]) -> None:
    nbytes = make().untyped_storage().nbytes()
    with fake_mode():
        assert make().untyped_storage().nbytes() == nbytes
    assert deferred_init(make).untyped_storage().nbytes() == nbytes


@pytest.mark.parametrize("source", ["cpu", "meta"])
def test_tensors_take_no_storage_of_another_device(source: str) -> None:
    def take() -> None:
        storage = torch.ones(3, device=source).untyped_storage()
        torch.empty(0, device="cuda").set_(storage, 0, (3,), (1,))

    words = f'storage of a tensor on device "cuda:0" to a storage on different device "{source}"'
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match=words):
        take()
    with fake_mode(gpu=True), pytest.raises(RuntimeError, match=words):
        deferred_init(take)


def move_and_write(first: torch.Tensor, second: torch.Tensor, source: torch.Tensor) -> None:
    first.set_(source)
    second.add_(1)


def swap(first: torch.Tensor, second: torch.Tensor, source: torch.Tensor) -> None:
    storage, shape = first.untyped_storage(), first.shape
    first.set_(second)
    second.set_(storage, 0, shape)


@pytest.mark.parametrize("change", [move_and_write, swap])
def test_operators_that_move_one_argument_leave_the_storages_of_others(change: Callable[..., None]) -> None:
    def arguments() -> tuple[torch.Tensor, ...]:
        if change is swap:
            return torch.zeros(3), torch.zeros(20), torch.zeros(1)
        base = torch.zeros(8)
        return base[:3], base[3:5], torch.zeros(1000)

    with torch.library._scoped_library("torchext_test", "DEF") as library:
        library.define("change(Tensor(a!) first, Tensor(b!) second, Tensor source) -> ()")
        library.impl("change", change, "CompositeExplicitAutograd")
        real = arguments()
        torch.ops.torchext_test.change(*real)
        with fake_mode():
            fakes = arguments()
        torch.ops.torchext_test.change(*fakes)
        assert [(t.shape, t.untyped_storage().nbytes()) for t in fakes] == [
            (t.shape, t.untyped_storage().nbytes()) for t in real
        ]


@pytest.mark.parametrize("overload", ["source_Storage", "source_Storage_storage_offset"])
def test_results_on_the_storage_of_a_real_tensor_are_refused(overload: str) -> None:
    arguments = () if overload == "source_Storage" else (0, (3000,), (1,))
    fake, real = fake_like(torch.ones(6)), torch.ones(6)
    with pytest.raises(
        NotImplementedError, match="returns a view of a real argument although another argument is fake"
    ):
        getattr(torch.ops.aten.set, overload)(fake, real.untyped_storage(), *arguments)


def test_fakes_do_not_grow_the_storages_of_real_tensors() -> None:
    fake, real = fake_like(torch.ones(2)), torch.ones(6)
    with pytest.raises(NotImplementedError, match="would resize the storage of a real tensor from 24 to 12000 bytes"):
        fake.set_(real.untyped_storage(), 0, (3000,), (1,))
    assert fake.shape == (2,)
    assert is_fake(fake)
    fake.set_(real.untyped_storage(), 0, (6,), (1,))
    assert torch.equal(fake, real)


VIEWS_OF_ZEROS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda zeros: zeros.view(3, 2),
    "dtype": lambda zeros: zeros.view(torch.int32),
    "expand": lambda zeros: zeros.expand(2, 2, 3),
    "as_strided": lambda zeros: zeros.as_strided((2,), (1,), 3),
    "transpose": lambda zeros: zeros.t(),
    "select": lambda zeros: zeros[1],
    "slice": lambda zeros: zeros[:, 1:],
    "unbind": lambda zeros: zeros.unbind()[1],
    "reshape": lambda zeros: zeros.reshape(6),
    "alias": torch.ops.aten.alias,
    "detach": lambda zeros: zeros.detach(),
    "negation": lambda zeros: torch._neg_view(zeros),
}


@pytest.mark.parametrize("mode", [fake_mode, deferred_init])
@pytest.mark.parametrize("view", VIEWS_OF_ZEROS.values(), ids=VIEWS_OF_ZEROS)
def test_views_of_zeros_without_memory_stay_such_zeros(view: Callable[[torch.Tensor], torch.Tensor], mode: Any) -> None:
    def run() -> tuple[Any, bool]:
        result = view(torch._efficientzerotensor(2, 3))
        return metadata(result, LOOSE_PROPERTIES), result._is_zerotensor()

    with mode():
        found = run()
    assert found == run()
