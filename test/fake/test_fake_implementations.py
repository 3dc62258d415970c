"""Functions of `torch.library.register_fake` run on fakes, so results are those of the operators that they call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
import torch.distributed._functional_collectives as functional_collectives
from comparisons import PROPERTIES, metadata
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake
from torchext.memory import track_memory

# How custom operators usually compute, and how their fake implementations make their results.
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "cat": lambda x: torch.cat([x, x]),
    "channels_last": lambda x: (
        functional.conv2d(x.expand(2, 3, 4, 4), x.new_zeros(2, 3, 3, 3)) if x.dim() == 4 else x.abs()
    ),
    "clone": torch.clone,
    "cumsum": lambda x: x.cumsum(-1),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "empty": lambda x: torch.empty(x.shape, device=x.device),
    "empty_like": torch.empty_like,
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape).clone(),
    "flip": lambda x: x.flip(0),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "mm": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, x.stride()),
    "rand_like": torch.rand_like,
    "sum": lambda x: x.sum(0, keepdim=True),
    "to": lambda x: x.to(torch.float64),
    "where": lambda x: torch.where(x > 0, x, -x),
}
# Most have dimensions of length 1 with strides that contiguous tensors do not have.
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last, one channel": lambda: torch.rand(2, 1, 4, 4).to(memory_format=torch.channels_last),
    "channels last, one pixel": lambda: torch.rand(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "contiguous": lambda: torch.rand(3, 4),
    "expanded": lambda: torch.rand(5, 1).expand(5, 3),
    "sliced": lambda: torch.rand(4, 5, 7)[:, :1],
    "strided": lambda: torch.rand(4, 7)[:, None].as_strided((4, 1, 7), (7, 100, 1)),
    "transposed": lambda: torch.rand(1, 4, 7).transpose(0, 1),
    "with gaps": lambda: torch.rand(4, 1, 7)[:, :, ::2],
}
COMPARED = (PROPERTIES | {"storage_offset", "storage_size"}) - {"class"}  # with all strides


def custom(
    name: str, implementation: Callable[..., object], fake: Callable[..., object], schema: str
) -> Callable[..., object]:
    operator = torch.library.custom_op(f"torchext_fake::{name}", implementation, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


OPERATORS = {name: custom(name, formula, formula, "(Tensor x) -> Tensor") for name, formula in FORMULAS.items()}


def refuse_to_run(*args: object) -> object:
    raise AssertionError("the implementation for real tensors runs on fakes")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMULAS)
def test_results_have_the_metadata_of_real_ones(name: str, layout: str) -> None:
    operator, make = OPERATORS[name], LAYOUTS[layout]
    expected = metadata(operator(make()), COMPARED)
    assert metadata(operator(fake_like(make())), COMPARED) == expected
    assert metadata(deferred_init(lambda: operator(make())), COMPARED) == expected
    with fake_mode():
        assert metadata(operator(make()), COMPARED) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", [name for name in FORMULAS if name not in ("channels_last", "dropout")]
)  # differ on CUDA
def test_results_on_fake_gpus_have_the_metadata_of_real_ones(name: str, layout: str) -> None:
    expected = OPERATORS[name](LAYOUTS[layout]())
    with fake_mode(gpu=2):
        x = torch.empty_strided(LAYOUTS[layout]().shape, LAYOUTS[layout]().stride(), device="cuda:1")
        found = OPERATORS[name](x)
    assert isinstance(expected, Tensor)
    assert isinstance(found, Tensor)
    assert found.device == torch.device("cuda:1")
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())


def test_implementation_sees_and_chooses_devices() -> None:
    seen: list[torch.device] = []

    def fake(x: Tensor, y: Tensor) -> list[Tensor]:
        seen.extend([x.device, y.device])
        return [x.new_empty(2), y.new_empty(2), torch.empty(2), torch.empty(2, device=x.device)]

    operator = custom("devices", refuse_to_run, fake, "(Tensor x, Tensor y) -> Tensor[]")
    with fake_mode(gpu=2):
        results = operator(torch.empty(3, device="cuda:1"), torch.empty(3))
    assert list(map(str, seen)) == ["cuda:1", "cpu"]
    assert isinstance(results, list)
    assert [str(result.device) for result in results] == ["cuda:1", "cpu", "cpu", "cuda:1"]
    assert all(map(is_fake, results))


def test_temporary_tensors_are_not_counted_and_nothing_is_drawn() -> None:
    def fake(x: Tensor) -> Tensor:
        temporary = torch.rand(2**20, device=x.device) + torch.rand(2**20).to(x.device)
        return torch.empty_like(temporary[:128])

    operator = custom("temporary", refuse_to_run, fake, "(Tensor x) -> Tensor")
    with fake_mode(gpu=1):
        x = torch.empty(128, device="cuda")
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        with track_memory() as memory:
            result = operator(x)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert isinstance(result, Tensor)
    assert memory.peak_allocated("cuda").allocated == 2 * 512
    with pytest.raises(ValueError, match="Nothing was allocated on 'cpu'"):
        memory.peak_allocated("cpu")


@pytest.mark.parametrize(
    "size",
    [
        lambda x: int(torch.tensor(3)),
        lambda x: int(max(torch.tensor(3), torch.tensor(2))),
        lambda x: int(torch.tensor(x.shape).prod()) // 4 + 2,
        lambda x: torch.tensor([2, 3]).tolist()[1],
        lambda x: int(torch.arange(4)[-1].item()),
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)).numel(),
        lambda x: torch.repeat_interleave(torch.empty(2), torch.tensor([1, 2])).numel(),
    ],
)
def test_constants_of_an_implementation_have_values(size: Callable[[Tensor], int]) -> None:
    computed: list[Tensor] = []
    operator = custom("constant", computed.append, lambda x: x.new_empty(size(x)), "(Tensor x) -> Tensor")
    results = [operator(fake_like(torch.ones(4))), deferred_init(lambda: operator(torch.ones(4)))]
    with fake_mode():
        results.append(operator(torch.ones(4)))
    assert [result.shape for result in results if isinstance(result, Tensor)] == [(3,)] * 3
    assert not computed


def test_values_of_results_are_those_of_the_real_implementation() -> None:
    operator = custom("returning", refuse_to_run, lambda x: torch.tensor([1.0, 2.0]), "(Tensor x) -> Tensor")
    with fake_mode():
        result = operator(torch.ones(3))
        assert isinstance(result, Tensor)
        with pytest.raises(DataDependentError, match="needs the values of its arguments"):
            result[0].item()


class Wrapper(Tensor):
    """A subclass that has no memory."""

    def __new__(cls, inner: Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        return function(*tree_map_only(Wrapper, lambda wrapper: wrapper.inner, args), **(kwargs or {}))


def test_implementation_may_make_tensors_of_subclasses() -> None:
    operator = custom("wrapping", refuse_to_run, lambda x: Wrapper(x) + 1, "(Tensor x) -> Tensor")
    result = operator(fake_like(torch.ones(4)))
    assert isinstance(result, Tensor)
    assert result.shape == (4,)


def test_calls_of_an_implementation_reach_no_mode() -> None:
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    operator = custom("seen", refuse_to_run, lambda x: torch.empty_like(x) + 1, "(Tensor x) -> Tensor")
    x = fake_like(torch.ones(4))
    with Seeing():
        operator(x)
    assert seen == ["torchext_fake.seen.default"]


def test_collectives_of_an_implementation_send_nothing(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:

        def fake(x: Tensor) -> Tensor:
            distributed.barrier()
            whole = functional_collectives.all_reduce(x, "sum", distributed.group.WORLD).clone()
            distributed.all_reduce(whole)
            return whole

        operator = custom("gathering", refuse_to_run, fake, "(Tensor x) -> Tensor")
        result = operator(fake_like(torch.ones(4)))
    finally:
        distributed.destroy_process_group()
    assert isinstance(result, Tensor)
    assert result.shape == (4,)


def test_memory_may_be_pinned_and_devices_may_be_meta() -> None:
    def fake(x: Tensor, y: Tensor) -> list[Tensor]:
        pinned = torch.empty(2 if y.is_pinned() else 1, pin_memory=True)
        return [pinned, torch.empty(2, device="meta")]

    operator = custom("pinning", refuse_to_run, fake, "(Tensor x, Tensor y) -> Tensor[]")
    with fake_mode(gpu=1):
        results = operator(torch.empty(2, device="cuda"), torch.empty(2, pin_memory=True))
    assert isinstance(results, list)
    assert [str(result.device) for result in results] == ["cpu", "meta"]
    assert [result.is_pinned() for result in results] == [True, False]
    assert results[0].shape == (2,)


def test_reading_values_is_refused_with_the_error_of_fakes() -> None:
    operator = custom("reading", refuse_to_run, lambda x: x.new_empty(int(x.sum())), "(Tensor x) -> Tensor")
    with pytest.raises(DataDependentError, match="needs the values of its arguments"):
        operator(fake_like(torch.ones(3)))


def test_errors_of_an_implementation_are_those_of_the_program() -> None:
    def fake(x: Tensor) -> Tensor:
        raise ValueError("x must have two dimensions")

    operator = custom("raising", refuse_to_run, fake, "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="x must have two dimensions"):
        operator(fake_like(torch.ones(3)))


def test_arguments_follow_what_an_implementation_does_to_them() -> None:
    library = torch.library.Library("torchext_fake", "FRAGMENT")
    library.define("grow(Tensor(a!) x) -> ()")
    library.define("rest(Tensor(a) x) -> Tensor(a)")

    def grow(x: Tensor) -> None:
        x.resize_(7, 2)

    torch.library.register_fake("torchext_fake::grow", grow, lib=library)
    torch.library.register_fake("torchext_fake::rest", lambda x: x[1:], lib=library)
    x = fake_like(torch.ones(3))
    torch.ops.torchext_fake.grow(x)
    assert (x.shape, x.untyped_storage().nbytes()) == ((7, 2), 56)
    rest = torch.ops.torchext_fake.rest(x)
    assert (rest.shape, rest.storage_offset()) == ((6, 2), 2)
    assert rest.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_kernels_for_the_meta_device_still_get_meta_tensors() -> None:
    library = torch.library.Library("torchext_fake", "FRAGMENT")
    library.define("on_meta(Tensor x) -> Tensor")

    def on_meta(x: Tensor) -> Tensor:
        assert x.is_meta
        return torch.empty(x.shape, device="meta")

    library.impl("on_meta", on_meta, "Meta")
    with fake_mode(gpu=1):
        assert torch.ops.torchext_fake.on_meta(torch.empty(3, device="cuda")).device.type == "cuda"


def test_deferred_result_is_computed_by_the_real_implementation() -> None:
    made = deferred_init(lambda: OPERATORS["add"](torch.ones(2, 1).t()))
    assert isinstance(made, Tensor)
    assert torch.equal(materialize_tensor(made), torch.full((1, 2), 2.0))
