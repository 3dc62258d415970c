"""Dropping materialized values and restoring them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from common import BuiltOn, assert_same_module, build_both, memory_in_use, too_large_to_copy
from torch import Tensor, nn

from torchext.deferred_init import (
    defer_again,
    deferred_init,
    explain,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchext.fake import is_fake


@pytest.fixture
def repeated_warnings() -> Iterator[None]:
    """Let PyTorch repeat warnings that it issues once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.plain = [torch.linspace(0, 1, 5)]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def test_tensor_that_is_deferred_again_carries_the_keys_that_it_had() -> None:
    tensor = deferred_init(torch.ones, 4)
    before = str(torch._C._dispatch_keys(tensor))
    materialize_tensor(tensor, retain_graph=True)
    defer_again(tensor)
    assert str(torch._C._dispatch_keys(tensor)) == before


class TestValues:
    @pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as_recorded", "converted"])
    def test_every_materialization_gives_the_same_bits(self, dtype: torch.dtype | None) -> None:
        eager, module = build_both(Model)
        eager.to(dtype)
        for _ in range(3):
            materialize_module(module, dtype=dtype, retain_graph=True)
            assert not is_deferred(module)
            assert_same_module(module, eager, strictly=False)
            defer_again(module)
            assert all(is_deferred(tensor) for tensor in [*named_tensors(module).values(), *module.plain])
            assert module.head.weight.dtype == torch.float32
        materialize_module(module, dtype=dtype)
        assert_same_module(module, eager, strictly=False)

    def test_ways_may_change_from_time_to_time(self) -> None:
        eager, module = build_both(Model)
        for dtype in (torch.float64, None, torch.float16):
            materialize_module(module, dtype=dtype, retain_graph=True)
            defer_again(module)
        materialize_module(module)
        assert_same_module(module, eager, strictly=False)

    def test_recorded_values_are_restored_after_any_change(self) -> None:
        eager, module = build_both(lambda: nn.Linear(3, 3))
        materialize_module(module, retain_graph=True)
        with torch.no_grad():
            module.weight.fill_(7)
            module.bias.t_().add_(1)
        defer_again(module)
        materialize_module(module)
        assert_same_module(module, eager, strictly=False)

    def test_graph_that_saved_changed_values_does_not_use_the_recorded_ones(self) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        materialize_module(module, retain_graph=True)
        with torch.no_grad():
            module.weight.fill_(7)
        x = torch.ones(1, 3, requires_grad=True)
        output = module(x).sum()
        defer_again(module)
        materialize_module(module)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    def test_graph_that_saved_recorded_values_continues(self) -> None:
        module = deferred_init(nn.Linear, 3, 3)
        materialize_module(module, retain_graph=True)
        x = torch.ones(1, 3, requires_grad=True)
        output = module(x).sum()
        defer_again(module)
        materialize_module(module)
        output.backward()
        torch.testing.assert_close(x.grad, module.weight.detach().sum(0, keepdim=True))

    @pytest.mark.usefixtures("repeated_warnings")
    def test_conjugate_views_and_inference_tensors(self) -> None:
        def build() -> list[Tensor]:
            z = torch.complex(torch.arange(3.0), torch.ones(3))
            return [z, z.conj()]

        with torch.inference_mode():
            inference = deferred_init(torch.ones, 2)
        z, conjugate = deferred_init(build)
        for tensor, dtype in ((z, torch.float64), (inference, torch.float16)):
            with pytest.warns(UserWarning, match="discards") if tensor is z else torch.no_grad():
                materialize_tensor(tensor, dtype=dtype, retain_graph=True)
            defer_again(tensor)
            materialize_tensor(tensor)
        assert torch.equal(conjugate.resolve_conj(), build()[1].resolve_conj())
        assert inference.is_inference()
        assert inference.tolist() == [1.0, 1.0]

    def test_operators_on_redeferred_tensors_are_recorded(self) -> None:
        tensor = deferred_init(torch.arange, 3.0)
        materialize_tensor(tensor, retain_graph=True)
        defer_again(tensor)
        tensor.mul_(2)
        assert materialize_tensor(tensor, retain_graph=True).tolist() == [0.0, 2.0, 4.0]
        defer_again(tensor)
        assert materialize_tensor(tensor).tolist() == [0.0, 2.0, 4.0]


