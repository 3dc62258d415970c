"""Autocast regions and decorators inside and around compiled code: one graph, and the effects of eager code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import BACKENDS, check_compiled, check_same, compiled, graph_breaks, graphs
from torch import Tensor, nn

from torchext import amp
from torchext.internals.patching import TORCH_RELEASE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


W = torch.eye(2) + 0.5
REGION = amp.autocast("cpu")
REGIONS = {"bf16": REGION, "more": [amp.autocast("cpu", dtype=FP16), amp.autocast("cpu", enabled=False)]}


class Holder:
    region = amp.autocast("cpu")

    def __init__(self) -> None:
        self.off = amp.autocast("cpu", enabled=False)


HOLDER = Holder()


@amp.autocast
def decorated(x: Tensor) -> Tensor:
    return x @ W


@amp.autocast("cpu", dtype=FP16)
def decorated_with_arguments(x: Tensor) -> Any:
    y = x @ W
    return {"y": y, "dtype": y.dtype}, [y + 1]


@amp.autocast(enabled=False)
def disabled(x: Tensor) -> Tensor:
    return x @ W


@amp.full_precision
def in_float32(x: Tensor, scale: float = 2.0) -> Any:
    return x @ W, {"dtype": x.dtype, "twice": x * scale}


@amp.lower_precision
def in_lower_precision(x: Tensor) -> Tensor:
    return x * 1


@amp.autocast
def steps(x: Tensor) -> Iterator[Tensor]:
    y = x @ W
    yield y
    yield y @ y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @amp.autocast
    def forward(self, x: Tensor) -> Any:
        return self.layer(x), self.distance(x @ W)

    @amp.full_precision
    def distance(self, x: Tensor) -> Tensor:
        return x @ x

    @staticmethod
    @amp.autocast
    def product(x: Tensor) -> Tensor:
        return x @ W


MODEL = Model()
DECORATED_MODULE = amp.autocast(nn.Linear(2, 2))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad @ y.t(), x.t() @ grad


class AutocastProduct(Product):
    pass


class FloatProduct(Product):
    pass


amp.autocast(AutocastProduct)
amp.full_precision(FloatProduct)


def block(x: Tensor) -> Any:
    with amp.autocast("cpu"):
        y = x @ W
    return y, x @ W


def default_device(x: Tensor) -> Any:
    with amp.autocast(), amp.autocast(dtype=FP16) as region:
        y = x @ W
        with region:
            return y, x @ W, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def made_outside(x: Tensor) -> Any:
    results = []
    for region in (REGION, REGIONS["bf16"], *REGIONS["more"], HOLDER.region):
        with region:
            results.append(x @ W)
            with HOLDER.off:
                results.append(x @ W)
    return results


def exception(x: Tensor) -> Any:
    try:
        with amp.autocast("cpu"), REGION:
            y = x @ W
            raise ValueError
    except ValueError:
        return y, x @ W


def early_return(x: Tensor) -> Any:
    with amp.autocast("cpu"):
        for dtype in (BF16, FP16, BF16):
            with amp.autocast("cpu", dtype=dtype):
                if dtype is FP16:
                    return x @ W
    return x


def closure(x: Tensor) -> Any:
    def outer(region: Any) -> Callable[[Tensor], Tensor]:
        def inner(y: Tensor) -> Tensor:
            with region:
                return y @ W

        return inner

    return outer(amp.autocast("cpu"))(x), outer(REGION)(x)


def decorates_inside(x: Tensor) -> Any:
    @amp.autocast
    def bare(x: Tensor) -> Any:
        y = x @ W
        return y, y.dtype

    @amp.autocast("cpu", dtype=FP16)
    def with_arguments(x: Tensor) -> Any:
        y = x @ W
        return y, y.dtype

    return bare(x), with_arguments(x), REGION(lambda x: (x @ W, (x @ W).dtype))(x)


def decorators(x: Tensor) -> Any:
    with amp.autocast("cpu"):
        inside = decorated(x), decorated_with_arguments(x), disabled(x), in_float32(x @ W), in_lower_precision(x)
    outside = decorated(x), decorated_with_arguments(x), disabled(x), in_float32(x.to(BF16)), in_lower_precision(x)
    return inside, outside


def methods(x: Tensor) -> Any:
    return MODEL(x), MODEL.distance(x.to(BF16)), Model.product(x), DECORATED_MODULE(x)


def with_those_of_pytorch(x: Tensor) -> Any:
    with torch.autocast("cpu"), amp.autocast("cpu", dtype=FP16), torch.autocast("cpu", enabled=False):
        y = x @ W
        with amp.autocast("cpu"):
            return y, x @ W


def autograd_functions(x: Tensor) -> Any:
    with amp.autocast("cpu"):
        inside = AutocastProduct.apply(x, W), FloatProduct.apply(x, W)
    return inside, AutocastProduct.apply(x, W), FloatProduct.apply(x.to(BF16), W)


def generator_of_the_users(x: Tensor) -> Any:
    def generate(x: Tensor) -> Iterator[Tensor]:
        with amp.autocast("cpu"):
            y = x @ W
        yield y
        yield x @ W

    return list(generate(x))


def unsupported_dtype(x: Tensor) -> Any:
    with amp.autocast("cpu", dtype=torch.float32):
        return x @ W


def device_that_is_missing(x: Tensor) -> Any:
    with amp.autocast("cuda"):
        return x @ W


PROGRAMS = [
    block,
    default_device,
    made_outside,
    exception,
    early_return,
    closure,
    decorates_inside,
    decorators,
    methods,
    with_those_of_pytorch,
    autograd_functions,
    generator_of_the_users,
    unsupported_dtype,
    device_that_is_missing,
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype:UserWarning")
def test_is_one_graph_with_eager_results(program: Callable[[Tensor], Any], backend: str) -> None:
    x = torch.arange(4.0).view(2, 2) / 3
    check_compiled(program, x, backend=backend)
    check_compiled(program, x.requires_grad_(), backend=backend)


def loss(program: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    results = torch.utils._pytree.tree_leaves(program(x))
    return torch.stack([r.float().square().sum() for r in results if isinstance(r, Tensor) and r.requires_grad]).sum()


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [block, made_outside, decorators, methods, autograd_functions])
def test_gradients_are_eager_ones(program: Callable[[Tensor], Any], backend: str) -> None:
    x = (torch.arange(4.0).view(2, 2) / 4).requires_grad_()
    wanted = torch.autograd.grad(loss(program, x), x)
    found = torch.autograd.grad(loss(compiled(program, backend), x), x)
    assert graph_breaks() == 0
    # Compiled code casts a weight at each use, because AOTAutograd disables the cache.
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)


@pytest.mark.ci
def test_inductor_computes_in_the_dtypes_of_the_region() -> None:
    def function(x: Tensor) -> Any:
        return block(x), decorated(x), in_float32(x)

    x = torch.eye(2)
    run = compiled(function, "inductor")
    check_same(run(x), function(x), counts_writes=False)
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_in_regions_of_two_dtypes(backend: str) -> None:
    """`torch.autocast` uses the first region's cast in the second: its cache ignores dtypes."""
    weight = torch.eye(2).requires_grad_()

    def function(x: Tensor) -> Any:
        with amp.autocast("cpu"):
            y = x @ weight
            with amp.autocast("cpu", dtype=FP16):
                z = x @ weight
            return y, z, x @ weight

    check_compiled(function, torch.ones(2, 2), backend=backend)


