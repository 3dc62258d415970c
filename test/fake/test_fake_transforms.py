"""`torch.func`, modes, subclasses and compilers on fakes, and PyTorch's FakeTensorMode together with ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from common import RecordFunctions, RecordOperators, in_fake_mode
from comparisons import PROPERTIES, metadata
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchext.deferred_init import deferred_init
from torchext.fake import fake_like, fake_mode, is_fake

Make = Callable[..., Any]


def real(*shape: int | nn.Module) -> Any:
    return shape[0] if isinstance(shape[0], nn.Module) else torch.rand(*shape)


def fake(*shape: int | nn.Module) -> Any:
    return fake_like(real(*shape))


def on_second_gpu(*shape: int | nn.Module) -> Any:
    return fake_like(real(*shape), device="cuda:1")


def per_sample_gradients(make: Make) -> Any:
    module = make(nn.Linear(4, 4))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, parameters, (x,)).sum()

    return vmap(grad(loss), in_dims=(None, 0))(parameters, make(3, 4))


def ensemble(make: Make) -> Any:
    modules = [make(nn.Linear(4, 4)) for _ in range(3)]
    parameters, buffers = stack_module_state(modules)

    def run(parameters: Any, buffers: Any, x: torch.Tensor) -> Any:
        return functional_call(modules[0], (parameters, buffers), (x,))

    return vmap(run, in_dims=(0, 0, None))(parameters, buffers, make(2, 4))


def called_functionally(make: Make) -> Any:
    module = make(nn.Linear(4, 4))
    return functional_call(module, {k: v * 2 for k, v in module.named_parameters()}, (make(2, 4),))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    x.requires_grad_()
    function(x).sum().backward()
    return x.grad


def recomputed(x: torch.Tensor, use_reentrant: bool = False) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x * 2, use_reentrant=use_reentrant)


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def with_backward_hook(x: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x.register_hook(hook)
    return x


TRANSFORMS: dict[str, Callable[[Make], Any]] = {
    "vmap": lambda make: vmap(torch.dot)(make(3, 4), make(3, 4)),
    "vmap-dims": lambda make: vmap(lambda a, b: (a + b, a.sum()), (0, 1), (1, 0))(make(3, 4), make(4, 3)),
    "vmap-unbatched": lambda make: vmap(torch.mul, (0, None))(make(3, 4), make(4)),
    "vmap-of-vmap": lambda make: vmap(vmap(torch.dot))(make(2, 3, 4), make(2, 3, 4)),
    "vmap-chunks": lambda make: vmap(torch.sum, chunk_size=2)(make(5, 4)),
    "vmap-in-place": lambda make: vmap(lambda a: a.mul_(2))(make(5, 4)),
    "vmap-factories": lambda make: vmap(lambda a: a + torch.ones(4) + a.new_zeros(4))(make(3, 4)),
    "vmap-random": lambda make: vmap(lambda a: a + torch.rand_like(a), randomness="different")(make(3, 4)),
    "vmap-random-same": lambda make: vmap(lambda a: a + torch.rand(4), randomness="same")(make(3, 4)),
    "vmap-dropout": lambda make: vmap(lambda a: torch.dropout(a, 0.5, True), randomness="different")(make(3, 4)),
    "grad": lambda make: grad(lambda a: (a * a).sum())(make(3)),
    "grad_and_value": lambda make: grad_and_value(lambda a: (a * a).sum())(make(3)),
    "grad-of-grad": lambda make: grad(lambda a: grad(lambda b: (b**3).sum())(a).sum())(make(3)),
    "vmap-of-grad": lambda make: vmap(grad(lambda a: (a * a).sum()))(make(3, 4)),
    "per-sample-gradients": per_sample_gradients,
    "ensemble": ensemble,
    "functional_call": called_functionally,
    "jvp": lambda make: jvp(torch.sin, (make(3),), (make(3),)),
    "vjp": lambda make: vjp(torch.sin, make(3))[1](make(3)),
    "jacrev": lambda make: jacrev(lambda a: a**2)(make(3)),
    "jacfwd": lambda make: jacfwd(lambda a: a**2)(make(3)),
    "hessian": lambda make: hessian(lambda a: (a**3).sum())(make(3)),
    "linearize": lambda make: linearize(torch.sin, make(3))[1](make(3)),
    "functionalize": lambda make: functionalize(lambda a: a.add(1).mul_(2))(make(3)),
    "autograd.grad": lambda make: torch.autograd.grad(
        (x := make(3).requires_grad_()).sin().sum(), x, create_graph=True
    ),
    "autograd.Function": lambda make: gradient_of(Square.apply, make(3)),
    "checkpoint": lambda make: gradient_of(recomputed, make(3)),
    "reentrant-checkpoint": lambda make: gradient_of(partial(recomputed, use_reentrant=True), make(3)),
    "batched-gradients": lambda make: torch.autograd.grad(
        (x := make(3).requires_grad_()).sin(), x, make(2, 3), is_grads_batched=True
    ),
    "backward-in-a-hook": lambda make: gradient_of(
        lambda x: with_backward_hook(x * 2, lambda g: grad(sine)(g)), make(3)
    ),
    "backward-in-backward": lambda make: gradient_of(
        lambda x: with_backward_hook(x * 2, torch.enable_grad()(partial(gradient_of, torch.sin))), make(3)
    ),
    "gradient-edge": lambda make: torch.autograd.grad(
        (x := make(3).requires_grad_()).sin().sum(), torch.autograd.graph.get_gradient_edge(x)
    ),
    "from-gradient-edge": lambda make: torch.autograd.grad(
        torch.autograd.graph.get_gradient_edge((x := make(3).requires_grad_()).sin().sum()), x
    ),
    "functional.jacobian": lambda make: torch.autograd.functional.jacobian(torch.sin, make(3), vectorize=True),
    "functional.hessian": lambda make: torch.autograd.functional.hessian(sine, make(3)),
    "vjp-with-aux": lambda make: vjp(lambda a: (a.sin(), a), make(3), has_aux=True)[1](make(3)),
    "vjp-of-vjp": lambda make: vjp(lambda a: vjp(torch.sin, a)[1](a)[0], make(3))[1](make(3)),
    "jvp-of-grad": lambda make: jvp(grad(sine), (make(3),), (make(3),)),
    "grad-of-vmap": lambda make: grad(lambda a: vmap(torch.sin)(a).sum())(make(2, 3)),
    "grad-of-functional_call": lambda make: grad(lambda w, m: functional_call(m, {"weight": w}, (make(2, 4),)).sum())(
        make(4, 4), make(nn.Linear(4, 4))
    ),
    "no_grad": lambda make: torch.no_grad()(torch.sin)(make(3).requires_grad_()),
}


class TestTransforms:
    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by linearize()
    @pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
    def test_results_are_fake_and_those_of_real_tensors(self, transform: Callable[[Make], Any]) -> None:
        result = transform(fake)
        assert metadata(result) == metadata(transform(real))
        assert all(map(is_fake, pytree.tree_leaves(result)))

    # On the second one, because the autograd engine switches devices.
    @pytest.mark.skipif(torch.cuda.is_available(), reason="real CUDA devices are not faked")
    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
    @pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
    def test_results_on_a_fake_gpu_are_those_of_the_cpu(self, transform: Callable[[Make], Any]) -> None:
        wanted = metadata(transform(fake), PROPERTIES - {"device"})
        with fake_mode(gpu=2), torch.device("cuda:1"):
            result = transform(on_second_gpu)
            assert torch.cuda.current_device() == 0
        assert metadata(result, PROPERTIES - {"device"}) == wanted
        assert {str(tensor.device) for tensor in pytree.tree_leaves(result)} == {"cuda:1"}

    def test_errors_of_vmap_are_its_own(self) -> None:
        with pytest.raises(RuntimeError, match="vmap: called random operation while in randomness error mode"):
            vmap(lambda a: a + torch.rand_like(a))(fake(3, 4))

    def test_inference_mode_makes_inference_tensors(self) -> None:
        with torch.inference_mode():
            assert (fake(3) * 2).is_inference()


def calls_seen(mode: RecordOperators | RecordFunctions, make: Make) -> list[str]:
    weight, x = make(4, 4).requires_grad_(), make(3, 4)
    with mode:
        y = nn.functional.layer_norm(x @ weight, (4,)).softmax(-1) + torch.arange(4)
        z = torch.cat([y[1:].add_(1), torch.zeros(1, 4)])
        z.sum().backward()
        z.detach().to(torch.half).contiguous()
    return mode.seen


class TestModes:
    @pytest.mark.parametrize("mode", [RecordOperators, RecordFunctions])
    @pytest.mark.parametrize("is_in_fake_mode", [False, True], ids=["outside", "in-fake-mode"])
    def test_modes_see_the_calls_that_they_see_on_real_tensors(
        self, mode: type[RecordOperators] | type[RecordFunctions], is_in_fake_mode: bool
    ) -> None:
        expected = calls_seen(mode(), real)
        if is_in_fake_mode:
            with fake_mode():
                seen = calls_seen(mode(), fake)
        else:
            seen = calls_seen(mode(), fake)
        assert seen == expected

    def test_a_mode_may_answer_itself(self) -> None:
        class Sevens(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return torch.full((2,), 7.0) if func is torch.ops.aten.sin.default else func(*args, **(kwargs or {}))

        x = fake(3)
        with Sevens():
            assert x.sin().tolist() == [7.0, 7.0]
            assert is_fake(x.cos())

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_device_contexts_have_their_effect(self, device: str) -> None:
        x = fake(2)
        with fake_mode(), torch.device(device):
            tensors = [torch.ones(2), nn.Linear(2, 2).weight]
            assert torch.ones(2, device="cpu").device.type == "cpu"
            assert (x + 1).device.type == "cpu"
        assert {tensor.device.type for tensor in tensors} == {device}
        assert all(map(is_fake, tensors))

    def test_fake_cuda_can_be_the_device_of_a_context(self) -> None:
        with fake_mode(gpu=True), torch.device("cuda"):
            assert nn.Linear(2, 2).weight.is_cuda

    def test_defaults_have_their_effect(self) -> None:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        try:
            with fake_mode():
                tensor, constant = torch.ones(2), torch.tensor([1.0], device="cpu")
                quotient = torch.ones(2, dtype=torch.int64) / 2
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        assert tensor.is_meta
        assert is_fake(constant)
        assert tensor.dtype == constant.dtype == quotient.dtype == torch.float64

    def test_flops_are_counted(self) -> None:
        def flops(make: Make) -> int:
            module, x = make(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5))), make(2, 3, 8, 8)
            attention, query = make(nn.MultiheadAttention(8, 2, batch_first=True)), make(2, 5, 8)
            with FlopCounterMode(display=False) as counter:
                module(x).sum().backward()
                attention(query, query, query)[0].sum().backward()
            return counter.get_total_flops()

        assert flops(fake) == flops(real) > 0


class TestSubclassesAndCompilers:
    def test_wrappers_wrap_fakes(self) -> None:
        x = fake(3)
        result = (TwoTensor(x, x) * 2).sin()
        assert type(result) is TwoTensor
        assert is_fake(result.a)
        assert is_fake(result.b)

    @pytest.mark.parametrize("is_in_fake_mode", [False, True], ids=["outside", "in-fake-mode"])
    def test_compiled_functions_return_fakes(self, is_in_fake_mode: bool) -> None:
        torch.compiler.reset()
        module = torch.compile(nn.Linear(3, 2), backend="eager")
        if is_in_fake_mode:
            with fake_mode():
                result = module(torch.ones(4, 3))
        else:
            result = module(fake(4, 3))
        assert is_fake(result)
        assert result.shape == (4, 2)

    def test_tracers_take_fakes(self) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        x = fake(3)
        for tracing_mode in ("real", "fake"):
            code = make_fx(lambda a: a.sin() + 1, tracing_mode=tracing_mode)(x).code
            assert "aten.sin" in code
        assert "linear" in str(torch.export.export(nn.Linear(3, 2), (x,)).graph)


class TestFakeTensorMode:
    def test_the_innermost_mode_decides(self) -> None:
        def kind() -> tuple[type, bool]:
            tensor = torch.ones(2) + 1
            return type(tensor), is_fake(tensor)

        ours, theirs, neither = (torch.Tensor, True), (FakeTensor, False), (torch.Tensor, False)
        with fake_mode():
            assert kind() == ours
            with FakeTensorMode():
                assert kind() == theirs
                with fake_mode(), fake_mode():
                    assert kind() == ours
                assert kind() == theirs
            assert kind() == ours
        assert kind() == neither
        with FakeTensorMode() as mode, mode:
            with fake_mode(), mode:
                assert kind() == theirs
            assert kind() == theirs
        assert kind() == neither

    def test_both_are_left_when_the_block_raises(self) -> None:
        for outer, inner in ((fake_mode, FakeTensorMode), (FakeTensorMode, fake_mode)):
            with pytest.raises(ZeroDivisionError), outer(), inner():
                1 / 0  # noqa: B018
        assert type(torch.ones(1)) is torch.Tensor
        assert not is_fake(torch.ones(1))

    def test_modules_are_of_one_kind(self) -> None:
        with fake_mode(), FakeTensorMode():
            assert isinstance(nn.Linear(2, 2)(torch.ones(1, 2)), FakeTensor)

    def test_our_fakes_are_refused(self) -> None:
        x = fake(3)
        with FakeTensorMode(), pytest.raises(AssertionError, match="Please convert all Tensors to FakeTensors first"):
            x + 1

    def test_our_fakes_can_be_converted_to_theirs(self) -> None:
        converted = FakeTensorMode().from_tensor(fake(3, 4).t())
        assert isinstance(converted, FakeTensor)
        assert not is_fake(converted)
        assert (converted.shape, converted.stride(), converted.device.type) == ((4, 3), (1, 4), "cpu")

    def test_real_tensors_are_converted_to_theirs_inside_our_mode(self) -> None:
        tensor = torch.ones(3)
        with fake_mode():
            converted = FakeTensorMode().from_tensor(tensor)
            assert is_fake(torch.ones(1))
        assert isinstance(converted, FakeTensor)
        assert not is_fake(converted)

    @pytest.mark.parametrize("run", [in_fake_mode, deferred_init], ids=["fake", "deferred"])
    def test_their_fakes_are_kept_inside_our_block(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        with FakeTensorMode() as mode:
            theirs = torch.ones(3, 4)

        def compute() -> list[torch.Tensor]:
            converted = mode.from_tensor(torch.ones(2))
            return [theirs + 1, theirs.detach(), theirs.t(), theirs @ theirs.t(), converted * 2, converted.detach()]

        for result in [*run(compute), *run(compute)]:  # the second result comes from their cache
            assert isinstance(result, FakeTensor)
            assert not is_fake(result)

    def test_their_fakes_can_be_converted_to_ours(self) -> None:
        with FakeTensorMode():
            module, tensor = nn.Linear(2, 2), torch.ones(3, 4)
            pair = fake_like((tensor, tensor.t()[1:]))
        ours = fake_like(module)
        assert type(ours.weight) is nn.Parameter
        assert all(type(part) is torch.Tensor and is_fake(part) for part in pair)
        assert pair[1].stride() == (1, 4)
        assert pair[1].untyped_storage()._cdata == pair[0].untyped_storage()._cdata
        assert is_fake(ours(fake(1, 2)))


def test_modes_see_a_resize_that_changes_nothing() -> None:
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    for tensor in (fake_like(torch.ones(2, 2)), deferred_init(torch.ones, 2, 2)):
        with Seeing():
            assert tensor.resize_(2, 2) is tensor
    assert seen == [torch.ops.aten.resize_.default] * 2