class TestIdentity:
    @pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as_recorded", "converted"])
    def test_tensors_ties_and_views_stay(self, dtype: torch.dtype | None) -> None:
        module = deferred_init(Model)
        weight, view, alias = module.head.weight, module.head.weight[1:], module.head.weight.data
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        materialize_module(module, dtype=dtype, retain_graph=True)
        defer_again(module)
        assert module.head.weight is module.embedding.weight is weight is optimizer.param_groups[0]["params"][0]
        assert is_deferred(view)
        assert is_deferred(alias)
        materialize_module(module, dtype=dtype)
        assert alias.data_ptr() == weight.data_ptr() == view.data_ptr() - 4 * weight.element_size()
        module.norm(module.embedding(torch.tensor([1, 2]))).sum().backward()
        assert weight.grad.dtype == weight.dtype

    def test_later_views_have_no_data_until_it_is_back(self) -> None:
        tensor = deferred_init(torch.arange, 3.0)
        view = materialize_tensor(tensor, retain_graph=True)[1:]
        defer_again(tensor)
        with pytest.raises(RuntimeError, match="no data to read"):
            view.add_(1)
        materialize_tensor(tensor)
        tensor.add_(1)
        assert view.tolist() == [2.0, 3.0]

    def test_later_views_of_a_converted_tensor_have_no_data(self) -> None:
        tensor = deferred_init(torch.arange, 3.0)
        view = materialize_tensor(tensor, dtype=torch.float64, retain_graph=True)[1:]
        defer_again(tensor)
        materialize_tensor(tensor)
        with pytest.raises(RuntimeError, match="no data to read"):
            view.add_(1)

    def test_real_tensors_can_be_explained_while_the_recording_is_kept(self) -> None:
        tensor = deferred_init(torch.rand, 3)
        before = str(explain(tensor))
        materialize_tensor(tensor, dtype=torch.float64, retain_graph=True)
        assert str(explain(tensor)) == before


class TestMemory:
    @pytest.mark.cases(1)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as_recorded", "converted"])
    def test_memory_is_freed(self, dtype: torch.dtype) -> None:
        module = deferred_init(lambda: nn.ParameterList(torch.ones(2**24) for _ in range(4)))
        view = module[0].data[1:]
        before = memory_in_use()
        materialize_module(module, dtype=dtype, retain_graph=True)
        assert memory_in_use() - before > 2**28 - 2**25
        late = module[1].data[1:]
        defer_again(module)
        assert memory_in_use() - before < 2**25
        assert is_deferred(view)
        assert not is_fake(late)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as_recorded", "converted"])
    def test_memory_that_numpy_shows_is_not_taken_away(self, dtype: torch.dtype) -> None:
        tensor = deferred_init(torch.arange, 3.0)
        view = tensor[1:]
        array = materialize_tensor(tensor, dtype=dtype, retain_graph=True).numpy()
        array[:] = 7
        defer_again(tensor)
        assert is_deferred(view)
        assert array.tolist() == [7.0, 7.0, 7.0]
        assert materialize_tensor(tensor).tolist() == [0.0, 1.0, 2.0]
        assert view.tolist() == [1.0, 2.0]

    def test_memory_that_numpy_has_let_go_of_is_freed(self) -> None:
        tensor = deferred_init(torch.ones, 2**26)
        before = memory_in_use()
        materialize_tensor(tensor, retain_graph=True).numpy()
        defer_again(tensor)
        assert memory_in_use() - before < 2**25

    def test_recording_goes_with_the_last_tensor(self) -> None:
        real = torch.ones(3)
        watched = weakref.ref(real.untyped_storage())
        tensor = deferred_init(torch.zeros, 3).add_(real)
        materialize_tensor(tensor, retain_graph=True)
        del real
        gc.collect()
        kept = explain(tensor)
        assert "real float32[3]" in str(kept)
        del tensor
        gc.collect()
        assert watched() is None

    def test_recording_is_not_kept_by_default(self) -> None:
        tensor = deferred_init(torch.ones, 3)
        materialize_tensor(tensor, retain_graph=True)
        defer_again(tensor)
        materialize_tensor(tensor)
        with pytest.raises(ValueError, match="the recording of its data was not retained"):
            defer_again(tensor)