class TestGraphBreaks:
    @pytest.mark.cases(1)
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_state_is_restored_behind_a_break_in_a_region(self, backend: str) -> None:
        def function(x: Tensor, region: Any) -> Any:
            with amp.autocast(dtype=FP16, cache_enabled=False), region:
                y = x @ W
                torch._dynamo.graph_break()
                states = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
                z = y @ W
            return y, z, states, x @ W, torch.is_autocast_enabled("cpu")

        x = torch.eye(2)
        for region in (amp.autocast("cpu"), amp.autocast("cpu", enabled=False)):
            check_same(compiled(function, backend, fullgraph=False)(x, region), function(x, region))
            assert graph_breaks() == 1
            assert not torch.is_autocast_enabled("cpu")

    def test_an_error_behind_a_break_leaves_the_region(self) -> None:
        def function(x: Tensor) -> Tensor:
            with amp.autocast("cpu"):
                y = x @ W
                torch._dynamo.graph_break()
                raise KeyError(str(y.dtype))

        with pytest.raises(KeyError, match="bfloat16"):
            compiled(function, fullgraph=False)(torch.eye(2))
        assert not torch.is_autocast_enabled("cpu")

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_an_error_of_an_operator_leaves_the_region(self, backend: str) -> None:
        """PyTorch's own region stays open after an error in a graph of the backend "eager"."""

        def function(x: Tensor, index: Tensor) -> Tensor:
            with amp.autocast("cpu"), amp.autocast("cpu", dtype=FP16, cache_enabled=False), torch.no_grad():
                return (x @ W)[index]

        run = compiled(function, backend)
        run(torch.eye(2), torch.tensor([0]))
        with pytest.raises(IndexError, match="out of (bounds|range)"):
            run(torch.eye(2), torch.tensor([7]))
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is BF16
        assert torch.is_autocast_cache_enabled()
        assert torch.is_grad_enabled()
        assert torch.autocast_increment_nesting() - 1 == torch.autocast_decrement_nesting() == 0

    def test_an_argument_of_a_wrong_type_is_the_programs_error(self) -> None:
        def function(x: Tensor) -> Tensor:
            with amp.autocast("gpu"):
                return x @ W

        with pytest.raises(ValueError, match="does not support the device type 'gpu'"):
            compiled(function, fullgraph=False)(torch.eye(2))

    @pytest.mark.skipif(TORCH_RELEASE >= (2, 14), reason="Dynamo traces generators that are decorated")
    def test_decorated_generator_breaks_the_graph(self) -> None:
        def function(x: Tensor) -> Any:
            return list(steps(x)), x @ W

        x = torch.eye(2)
        check_same(compiled(function, fullgraph=False)(x), function(x))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torchext: decorated generator"):
            compiled(function)(x)

    @pytest.mark.skipif(TORCH_RELEASE < (2, 14), reason="Dynamo loses what generators return")
    def test_decorated_generator_is_traced(self) -> None:
        check_compiled(lambda x: (list(steps(x)), x @ W), torch.eye(2))


