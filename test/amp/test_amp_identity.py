"""AmpTensors: creation, propagation, and behavior in operators."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import feed_forward, gradients
from torch import Tensor, nn
from torch.distributed import _composable as composable
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint

from torchext import amp
from torchext.deferred_init import deferred_init, materialize_module
from torchext.fake import fake_mode

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class TestWrap:
    def test_is_in_place_and_returns_its_argument(self) -> None:
        x = torch.ones(2)
        assert amp.to_amp(x) is x
        assert amp.is_amp(x)
        assert amp.to_normal(x) is x
        assert not amp.is_amp(x)

    def test_isinstance_without_a_subclass(self) -> None:
        x = amp.to_amp(torch.ones(2))
        assert isinstance(x, amp.AmpTensor)
        assert type(x) is Tensor
        assert not isinstance(torch.ones(2), amp.AmpTensor)
        assert not isinstance(3, amp.AmpTensor)
        with pytest.raises(TypeError, match="use torchext.amp.to_amp"):
            amp.AmpTensor(torch.ones(2))

    def test_wraps_the_floating_parameters_of_a_module(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        net.count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
        assert amp.to_amp(net) is net
        assert all(amp.is_amp(p) == p.is_floating_point() for p in net.parameters())
        assert not any(map(amp.is_amp, net.buffers()))
        amp.to_normal(net)
        assert not any(map(amp.is_amp, net.parameters()))

    def test_module_needs_no_region(self) -> None:
        net, x = feed_forward(), torch.ones(3, 4)
        with torch.autocast("cpu"):
            wanted = net(x)
        wanted.float().sum().backward()
        wanted_gradients = gradients(net)
        wrapped = amp.to_amp(feed_forward())
        result = wrapped(x)
        result.float().sum().backward()
        assert result.dtype is BF16
        assert torch.equal(result, wanted)
        assert all(map(torch.equal, gradients(wrapped), wanted_gradients))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
    def test_refuses_dtypes_that_have_no_precision(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=f"floating point and complex dtypes, but `obj` has the dtype {dtype}"):
            amp.to_amp(torch.ones(2, dtype=dtype))

    @pytest.mark.parametrize("function", [amp.to_amp, amp.to_normal, amp.is_amp])
    def test_rejects_other_objects(self, function: Callable[..., Any]) -> None:
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) takes a tensor.*is a list"):
            function([torch.ones(1)])


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:, 0],
    "transpose": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "deepcopy": lambda x: copy.deepcopy(x),
    "clone": lambda x: x.clone(),
    "to float64": lambda x: x.to(FP64),
    "to half": lambda x: x.half(),
    "to complex and back": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "split": lambda x: x.split(1)[1],
    "in-place": lambda x: x.mul_(2),
    "list": lambda x: torch.stack([torch.ones(2, 2), x]),
    "Parameter": lambda x: nn.Parameter(x),
    "tuple": lambda x: torch.max(x, 0).values,
    "no_grad": torch.no_grad()(lambda x: x + 1),
    "inference mode": torch.inference_mode()(lambda x: x + 1),
    "foreach": lambda x: torch._foreach_add([torch.ones(2, 2), x], 1)[1],
}

LOST: dict[str, Callable[[Tensor], Any]] = {
    "integers": lambda x: x.long(),
    "view as integers": lambda x: x.view(torch.int32),
    "indices": lambda x: torch.max(x, 0).indices,
    "numbers": lambda x: torch.tensor(x.sum().item()),
    "unwrapped": lambda x: amp.to_normal(x.clone()),
}


# Operators that write `x` to an ordinary tensor.
WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda target, x: target.add_(x),
    "copy_": lambda target, x: target.copy_(x),
    "index": lambda target, x: target.__setitem__(0, x[0]),
    "slice": lambda target, x: target.__setitem__(slice(0, 1), x[:1]),
    "list": lambda target, x: target.__setitem__([0], x[0]),
    "view": lambda target, x: target.view(-1).mul_(x.view(-1)),
    "out": lambda target, x: torch.add(x, 1, out=target),
    "out of a product": lambda target, x: torch.mm(x, x, out=target),
    "scatter_": lambda target, x: target.scatter_(0, torch.zeros(2, 2, dtype=torch.int64), x),
    "foreach": lambda target, x: torch._foreach_add_([target], [x]),
    "foreach copy": lambda target, x: torch._foreach_copy_([target], [x]),
    "lerp_": lambda target, x: target.lerp_(x, 0.5),
    "addcmul_": lambda target, x: target.addcmul_(x, x),
}


class TestPropagation:
    @pytest.mark.parametrize("how", KEPT)
    def test_is_kept_by(self, how: str) -> None:
        x = amp.to_amp(torch.ones(2, 2))
        assert amp.is_amp(KEPT[how](x))

    @pytest.mark.parametrize("how", LOST)
    def test_is_lost_by(self, how: str) -> None:
        assert not amp.is_amp(LOST[how](amp.to_amp(torch.ones(2, 2))))

    def test_views_and_bases_are_distinguished(self) -> None:
        base = torch.ones(2, 2)
        view = base.view(-1)
        amp.to_amp(view)
        assert not amp.is_amp(base)

    def test_gradients_have_it(self) -> None:
        w = amp.to_amp(torch.ones(2, 2, requires_grad=True))
        (torch.ones(2, 2) @ w).float().sum().backward()
        assert w.grad.dtype is FP32
        assert amp.is_amp(w.grad)

    def test_modules_keep_it(self) -> None:
        net = amp.to_amp(feed_forward())
        assert all(map(amp.is_amp, net.state_dict().values()))
        assert all(map(amp.is_amp, copy.deepcopy(net).parameters()))
        assert all(map(amp.is_amp, net.double().float().parameters()))
        net.load_state_dict(feed_forward().state_dict())
        assert all(map(amp.is_amp, net.parameters()))

    def test_lazy_modules_have_it_once_they_are_initialized(self) -> None:
        net = amp.to_amp(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)))
        copied, unwrapped = copy.deepcopy(net), amp.to_normal(copy.deepcopy(net))
        x = torch.ones(2, 3)
        for module in (net, copied):
            assert module(x).dtype is BF16
            assert all(map(amp.is_amp, module.parameters()))
        assert unwrapped(x).dtype is FP32
        assert not any(map(amp.is_amp, unwrapped.parameters()))
        assert not net[0]._forward_pre_hooks

    def test_returned_arguments_are_unchanged(self) -> None:
        target = torch.zeros(2, 2)
        nn.functional.mse_loss(amp.to_amp(torch.ones(2, 2)), target)  # by broadcast_tensors
        assert not amp.is_amp(target)
        assert torch.broadcast_tensors(target, amp.to_amp(torch.ones(2, 2)))[0] is target

    def test_other_elements_of_lists_are_unchanged(self) -> None:
        wrapped, other = amp.to_amp(torch.ones(2)), torch.ones(2)
        torch._foreach_add_([wrapped, other], [torch.ones(2), torch.ones(2)])
        assert [amp.is_amp(x) for x in (wrapped, other)] == [True, False]
        assert [amp.is_amp(x) for x in torch._foreach_mul([wrapped, other], 2)] == [True, False]
        assert [amp.is_amp(x) for x in torch._foreach_pow(2.0, [wrapped, other])] == [True, False]
        assert all(map(amp.is_amp, torch._foreach_mul([wrapped, other], amp.to_amp(torch.tensor(2.0)))))

    def test_scale_of_a_scaler_is_unchanged(self) -> None:
        scaler, layer = torch.amp.GradScaler("cpu"), amp.to_amp(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler.scale(layer(torch.ones(1, 2)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not amp.is_amp(scaler._scale)

    @pytest.mark.parametrize("how", WRITTEN)
    @pytest.mark.parametrize("around", [nullcontext, fake_mode])
    def test_written_tensors_keep_their_kind(self, how: str, around: Callable[[], Any]) -> None:
        with around(), torch.no_grad():
            x = amp.to_amp(torch.ones(2, 2))
            plain, wrapped = torch.zeros(2, 2), amp.to_amp(torch.zeros(2, 2))
            for target in (plain, wrapped):
                WRITTEN[how](target, x)
        assert not amp.is_amp(plain)
        assert amp.is_amp(wrapped)

    @pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
    def test_unwrapped_model_stays_so_when_its_optimizer_steps(self, options: dict[str, bool]) -> None:
        net, x = amp.to_amp(nn.Linear(2, 2)), torch.ones(1, 2)
        optimizer = torch.optim.AdamW(net.parameters(), **options)
        for _ in range(3):
            net(x).float().sum().backward()
            optimizer.step()
            if amp.is_amp(net.weight):
                amp.to_normal(net)
        assert net(x).dtype is FP32
        assert not amp.is_amp(net(x))

    def test_unwraps_optimizers(self) -> None:
        net = amp.to_amp(nn.Linear(2, 2))
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 2)).float().sum().backward()
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        assert any(map(amp.is_amp, state))
        assert amp.to_normal(optimizer) is optimizer
        assert not any(map(amp.is_amp, [*state, *net.parameters(), *(p.grad for p in net.parameters())]))
        with pytest.raises(TypeError, match="to_amp\\(\\) takes a tensor or a module, but `obj` is a Adam"):
            amp.to_amp(optimizer)  # type: ignore[type-var]

    def test_unwraps_tensors_in_attributes_and_objects(self) -> None:
        net = amp.to_amp(nn.Linear(2, 2))
        net.register_buffer("kept", amp.to_amp(torch.ones(2)))
        net.cache = SimpleNamespace(keys=[net(torch.ones(1, 2)).detach()], values={"v": amp.to_amp(torch.ones(1))})
        amp.to_normal(net)
        assert not any(map(amp.is_amp, [net.kept, *net.cache.keys, *net.cache.values.values(), net.weight]))

    def test_average_of_a_wrapped_model_and_a_copy_of_its_state_are_ordinary(self) -> None:
        net, average, other = amp.to_amp(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.5)
            average.weight.lerp_(net.weight, 0.5)
        other.load_state_dict(net.state_dict())
        assert not any(map(amp.is_amp, [*average.parameters(), *other.parameters()]))

    def test_optimizer_that_loads_the_state_of_a_wrapped_one_leaves_its_model_ordinary(self) -> None:
        wrapped, plain = amp.to_amp(nn.Linear(2, 2)), nn.Linear(2, 2)
        first, second = (torch.optim.Adam(net.parameters()) for net in (wrapped, plain))
        for net, optimizer in ((wrapped, first), (plain, second)):
            net(torch.ones(1, 2)).float().sum().backward()
            optimizer.step()
        second.load_state_dict(first.state_dict())
        second.step()
        assert not any(map(amp.is_amp, plain.parameters()))

    def test_sum_of_losses_is_ordinary(self) -> None:
        total = torch.zeros(())
        total += amp.to_amp(torch.ones(()))
        assert not amp.is_amp(total)

    @pytest.mark.parametrize("around", [nullcontext, fake_mode])
    @pytest.mark.parametrize("make", [lambda x: x.new(2), lambda x: x.new_tensor([1.0]), lambda x: x.new_ones(2)])
    def test_factories_of_a_tensor_hand_it_on(
        self, make: Callable[[Tensor], Tensor], around: Callable[[], Any]
    ) -> None:
        with around():
            found = make(amp.to_amp(torch.ones(2, 2)))
        assert amp.is_amp(found)
        assert found.device.type == "cpu"

    def test_factories_of_subclasses_see_their_attributes(self) -> None:
        class Tagged(Tensor):
            tag: str

            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is Tensor.new_tensor:
                    assert args[0].tag == "a"
                return super().__torch_function__(func, types, args, kwargs or {})

        x = amp.to_amp(torch.ones(2).as_subclass(Tagged))
        x.tag = "a"
        assert type(x.new_tensor([1.0])) is Tagged

    def test_lazy_modules_in_lazy_modules_have_it(self) -> None:
        class Scaled(LazyModuleMixin, nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.UninitializedParameter()
                self.child = nn.LazyLinear(3)

            def initialize_parameters(self, x: Tensor) -> None:
                self.scale.materialize((x.shape[-1],))
                nn.init.ones_(self.scale)

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.child(x * self.scale)
                return result

        net = amp.to_amp(Scaled())
        net(torch.ones(2, 4))
        assert all(map(amp.is_amp, net.parameters()))

    def test_integers_in_the_same_call_are_left_alone(self) -> None:
        index = torch.zeros(1, dtype=torch.int64)
        assert amp.is_amp(amp.to_amp(torch.ones(2, 2))[index])
        assert not amp.is_amp(index)

    def test_fakes_have_it(self) -> None:
        with fake_mode(gpu=True):
            layer = amp.to_amp(nn.Linear(2, 2, device="cuda"))
            result = layer(torch.ones(1, 2, device="cuda"))
        assert result.dtype is FP16
        assert amp.is_amp(result)

    def test_deferred_tensors_have_it_before_and_after(self) -> None:
        layer = amp.to_amp(deferred_init(nn.Linear, 2, 2))
        assert layer(torch.ones(1, 2)).dtype is BF16
        materialize_module(layer)
        assert all(map(amp.is_amp, layer.parameters()))
        assert layer(torch.ones(1, 2)).dtype is BF16

    def test_subclasses_have_it(self) -> None:
        class Sub(Tensor):
            pass

        x = amp.to_amp(torch.ones(2, 2).as_subclass(Sub))
        result = x @ x
        assert type(result) is Sub
        assert result.dtype is BF16
        assert amp.is_amp(result)


class TestModules:
    @pytest.mark.parametrize("module", [nn.RNN, nn.LSTM, nn.GRU])
    def test_recurrent_ones_take_the_lower_precision(self, module: Callable[..., nn.Module]) -> None:
        net = nn.Sequential(nn.Linear(4, 4), module(4, 3))
        x = torch.ones(2, 3, 4)
        with torch.autocast("cpu"):
            wanted = net(x)[0]
        found = amp.to_amp(net)(x)[0]
        assert found.dtype is wanted.dtype is BF16
        assert torch.equal(found, wanted)
        with pytest.raises(ValueError, match="does not match weight dtype"):
            net[1](x.double())

    def test_higher_order_operators_run_their_functions(self) -> None:
        x = amp.to_amp(torch.ones(2, 2))
        result = torch.cond(torch.tensor(True), lambda x: x @ x, lambda x: x.t() @ x, (x,))
        assert result.dtype is BF16
        assert amp.is_amp(result)


class TestRegionsDecide:
    @pytest.mark.parametrize("region", [amp.autocast, torch.autocast])
    def test_in_place_of_identity(self, region: Any) -> None:
        net, x = amp.to_amp(feed_forward()), torch.ones(1, 4)
        with region("cpu", enabled=False):
            assert net(x).dtype is FP32
        with region("cpu", dtype=FP16):
            assert net(x).dtype is FP16
        assert net(x).dtype is BF16

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_in_the_backward_of_autograd_functions(self, create_graph: bool) -> None:
        seen = []

        @amp.full_precision
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
                (w,) = ctx.saved_tensors
                seen.append((grad @ w).dtype)
                return grad @ w.t(), None

        x = torch.ones(2, 2, requires_grad=True)
        result = Product.apply(x, amp.to_amp(torch.ones(2, 2)))
        torch.autograd.grad(result.sum(), x, create_graph=create_graph)
        assert seen == [FP32]

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("enabled", [None, True, False])
    def test_in_code_recomputed_by_checkpoint(self, enabled: bool | None, use_reentrant: bool) -> None:
        seen = []
        layer = amp.to_amp(nn.Linear(2, 2))

        def function(x: Tensor) -> Tensor:
            y: Tensor = layer(x)
            seen.append(y.dtype)
            return y * y

        x = torch.ones(2, 2, requires_grad=True)
        with nullcontext() if enabled is None else torch.autocast("cpu", enabled=enabled):
            y = checkpoint(function, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert seen == [FP32 if enabled is False else BF16] * 2

    def test_in_code_recomputed_by_composable_checkpoint(self) -> None:
        seen = []
        net = amp.to_amp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        net[0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
        composable.checkpoint(net)
        net(torch.ones(2, 2, requires_grad=True)).float().sum().backward()
        assert seen == [BF16, BF16]

    def test_float_decorator_computes_in_float32(self) -> None:
        net = amp.to_amp(feed_forward())
        assert amp.full_precision(net.forward)(torch.ones(1, 4)).dtype is FP32


class TestTraining:
    def test_casts_follow_the_optimizer(self) -> None:
        layer = amp.to_amp(nn.Linear(1, 1, bias=False))
        nn.init.constant_(layer.weight, 1.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        assert layer(torch.ones(1, 1)).item() == 1.0
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert layer(torch.ones(1, 1)).item() == 0.0

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.parametrize("around", ["nothing", "disabled region"])
    def test_checkpoint_recomputes_in_the_same_dtypes(self, use_reentrant: bool, around: str) -> None:
        net, plain = amp.to_amp(feed_forward()), amp.to_amp(feed_forward())
        x, y = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
        result = checkpoint(net, x, use_reentrant=use_reentrant)
        assert result.dtype is BF16
        with amp.autocast("cpu", enabled=around == "nothing") if around != "nothing" else torch.enable_grad():
            result.float().sum().backward()
        plain(y).float().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert all(map(torch.equal, gradients(net), gradients(plain)))

    def test_second_derivatives(self) -> None:
        w = amp.to_amp(torch.full((2, 2), 3.0, requires_grad=True))
        loss = (w @ w).float().sum()
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        grad.sum().backward()
        assert w.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]

    def test_grad_of_torch_func(self) -> None:
        net, x = amp.to_amp(feed_forward()), torch.ones(3, 4)

        def loss(parameters: dict[str, Tensor]) -> Tensor:
            result = torch.func.functional_call(net, parameters, (x,))
            assert result.dtype is BF16
            return result.float().sum()

        found = torch.func.grad(loss)({k: v.detach() for k, v in net.named_parameters()})
        assert all(map(amp.is_amp, found.values()))
        net(x).float().sum().backward()
        assert all(map(torch.equal, found.values(), gradients(net)))

    def test_results_of_torch_func_have_it(self) -> None:
        x = amp.to_amp(torch.ones(2, 2))
        value, tangent = torch.func.jvp(lambda x: x @ x, (x,), (torch.ones(2, 2),))
        gradient = torch.func.grad(lambda x: (x @ x).float().sum())(x)
        assert all(map(amp.is_amp, [value, tangent, gradient]))
        assert not amp.is_amp(torch.func.grad(lambda x: (x @ x).sum())(torch.ones(2, 2)))

    def test_functions_in_torch_func_hand_it_on(self) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(x: Tensor, w: Tensor) -> Tensor:
                return x @ w

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
                x, w = ctx.saved_tensors
                return grad @ w.t(), x.t() @ grad

        def loss(x: Tensor) -> Tensor:
            y = Product.apply(x, w)
            assert amp.is_amp(y)
            return (y @ torch.ones(2, 2)).float().sum()

        w = amp.to_amp(torch.ones(2, 2))
        assert torch.func.grad(loss)(torch.ones(2, 2)).tolist() == [[4.0, 4.0], [4.0, 4.0]]

    def test_manual_recomputation_autocasts(self) -> None:
        layer, seen = amp.to_amp(nn.Linear(2, 2)), []

        class Recomputed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return layer(x)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    y = layer(x.detach().requires_grad_())
                seen.append(y.dtype)
                torch.autograd.backward(y, grad)
                return grad

        Recomputed.apply(torch.ones(2, 2, requires_grad=True)).float().sum().backward()
        assert seen == [BF16]

    def test_vmap_autocasts_as_a_region_does(self) -> None:
        w, x = torch.ones(4, 4), torch.ones(3, 4, 4)
        with torch.autocast("cpu"):
            wanted = torch.vmap(lambda row: torch.mm(row, w))(x)
        found = torch.vmap(lambda row: torch.mm(row, amp.to_amp(w)))(x)
        assert found.dtype is wanted.dtype is BF16
        assert amp.is_amp(found)

    def test_threads_need_no_separate_region(self) -> None:
        net, found = amp.to_amp(feed_forward()), []
        threads = [threading.Thread(target=lambda: found.append(net(torch.ones(1, 4)).dtype)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [BF16] * 4


COMPILED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "grad": (torch.func.grad(lambda x: (x * x).sum()), (2,)),
    "vmap of jacrev": (torch.func.vmap(torch.func.jacrev(lambda x: x * x)), (2, 2)),
    "new_tensor": (lambda x: x.new_tensor([1.0]) + x, (2,)),
    "checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), (2,)),
}


class TestOthers:
    """Code without AmpTensors is not affected by existing ones."""

    @pytest.mark.cases(3)
    @pytest.mark.parametrize("name", COMPILED)
    def test_compiles_as_one_graph(self, name: str) -> None:
        amp.to_amp(torch.ones(1))
        function, shape = COMPILED[name]
        x = torch.ones(shape)
        assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))

    def test_modules_with_an_unused_attribute_are_exported(self) -> None:
        net, x = nn.Linear(4, 4), torch.ones(2, 4)
        net.note = amp.to_amp(torch.ones(1))  # type: ignore[assignment]
        program = torch.export.export(net, (x,), strict=True)
        assert torch.equal(program.module()(x), net(x))

    def test_recurrent_modules_are_exported(self) -> None:
        amp.to_amp(torch.ones(1))
        net, x = nn.LSTM(4, 4), torch.ones(2, 3, 4)
        program = torch.export.export(net, (x,), strict=True)
        assert torch.equal(program.module()(x)[0], net(x)[0])


def test_unwrapping_skips_cache_entries_of_other_objects() -> None:
    @functools.lru_cache
    def get(name: str) -> nn.Module:
        return nn.Linear(2, 2)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = get

    other = amp.to_amp(get("other"))
    amp.to_normal(Calls())
    assert amp.is_amp(other.weight)