class TestErrors:
    def test_parameter_without_a_recording_is_named(self) -> None:
        module = deferred_init(Model)
        materialize_tensor(module.norm.bias)
        materialize_module(module, retain_graph=True)
        with pytest.raises(
            ValueError, match=r"`norm.bias` of shape \(4,\) cannot be deferred again, because the recording"
        ):
            defer_again(module)
        assert not is_deferred(module)

    def test_other_data_is_named(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        materialize_module(module, retain_graph=True)
        module.half()
        with pytest.raises(ValueError, match=r"`weight` of shape \(2, 2\) .* no other data \(as `module.half"):
            defer_again(module)

    def test_resized_tensor_is_refused(self) -> None:
        tensor = deferred_init(torch.ones, 3)
        materialize_tensor(tensor, retain_graph=True).resize_(8)
        with pytest.raises(ValueError, match=r"it shows 32 bytes, but its recording makes 12"):
            defer_again(tensor)
        assert tensor[:3].tolist() == [1.0, 1.0, 1.0]

    def test_values_that_could_not_come_back_are_not_dropped(self) -> None:
        outside = too_large_to_copy()
        module = deferred_init(BuiltOn, outside)
        materialize_module(module, retain_graph=True)
        outside.add_(1)
        with pytest.raises(RuntimeError, match=r"`aten::add.Tensor` was recorded with .* changed in place since"):
            defer_again(module)
        assert not is_deferred(module.first)
        assert module.broken.tolist() == [1.0, 1.0]

    def test_deferred_tensors_and_plain_attributes_that_were_never_deferred_are_left_alone(self) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        module.note = torch.ones(1)
        materialize_tensor(module.weight, retain_graph=True)
        defer_again(module)
        assert is_deferred(module.weight)
        assert is_deferred(module.bias)
        assert module.note.tolist() == [1.0]

    def test_wrong_type_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"defer_again\(\) takes a tensor or a module, but `obj` is a int"):
            defer_again(3)


class TestSwappingRetainedTensors:
    """`torch.utils.swap_tensors()` raises if C++ has weak references to a tensor."""

    def test_recording_goes_with_its_data(self) -> None:
        tensor, other = deferred_init(torch.ones, 3), torch.zeros(3)
        materialize_tensor(tensor, retain_graph=True)
        torch.utils.swap_tensors(tensor, other)
        assert (tensor.tolist(), other.tolist()) == ([0.0] * 3, [1.0] * 3)
        with pytest.raises(ValueError, match="recording of its data was not retained"):
            defer_again(tensor)
        defer_again(other)
        assert is_deferred(other)
        assert materialize_tensor(other, retain_graph=True).tolist() == [1.0] * 3

    def test_both_may_be_retained(self) -> None:
        tensors = [deferred_init(torch.full, (2,), float(i)) for i in range(2)]
        for tensor in tensors:
            materialize_tensor(tensor, retain_graph=True)
        torch.utils.swap_tensors(*tensors)
        for tensor in tensors:
            defer_again(tensor)
        assert [materialize_tensor(tensor).tolist() for tensor in tensors] == [[1.0, 1.0], [0.0, 0.0]]

    def test_tensor_that_was_given_other_data_is_swapped(self) -> None:
        base, view = deferred_init(lambda: (lambda base: (base, base[1:]))(torch.arange(4.0)))
        other_storage = deferred_init(torch.ones, 2)
        for tensor in (base, other_storage):
            materialize_tensor(tensor, retain_graph=True)
        view.data = torch.zeros(3)
        other_storage.set_(torch.zeros(2))
        for tensor in (view, other_storage):
            other = torch.ones(1)
            torch.utils.swap_tensors(tensor, other)
            assert tensor.tolist() == [1.0]

    @pytest.mark.parametrize("has_gradients", [False, True], ids=["without gradients", "with gradients"])
    @pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.to(torch.float16)], ids=["double", "half"])
    def test_module_is_converted_by_swapping(
        self, convert: Callable[[nn.Module], nn.Module], has_gradients: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def made() -> nn.Module:
            torch.manual_seed(0)
            return Model()

        module = deferred_init(made)
        materialize_module(module, retain_graph=True)
        eager = made()
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        for one in (module, eager):
            if has_gradients:
                one.head(one.norm(one.embedding(torch.arange(6)))).sum().backward()
            convert(one)
        assert_same_module(module, eager)
        with pytest.raises(ValueError, match="recording of its data was not retained"):
            defer_again(module)

    def test_state_dict_is_loaded_by_swapping(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = deferred_init(nn.Linear, 2, 2)
        materialize_module(module, retain_graph=True)
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        module.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
        assert module(torch.ones(2)).tolist() == [2.0, 2.0]