class TestRecompilation:
    def test_regions_that_are_alike_share_a_graph(self) -> None:
        def function(x: Tensor, region: Any) -> Tensor:
            with region:
                return x @ W

        run = compiled(function)
        for _ in range(3):
            assert run(torch.eye(2), amp.autocast("cpu")).dtype is BF16
        assert graphs() == 1
        assert run(torch.eye(2), amp.autocast("cpu", dtype=FP16)).dtype is FP16
        assert run(torch.eye(2), amp.autocast("cpu", enabled=False)).dtype is FP32
        assert graphs() == 3

    @pytest.mark.parametrize("region", [amp.autocast, torch.autocast])
    def test_as_often_as_for_a_region_of_pytorch(self, region: Any) -> None:
        def function(x: Tensor, is_enabled: bool) -> Tensor:
            with region("cpu", enabled=is_enabled):
                return decorated(x)

        run = compiled(function)
        for is_enabled in (True, False, True):
            for around in (region("cpu"), region("cpu", enabled=False)):
                with around:
                    run(torch.eye(2), is_enabled)
        assert graphs() == 4

    def test_around_compiled_code(self) -> None:
        run = compiled(lambda x: x @ W)
        dtypes = []
        for region in (amp.autocast("cpu", enabled=False), REGION, amp.autocast("cpu", dtype=FP16), REGION):
            with region:
                dtypes.append(run(torch.eye(2)).dtype)
        assert dtypes == [FP32, BF16, FP16, BF16]
        assert graphs() == 3


def test_policies_of_custom_operators_hold() -> None:
    @torch.library.custom_op("torchext_test_dynamo::scaled", mutates_args=())
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @scaled.register_fake
    def _(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    amp.register_policy(scaled, "lower_precision")

    def function(x: Tensor) -> Any:
        with amp.autocast("cpu"):
            y = scaled(x, x)
        return y, scaled(x, x)

    for backend in BACKENDS:
        check_compiled(function, torch.eye(2), backend=backend)


def test_backward_of_compiled_code_does_not_warn() -> None:
    x = torch.eye(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(block, "aot_eager")(x)[0].sum().backward()
    assert x.grad.dtype is FP32
