"""A module's own code finds the same state during `load_checkpoint()` as during an eager `load_state_dict()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchext import CheckpointError
from torchext.checkpoint import load_checkpoint
from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor


class NegatesFirst(nn.Linear):
    """Changes its own tensor in place before it is copied."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        state_dict[prefix + "weight"].neg_()
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_views_of_one_tensor_may_be_changed_before_they_are_copied() -> None:
    module = deferred_init(lambda: nn.Sequential(NegatesFirst(), NegatesFirst()))
    both = torch.arange(8.0).view(2, 2, 2)
    load_checkpoint(module, {"0.weight": both[0], "1.weight": both[1]})
    assert [part.weight.tolist() for part in module] == [[[0, -1], [-2, -3]], [[-4, -5], [-6, -7]]]


def test_module_with_a_hook_loads_its_own_state_dict() -> None:
    module = PostHook()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    load_checkpoint(module, module.state_dict())
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


class PostHook(nn.Linear):
    """Computes a buffer from a loaded parameter."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", self.weight.detach().abs().max(), persistent=False)
        self.register_load_state_dict_post_hook(self._derive)

    def _derive(self, module: nn.Module, keys: object) -> None:
        self.scale = self.weight.detach().abs().max()


class PostHookInPlace(PostHook):
    def _derive(self, module: nn.Module, keys: object) -> None:
        self.scale.copy_(self.weight.detach().abs().max())


class OverridesAndCopies(nn.Linear):
    """Its parameter is of a subclass, its buffer in the files, and the copied tensor is used again."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight = OwnParameter(self.weight.data)
        self.register_buffer("scale", torch.ones(3))

    @torch.no_grad()
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        computed = self.weight.sum(0)
        self.scale.copy_(computed)
        computed.zero_()
        self.bias.copy_(self.bias + 1)


class OwnParameter(nn.Parameter):
    pass


class ReadsNumbers(PostHook):
    def _derive(self, module: nn.Module, keys: object) -> None:
        self.number = float(self.weight.detach().sum())
        self.list = self.bias.tolist()


class Overrides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = self.weight.detach().sum()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.scale = self.weight.detach().sum()


