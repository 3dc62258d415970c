"""Keeping tensors that are made in inference mode: `normal_tensors()` and `to_normal()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from common import Wrapper
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_mode
from torchext.inference import (
    inference_mode,
    is_inference_mode_enabled,
    is_inference_tensor,
    normal_tensors,
    to_normal,
)

KINDS = ["real", "fake", "deferred"]


def make(kind: str, function: Callable[..., Any], *args: Any) -> Any:
    if kind == "deferred":
        return deferred_init(function, *args)
    with fake_mode() if kind == "fake" else nullcontext():
        return function(*args)


def keys(tensor: Tensor) -> str:
    return str(torch._C._dispatch_keys(tensor))


class Cache:
    """Holds tensors like key-value caches: in attributes, in slots, and in objects in lists."""

    class Layer:
        """Has no `__dict__`."""

        __slots__ = ("keys",)

        def __init__(self) -> None:
            self.keys = torch.ones(2)

    def __init__(self) -> None:
        self.layers = [self.Layer(), self.Layer()]
        self.seen = {"tokens": torch.ones(1)}

    def tensors(self) -> list[torch.Tensor]:
        return [*(layer.keys for layer in self.layers), self.seen["tokens"]]


class TestNormalTensors:
    @pytest.mark.parametrize("kind", KINDS)
    def test_allocates_like_no_grad(self, kind: str) -> None:
        with torch.no_grad():
            wanted = make(kind, torch.ones, 2)
        with inference_mode(), normal_tensors():
            found = make(kind, torch.ones, 2)
            assert not (found * nn.Parameter(torch.ones(2))).requires_grad
        assert keys(found) == keys(wanted)
        assert found._version == 0
        assert not found.requires_grad

    def test_mode_is_on_again_after_the_block(self) -> None:
        with inference_mode():
            with normal_tensors():
                assert not is_inference_mode_enabled()
                assert not torch.is_grad_enabled()
            assert is_inference_mode_enabled()

    def test_acts_like_no_grad_outside_of_the_mode(self) -> None:
        with normal_tensors():
            assert not torch.is_grad_enabled()
            assert torch._C._is_fwd_grad_enabled()
        assert torch.is_grad_enabled()

    def test_mode_nests_in_the_block(self) -> None:
        with normal_tensors():
            with inference_mode():
                assert torch.ones(1).is_inference()
            assert not torch.ones(1).is_inference()

    def test_cache_made_inside_can_be_trained_with(self) -> None:
        weight = nn.Parameter(torch.ones(2))
        with inference_mode():
            computed = torch.full((2,), 3.0)
            with normal_tensors():
                cache = torch.empty(2).copy_(computed)
            cache += 1
        assert cache._version == 2
        (weight * cache).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [4.0, 4.0]

    def test_inference_tensors_stay_inference_tensors(self) -> None:
        with inference_mode():
            tensor = torch.ones(2)
            with normal_tensors():
                assert tensor.view(1, 2).is_inference()
                with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                    tensor.add_(1)

    def test_decorates(self) -> None:
        @normal_tensors()
        def allocate() -> Tensor:
            return torch.ones(1)

        with inference_mode():
            assert not allocate().is_inference()


class TestToNormal:
    @pytest.mark.parametrize("kind", KINDS)
    def test_tensor_is_the_same_as_outside(self, kind: str) -> None:
        wanted = make(kind, torch.ones, 2, 3)
        with inference_mode():
            tensor = make(kind, torch.ones, 2, 3)
        weak = weakref.ref(tensor)
        assert to_normal(tensor) is tensor
        assert weak() is tensor
        assert not is_inference_tensor(tensor)
        assert keys(tensor) == keys(wanted)
        assert tensor._version == 0
        tensor.add_(1)
        assert tensor._version == 1
        result = tensor * nn.Parameter(torch.ones(3))
        assert result.requires_grad
        if kind == "real":
            assert tensor.tolist() == [[2.0] * 3] * 2

    @pytest.mark.parametrize("kind", KINDS)
    def test_module_can_be_trained(self, kind: str) -> None:
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
            model[2].weight.marked = True
            model.plain = {"attribute": [torch.ones(1)]}
            return model

        with inference_mode():
            model = make(kind, build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = list(model.parameters())
        assert to_normal(model) is model
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
        tensors = [*model.parameters(), *model.buffers(), model.plain["attribute"][0]]
        assert not any(tensor.is_inference() for tensor in tensors)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert model[2].weight.marked
        assert [p.requires_grad for p in model.parameters()] == [True] * 6
        if kind == "deferred":
            assert is_deferred(model)
            materialize_module(model)
        x = make("fake" if kind == "fake" else "real", torch.rand, 4, 2)
        model(x).sum().backward()
        old = model[0].weight.detach().clone()
        optimizer.step()
        if kind != "fake":
            assert not torch.equal(model[0].weight, old)
        assert model[1].num_batches_tracked._version == 1

    def test_memory_is_kept_if_it_is_not_shared(self) -> None:
        with inference_mode():
            tensor = torch.ones(4)
        pointer = tensor.data_ptr()
        to_normal(tensor)
        assert tensor.data_ptr() == pointer

    @pytest.mark.parametrize("kind", KINDS)
    def test_memory_is_copied_if_it_is_shared(self, kind: str) -> None:
        with inference_mode():
            tensor = make(kind, torch.arange, 4.0)
            view = tensor[1:3]
        to_normal(view)
        assert not view.is_inference()
        assert tensor.is_inference()
        assert view.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        with inference_mode():
            tensor.zero_()
        assert (view.shape, view.stride(), view.storage_offset()) == ((2,), (1,), 1)
        assert view._version == 0
        if kind == "deferred":
            for one in (view, tensor):
                materialize_tensor(one)
        if kind != "fake":
            assert view.tolist() == [1.0, 2.0]
            assert tensor.tolist() == [0.0] * 4

    @pytest.mark.parametrize("kind", KINDS)
    def test_shared_memory_stays_shared(self, kind: str) -> None:
        with inference_mode():
            base = make(kind, torch.zeros, 4)
            views = {"view": base[1:], "again": (base.view(2, 2), base)}
        to_normal((base, views))
        assert views["again"][1] is base
        views["view"].add_(1)
        assert base._version == 1
        assert views["again"][0]._version == 1
        if kind == "deferred":
            materialize_tensor(base)
        if kind != "fake":
            assert base.tolist() == [0.0, 1.0, 1.0, 1.0]

    def test_change_of_an_alias_reaches_saved_tensors(self) -> None:
        with inference_mode():
            base = torch.ones(4)
            view = base.view(2, 2)
        to_normal([base, view])
        weight = nn.Parameter(torch.ones(4))
        loss = (weight * base).sum()
        view.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_ties_are_kept(self) -> None:
        def tied() -> nn.Module:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            model[1].weight = model[0].weight
            return model

        with inference_mode():
            model = tied()
        to_normal(model)
        assert model[0].weight is model[1].weight
        assert len(list(model.parameters())) == 3

    def test_subclasses_keep_class_and_attributes(self) -> None:
        class Scale(nn.Parameter):
            pass

        with inference_mode():
            scale = Scale(torch.ones(2))
            scale.note = "kept"
        to_normal({"scale": scale})
        assert type(scale) is Scale
        assert scale.note == "kept"
        assert not scale.is_inference()

    def test_wrappers_become_normal_with_their_parts(self) -> None:
        with inference_mode():
            tensor = TwoTensor(torch.ones(2), torch.zeros(2))
        to_normal(tensor)
        assert not any(t.is_inference() for t in (tensor, tensor.a, tensor.b))
        assert (tensor * nn.Parameter(torch.ones(2))).requires_grad

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
    def test_sparse_tensors_become_normal_with_their_members(self, layout: torch.layout) -> None:
        with inference_mode():
            tensor = torch.eye(2).to_sparse(layout=layout)
        to_normal(tensor)
        assert not tensor.is_inference()
        values = tensor._values() if layout is torch.sparse_coo else tensor.values()
        assert not values.is_inference()
        assert torch.equal(tensor.to_dense(), torch.eye(2))

    def test_gradients_become_normal(self) -> None:
        with inference_mode():
            weight = nn.Parameter(torch.ones(2))
            weight.grad = torch.ones(2)
        to_normal(weight)
        assert not weight.grad.is_inference()

    def test_optimizer_state_becomes_normal(self) -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.Adam([weight])
        with inference_mode():
            optimizer.step()
        to_normal(optimizer)
        optimizer.step()
        assert not optimizer.state[weight]["exp_avg"].is_inference()

    def test_conjugate_and_strided_tensors_keep_their_looks(self) -> None:
        with inference_mode():
            tensor = torch.tensor([[1 + 2j, 3j]]).conj().t()
            expanded = torch.ones(1).expand(3)
        to_normal([tensor, expanded])
        assert tensor.is_conj()
        assert tensor.tolist() == [[1 - 2j], [-3j]]
        assert expanded.stride() == (0,)

    def test_normal_tensors_are_left_alone(self) -> None:
        tensor = torch.ones(2, requires_grad=True)
        result = tensor * 2
        version = result.add_(1)._version
        to_normal([tensor, result, 3, None])
        assert result._version == version
        assert result.grad_fn is not None

    def test_inside_of_the_mode_it_does_the_same(self) -> None:
        with inference_mode():
            tensor = torch.ones(2)
            view = tensor[0]
            to_normal(tensor)
            assert not tensor.is_inference()
            assert view.is_inference()
        assert tensor._version == 0

    def test_views_of_a_tensor_that_became_normal_are_tracked(self) -> None:
        with inference_mode():
            tensor = torch.ones(2)
        view = to_normal(tensor).view(1, 2)
        assert view._is_view()
        assert view._base is tensor

    def test_accepts_objects_with_tensors(self) -> None:
        with pytest.raises(TypeError, match="to_normal\\(\\) takes a tensor, .* is a str in which no tensor was found"):
            to_normal("tensor")

    @pytest.mark.parametrize("obj", [3, None, object(), torch.float32, torch.ones], ids=lambda obj: type(obj).__name__)
    def test_objects_without_tensors_are_refused(self, obj: object) -> None:
        with pytest.raises(TypeError, match="in which no tensor was found"):
            to_normal(obj)

    def test_iterators_are_refused(self) -> None:
        with pytest.raises(TypeError, match="is a list_iterator in which no tensor was found"):
            to_normal(iter([torch.ones(1)]))

    @pytest.mark.parametrize("container", [list, dict, Cache])
    def test_cycles_of_containers_end(self, container: type[Any]) -> None:
        with inference_mode():
            tensor = torch.ones(2)
        whole = container()
        if isinstance(whole, list):
            whole += [whole, tensor, (whole,)]
        else:
            held = whole if isinstance(whole, dict) else vars(whole)
            held.update(itself=[whole], tensor=tensor)
        assert to_normal(whole) is whole
        assert not tensor.is_inference()

    @pytest.mark.parametrize("kind", ["lists", "tuples", "attributes of tensors", "objects"])
    def test_depth_of_containers_has_no_limit(self, kind: str) -> None:
        def around(inner: Any) -> Any:
            if kind in ("lists", "tuples"):
                return [inner] if kind == "lists" else (inner,)
            outer = torch.ones(1) if kind == "attributes of tensors" else Cache.__new__(Cache)
            outer.inner = inner
            return outer

        with inference_mode():
            tensor = torch.ones(2)
        nested: Any = tensor
        for _ in range(5000):
            nested = around(nested)
        to_normal(nested)
        assert not tensor.is_inference()

    @pytest.mark.parametrize("where", ["alone", "in an output", "in a module", "in a closure"])
    def test_objects_are_looked_into(self, where: str) -> None:
        with inference_mode():
            cache = Cache()
        module = torch.nn.Linear(1, 1)
        module.cache = cache
        whole = {
            "alone": cache,
            "in an output": {"logits": torch.ones(1), "past": (cache, 3)},
            "in a module": module,
            "in a closure": [lambda: cache],
        }
        assert to_normal(whole[where]) is whole[where]
        assert not any(tensor.is_inference() for tensor in cache.tensors())

    def test_cache_in_the_output_of_a_transformer_becomes_normal(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
        )
        model = transformers.LlamaForCausalLM(config).eval()
        with inference_mode():
            output = model(torch.tensor([[1, 2, 3]]), use_cache=True)
        to_normal(output)
        assert not output.logits.is_inference()
        assert not any(layer.keys.is_inference() for layer in output.past_key_values.layers)
        model(torch.tensor([[4]]), past_key_values=output.past_key_values, use_cache=True).logits.sum().backward()

    @pytest.mark.parametrize("obj", [lambda x: x, lambda x: [x]], ids=["alone", "in a list"])
    def test_wrapper_that_is_swapped_with_its_part_ends(self, obj: Any) -> None:
        with inference_mode():
            wrapper = Wrapper(torch.ones(2))
        part = wrapper.part
        torch.utils.swap_tensors(wrapper, part)
        assert type(part) is Wrapper
        assert part.part is part
        to_normal(obj(part))

    def test_other_layouts_are_refused(self) -> None:
        with inference_mode():
            tensor = torch.ones(2, 2)
            other = torch.ones(2, 2).to_mkldnn()
        with pytest.raises(NotImplementedError, match="layout.*clone"):
            to_normal([tensor, other])
        assert tensor.is_inference()