class OverridesOutermost(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        keys = super().load_state_dict(*args, **kwargs)
        with torch.no_grad():
            self.weight /= self.weight.norm()
        return keys


class ExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen = 0.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.full((3,), 2.0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = self.weight.detach() @ state.float()
        self.number = float(self.seen.sum())


class ChangesWhatIsLoaded(PostHook):
    def _derive(self, module: nn.Module, keys: object) -> None:
        with torch.no_grad():
            self.weight.mul_(2)
            self.bias[1] = self.weight[0, 0]


class GivesOtherData(PostHook):
    def _derive(self, module: nn.Module, keys: object) -> None:
        self.weight.data = self.weight.data.t().contiguous() + 1


class ReplacesParameter(PostHook):
    def _derive(self, module: nn.Module, keys: object) -> None:
        self.weight = nn.Parameter(self.weight.detach() * 3)


class SecondSeesFirst(nn.Sequential):
    """The hook before the second layer is loaded finds the first one loaded, and the second as constructed."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
        self[1].register_load_state_dict_pre_hook(self._look)

    def _look(self, *args: object) -> None:
        self.seen = float(self[0].weight.detach().sum()), float(self[1].weight.detach().sum())


class Views(nn.Module):
    """Parameters that are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 3)
        self.upper, self.lower = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        self.register_buffer("between", whole[1:3], persistent=False)
        self.register_load_state_dict_post_hook(self._derive)

    def _derive(self, module: nn.Module, keys: object) -> None:
        self.sum = self.between.sum().item()


class ViewsChanged(Views):
    def _derive(self, module: nn.Module, keys: object) -> None:
        with torch.no_grad():
            self.between.zero_()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_load_state_dict_post_hook(self._derive)

    def _derive(self, module: nn.Module, keys: object) -> None:
        self.sum = (self.a.weight + self.b.weight).detach()


class PartlyReal(PostHook):
    def __init__(self) -> None:
        super().__init__()
        if not is_deferred(self.weight):
            return
        materialize_tensor(self.weight)


class Large(nn.Linear):
    """Larger than the tensors that recordings copy."""

    def __init__(self) -> None:
        super().__init__(1024, 300)
        self.register_load_state_dict_post_hook(self._derive)

    def _derive(self, module: nn.Module, keys: object) -> None:
        self.mean = self.weight.detach().mean(0)


CLASSES: list[type[nn.Module]] = [
    *(PostHook, PostHookInPlace, ReadsNumbers, Overrides, OverridesAndCopies, OverridesOutermost, ExtraState),
    *(
        ChangesWhatIsLoaded,
        GivesOtherData,
        ReplacesParameter,
        SecondSeesFirst,
        Views,
        ViewsChanged,
        Tied,
        PartlyReal,
        Large,
    ),
]


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


def contents(module: nn.Module) -> dict[str, Any]:
    """Return the tensors of a module as lists of bytes, so that NaNs and signs of zero count."""
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        for name, value in [*part._parameters.items(), *part._buffers.items(), *vars(part).items()]:
            if isinstance(value, torch.Tensor):
                assert not is_deferred(value), name
                found[f"{prefix}.{name}"] = value.dtype, bytes_of(value)
            elif isinstance(value, (int, float, list, tuple)):
                found[f"{prefix}.{name}"] = value
    return found


def saved_state(cls: type[nn.Module], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(1)
    state = cls().state_dict()
    return {name: value.to(dtype) for name, value in state.items()}


def constructed(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(2)
    return make(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("cls", CLASSES)
def test_own_code_finds_the_eager_state(cls: type[nn.Module], dtype: torch.dtype) -> None:
    eager = constructed(cls)
    eager.load_state_dict(saved_state(cls, dtype))
    module = constructed(deferred_init, cls)
    load_checkpoint(module, saved_state(cls, dtype))
    assert contents(module) == contents(eager)


@pytest.mark.parametrize("cls", CLASSES)
def test_own_code_finds_the_values_of_the_file(cls: type[nn.Module], tmp_path: Path) -> None:
    torch.save(saved_state(cls), tmp_path / "model.pt")
    eager = constructed(cls)
    eager.load_state_dict(saved_state(cls))
    module = constructed(deferred_init, cls)
    load_checkpoint(module, tmp_path / "model.pt")
    assert contents(module) == contents(eager)


@pytest.mark.parametrize("cls", [PostHook, ReadsNumbers, ExtraState, ChangesWhatIsLoaded, Views])
def test_own_code_finds_values_in_the_recorded_dtype(cls: type[nn.Module]) -> None:
    """Like loading followed by `to()`."""
    eager = constructed(cls)
    eager.load_state_dict(saved_state(cls))
    eager.to(torch.float16)
    module = constructed(deferred_init, cls)
    load_checkpoint(module, saved_state(cls), dtype=torch.float16)
    held = {name: tensor.float().tolist() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    assert held == {
        name: tensor.float().tolist() for name, tensor in [*eager.named_parameters(), *eager.named_buffers()]
    }


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not ReplacesParameter and cls is not GivesOtherData])
def test_loaded_tensors_are_restored_on_an_error(cls: type[nn.Module]) -> None:
    module = constructed(deferred_init, cls)
    state = saved_state(cls)
    with pytest.raises(CheckpointError, match="Unexpected key"):
        load_checkpoint(module, {**state, "unexpected": torch.ones(1)})
    expected = constructed(cls)
    materialize_module(module)
    for name, tensor in expected.named_parameters():
        if cls not in (ViewsChanged, ChangesWhatIsLoaded, OverridesOutermost):  # whose hooks write
            assert torch.equal(module.get_parameter(name), tensor), name
    assert {name: value.tolist() for name, value in state.items()} == {
        name: value.tolist() for name, value in saved_state(cls).items()
    }


def test_a_hook_that_raises_leaves_the_values_of_construction() -> None:
    def refuse(module: nn.Module, keys: object) -> None:
        raise ValueError(f"sum {float(module.weight.detach().sum())}")

    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_load_state_dict_post_hook(refuse)
        return module

    module = constructed(deferred_init, make)
    with pytest.raises(ValueError, match=r"sum 9\.0"):
        load_checkpoint(module, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    assert is_deferred(module.weight)
    materialize_module(module)
    assert torch.equal(module.weight, constructed(make).weight)


def test_loaded_tensor_that_changes_after_it_was_copied_is_refused() -> None:
    class Changes(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            state_dict[f"{prefix}bias"].zero_()

    module = constructed(deferred_init, Changes, 3, 3)
    with pytest.raises(CheckpointError, match=r"loaded tensor of shape \(3,\) in place after it was copied .* a clone"):
        load_checkpoint(module, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    materialize_module(module)
    assert torch.equal(module.bias, constructed(Changes, 3, 3).bias)


@pytest.mark.parametrize("change", [lambda t: t.zero_(), lambda t: t.data.zero_(), lambda t: t.numpy().fill(7)])
def test_own_real_tensor_may_change_after_it_was_copied(change: Callable[[torch.Tensor], object]) -> None:
    def derive(module: nn.Module, keys: object) -> None:
        scratch = torch.ones(3)
        with torch.no_grad():
            module.bias.copy_(scratch)
        change(scratch)

    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_load_state_dict_post_hook(derive)
        return module

    module = constructed(deferred_init, make)
    load_checkpoint(module, {"weight": torch.ones(3, 3), "bias": torch.zeros(3)})
    assert module.bias.tolist() == [1, 1, 1]


def test_tensors_kept_by_a_hook_are_not_changed_by_later_writes() -> None:
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, keys: object) -> None:
        kept.append(module.weight.detach() * 2)

    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_load_state_dict_post_hook(keep)
        return module

    module = deferred_init(make)
    load_checkpoint(module, {"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(materialize_tensor(kept[0]), torch.full((3, 3), 2.0))


def test_with_hooks_memory_is_shared_as_without(tmp_path: Path) -> None:
    state = saved_state(PostHook)
    module = constructed(deferred_init, PostHook)
    load_checkpoint(module, state)
    assert module.weight.data_ptr() == state["weight"].data_ptr()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LazyLinear(3), (2, 5)),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d()), (3, 4)),
        (lambda: nn.LazyConv2d(2, 3), (1, 3, 5, 5)),
    ],
)
def test_lazy_modules_get_the_loaded_shapes(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    saved = make()
    saved(torch.randn(shape))
    module = deferred_init(make)
    load_checkpoint(module, saved.state_dict())
    for name, tensor in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert torch.equal(module.eval()(torch.ones(shape)), saved.eval()(torch.ones(shape)))
