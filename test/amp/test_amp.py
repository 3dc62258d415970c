"""Regions and decorators of `torchext.amp`: what they set, restore, cast and refuse."""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import pickle
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairs import covering_array
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchext import TorchextWarning, amp
from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import fake_mode
from torchext.inspect import route

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def state() -> tuple[object, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    per_device = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return depth, torch.is_autocast_cache_enabled(), *per_device


@pytest.fixture(autouse=True)
def _restores_everything() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


class CastCounter(TorchDispatchMode):
    """Counts the casts that run, by the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.casts.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def product(dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    x = torch.ones(2, 2, dtype=dtype, device=device)
    return x @ x


# Whether a dtype is supported depends on three arguments together, so these are all combined.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
DTYPES = (None, BF16, FP16, FP32, FP64, torch.int8, torch.complex64)
IS_ENABLED = (True, False)
REGION_ARGUMENTS = [
    *itertools.product(DEVICE_TYPES, DTYPES, IS_ENABLED, [None], [None]),
    *covering_array(DEVICE_TYPES, DTYPES, IS_ENABLED, [None, True, False], [None, "disabled", "uncached", "float32"]),
]


class TestRegion:
    @pytest.mark.parametrize("dtype", [None, BF16, FP16])
    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("cache", [True, False])
    @pytest.mark.parametrize("device_type", ["cpu", "cuda", "cuda:0"])
    def test_sets_the_same_state_as_torch_autocast(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, cache: bool
    ) -> None:
        with (
            fake_mode(gpu=True),  # torch.autocast checks the devices
            torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache),
        ):
            wanted = state()
        with amp.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache):
            assert state() == wanted

    def test_nests_disabled_in_enabled_and_the_other_dtype_in_one(self) -> None:
        with amp.autocast("cpu", dtype=BF16):
            assert product().dtype is BF16
            with amp.autocast("cpu", enabled=False):
                assert product().dtype is FP32
                with amp.autocast("cpu", dtype=FP16):
                    assert product().dtype is FP16
                assert product().dtype is FP32
            assert product().dtype is BF16
        assert product().dtype is FP32

    def test_each_kind_of_region_detects_the_other(self) -> None:
        with torch.autocast("cpu", dtype=FP16):
            with amp.autocast("cpu"):
                assert product().dtype is FP16
            with amp.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=BF16):
                assert product().dtype is BF16
            assert product().dtype is FP16

    def test_restores_after_an_exception(self) -> None:
        with pytest.raises(RuntimeError, match="inside"), amp.autocast("cpu", dtype=FP16, cache_enabled=False):
            raise RuntimeError("inside")
        assert product().dtype is FP32

    def test_is_the_threads_own(self) -> None:
        found = []
        with amp.autocast("cpu"):
            thread = threading.Thread(target=lambda: found.append(product().dtype))
            thread.start()
            thread.join()
        assert found == [FP32]

    def test_one_object_is_entered_again_and_on_several_threads(self) -> None:
        region = amp.autocast("cpu")
        barrier = threading.Barrier(2)
        found = []

        def run() -> None:
            with region:
                barrier.wait()
                with region:
                    found.append(product().dtype)
                barrier.wait()
                found.append(product().dtype)
            found.append(product().dtype)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(str, found)) == ["torch.bfloat16"] * 4 + ["torch.float32"] * 2

    def test_may_be_left_before_one_that_was_entered_later(self) -> None:
        first, second = amp.autocast("cpu", dtype=FP16, cache_enabled=False), amp.autocast("cpu", dtype=BF16)
        third = amp.autocast("cuda")
        before = state()
        for region in (first, second, third):
            region.__enter__()
        first.__exit__(None, None, None)
        assert product().dtype is BF16
        third.__exit__(None, None, None)
        assert not torch.is_autocast_enabled("cuda")
        second.__exit__(None, None, None)
        assert state() == before

    def test_generators_that_are_closed_late_leave_their_region(self) -> None:
        def generate() -> Iterator[torch.dtype]:
            with amp.autocast("cpu", dtype=FP16):
                while True:
                    yield product().dtype

        generator = generate()
        assert next(generator) is FP16
        with amp.autocast("cpu", dtype=BF16):
            del generator
            gc.collect()
            assert product().dtype is BF16

    def test_leaving_a_closed_block_is_an_error(self) -> None:
        region = amp.autocast("cpu")
        with pytest.raises(RuntimeError, match="not open on this thread. Leave it once for each time"):
            region.__exit__(None, None, None)
        with region:
            errors = []

            def leave() -> None:
                try:
                    region.__exit__(None, None, None)
                except RuntimeError as error:
                    errors.append(str(error))

            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
        assert "on the same thread" in errors[0]

    def test_enters_as_itself(self) -> None:
        region = amp.autocast("cpu")
        with region as entered:
            assert entered is region

    def test_takes_the_accelerator_in_use(self) -> None:
        with amp.autocast():
            expected = torch.accelerator.current_accelerator(check_available=True)
            assert torch.is_autocast_enabled(expected.type if expected else "cpu")
        region = amp.autocast()  # reads the current settings when it is entered
        with fake_mode(gpu=True), region:
            assert torch.is_autocast_enabled("cuda")
            assert product(device="cuda").dtype is FP16
            assert product(device="cpu").dtype is FP32

    @pytest.mark.parametrize("kinds", ["fake", "real", "deferred"])
    def test_works_on(self, kinds: str) -> None:
        @amp.autocast("cpu")
        def decorated() -> list[Tensor]:
            return [product(), product(FP64)]

        def run() -> list[Tensor]:
            with amp.autocast("cpu"):
                made = [product(), product(FP64)]
                with torch.inference_mode():
                    assert product().dtype is BF16
            return made + decorated()

        with fake_mode() if kinds == "fake" else torch.no_grad():
            made = deferred_init(run) if kinds == "deferred" else run()
        assert [x.dtype for x in made] == [BF16, FP64, FP32, FP64]
        if kinds == "deferred":
            assert all(map(torch.equal, map(materialize_tensor, made), run()))

    def test_is_shown_and_pickled_with_its_arguments(self) -> None:
        region = amp.autocast("cpu", dtype=FP16, cache_enabled=False)
        shown = "autocast('cpu', dtype=torch.float16, enabled=True, cache_enabled=False, self_cleaning=False)"
        assert repr(region) == repr(pickle.loads(pickle.dumps(region))) == repr(copy.deepcopy(region)) == shown

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"device_type": "gpu"}, ValueError, "the device type 'gpu'. Supported are 'cpu', 'cuda'"),
            ({"device_type": "meta"}, ValueError, "the device type 'meta'"),
            ({"device_type": "cpu\0"}, ValueError, r"the device type 'cpu\\x00'"),
            ({"device_type": "cuda:x"}, ValueError, "the device type 'cuda:x'"),
            ({"device_type": 1}, TypeError, "expected `device_type` to be .*, got int"),
            ({"dtype": "bfloat16"}, TypeError, "expected `dtype` to be .*, got str"),
            ({"cach": True}, TypeError, "cach"),
        ],
        ids=str,
    )
    def test_refuses(self, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            amp.autocast(**arguments)

    @pytest.mark.parametrize(("device_type", "dtype", "enabled", "cache", "around"), REGION_ARGUMENTS, ids=str)
    def test_arguments_have_the_state_and_the_warnings_of_pytorch(
        self, device_type: str, dtype: Any, enabled: bool, cache: bool | None, around: str | None
    ) -> None:
        def state() -> tuple[object, ...]:
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            enabled_for = torch.is_autocast_enabled(device_type), torch.is_autocast_enabled("cpu")
            return *enabled_for, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled(), product.dtype

        def look(make: Callable[[], Any]) -> tuple[Any, Any]:
            with warnings.catch_warnings(record=True) as caught, AROUND[around]():
                warnings.simplefilter("always")
                with make():
                    inside = state()
                return inside, [(str(w.message), w.category, w.filename) for w in caught if w.filename == __file__]

        if device_type == "cuda" and enabled and not torch.cuda.is_available():
            pytest.skip("PyTorch disables it on a machine without CUDA; here there may be fake devices")
        expected = look(lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
        assert look(lambda: amp.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)) == expected


AROUND: dict[str | None, Callable[[], Any]] = {
    None: nullcontext,
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "uncached": lambda: torch.autocast("cpu", cache_enabled=False),
    "float32": lambda: torch.autocast("cpu", dtype=FP32, enabled=False),
}


class TestWeightCache:
    def test_casts_each_weight_once_in_a_region(self) -> None:
        layer = nn.Linear(5, 7)
        with CastCounter() as counter:
            for _ in range(2):
                with amp.autocast("cpu"):
                    for _ in range(3):
                        layer(torch.ones(2, 5, dtype=BF16))
        assert sorted(counter.casts) == [7, 7, 35, 35]

    def test_casts_again_without_cache(self) -> None:
        layer = nn.Linear(5, 7, bias=False)
        with CastCounter() as counter, amp.autocast("cpu", cache_enabled=False):
            for _ in range(3):
                layer(torch.ones(2, 5, dtype=BF16))
        assert counter.casts == [35] * 3

    def test_follows_an_optimizer_step_between_regions(self) -> None:
        layer = nn.Linear(1, 1, bias=False)
        results = []
        for value in (1.0, 2.0):
            nn.init.constant_(layer.weight, value)
            with amp.autocast("cpu"):
                results.append(layer(torch.ones(1, 1)).item())
        assert results == [1.0, 2.0]

    def test_does_not_give_the_casts_of_one_dtype_to_a_region_of_another(self) -> None:
        layer = nn.Linear(2, 2)
        with amp.autocast("cpu", dtype=BF16):
            assert layer(torch.ones(1, 2)).dtype is BF16
            with amp.autocast("cpu", dtype=FP16):
                assert layer(torch.ones(1, 2)).dtype is FP16
            assert layer(torch.ones(1, 2)).dtype is BF16


class TestBackwardInRegion:
    def test_warns_once_and_names_the_line(self) -> None:
        w = torch.ones(2, 2, requires_grad=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with amp.autocast("cpu"):
                    (w @ w).sum().backward()
        assert [warning.filename for warning in caught] == [__file__]
        assert f"{__file__}:{caught[0].lineno} runs backward() inside an autocast region" in str(caught[0].message)

    def test_warns_about_grad(self) -> None:
        w = torch.ones(2, 2, requires_grad=True)
        with amp.autocast("cpu"), pytest.warns(TorchextWarning, match="Leave the region before it"):
            torch.autograd.grad((w @ w).sum(), w)

    def test_is_quiet_after_the_region_and_where_it_is_disabled(self) -> None:
        w = torch.ones(2, 2, requires_grad=True)
        with amp.autocast("cpu"):
            loss = (w @ w).sum()
            with amp.autocast("cpu", enabled=False):
                loss.backward(retain_graph=True)
        loss.backward()

    @pytest.mark.ci
    def test_is_quiet_where_torch_compile_traces(self) -> None:
        layer = torch.compile(nn.Linear(2, 2), backend="aot_eager")
        with warnings.catch_warnings(), amp.autocast("cpu"):
            warnings.filterwarnings("error", message=".*runs backward")
            result = layer(torch.ones(2, 2))
        assert result.dtype is BF16

    def test_is_quiet_in_torch_func(self) -> None:
        with amp.autocast("cpu"):
            grad = torch.func.grad(lambda w: (w @ w).sum().float())(torch.ones(2, 2))
        assert grad.dtype is FP32


class TestAutocastDecorator:
    def test_bare_or_with_arguments(self) -> None:
        seen = []

        @amp.autocast
        def bare(x: Tensor) -> Tensor:
            """Documented."""
            seen.append((x @ x).dtype)
            return x @ x

        @amp.autocast("cpu", dtype=FP16)
        def with_arguments(x: Tensor) -> Tensor:
            seen.append((x @ x).dtype)
            return x @ x

        x = torch.ones(2, 2)
        with fake_mode():
            assert bare(torch.ones(2, 2)).dtype is FP32
        assert with_arguments(x).dtype is FP32
        assert seen[1] is FP16
        assert bare.__doc__ == "Documented."
        assert bare.__name__ == "bare"

    def test_casts_any_pytree_and_passes_the_rest(self) -> None:
        count = torch.ones(2, dtype=torch.int64)
        plain = object()

        @amp.autocast("cpu")
        def function() -> Any:
            x = product()
            return {"a": [x, (x, None)], "b": count, "c": product(FP64), "d": "text", "e": plain, "f": x.float() + 1j}

        result = function()
        assert result["a"][0].dtype is result["a"][1][0].dtype is FP32
        assert result["b"] is count
        assert result["c"].dtype is FP64
        assert result["d"] == "text"
        assert result["e"] is plain
        assert result["f"].is_complex()

    def test_goes_with_the_flow_inside(self) -> None:
        @amp.autocast("cpu")
        def inner() -> Tensor:
            return product()

        @amp.autocast("cpu")
        def outer() -> Tensor:
            result = inner()
            assert result.dtype is BF16
            return result

        assert outer().dtype is FP32
        with torch.autocast("cpu", dtype=FP16):
            assert inner().dtype is FP16
            with amp.autocast("cpu", enabled=False):
                assert inner().dtype is FP32

    def test_disabled_runs_without_and_casts_nothing(self) -> None:
        @amp.autocast("cpu", enabled=False)
        def function(x: Tensor) -> Tensor:
            return x @ x

        with amp.autocast("cpu"):
            assert function(torch.ones(2, 2)).dtype is FP32
            assert function(torch.ones(2, 2, dtype=BF16)).dtype is BF16

    def test_restores_after_an_exception(self) -> None:
        @amp.autocast("cpu")
        def function() -> None:
            raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"):
            function()

    def test_decorates_methods(self) -> None:
        class Holder:
            @amp.autocast("cpu")
            def method(self) -> Tensor:
                return product()

            @classmethod
            @amp.autocast("cpu")
            def of_class(cls) -> Tensor:
                return product()

            @amp.autocast("cpu")
            @staticmethod
            def static() -> Tensor:
                return product()

        holder = Holder()
        assert holder.method().dtype is holder.of_class().dtype is holder.static().dtype is FP32

    @pytest.mark.parametrize("way", [amp.autocast, amp.autocast("cpu"), amp.full_precision, amp.lower_precision])
    def test_decorates_class_methods(self, way: Any) -> None:
        class Holder:
            @way
            @classmethod
            def of_class(cls) -> Tensor:
                return product()

        assert Holder.of_class().dtype is FP32

    def test_options_come_with_the_function(self) -> None:
        def dtype() -> torch.dtype:
            return product().dtype

        assert amp.autocast(dtype, dtype=torch.float16, enabled=False)() is FP32
        with pytest.warns(UserWarning, match="only supports dtypes of torch.bfloat16, torch.float16"):
            assert amp.autocast(dtype, dtype=torch.float64)() is FP32

    def test_plain_function_gets_its_arguments(self) -> None:
        @amp.autocast("cpu")
        def show(*args: Any, **kwargs: Any) -> Any:
            return args, kwargs, torch.is_autocast_enabled("cpu"), product()

        assert show(1, key=2)[:3] == ((1,), {"key": 2}, True)
        assert show()[3].dtype is FP32
        with amp.autocast("cpu"):
            assert show()[3].dtype is BF16
        assert show.__name__ == "show"
        assert not torch.is_autocast_enabled("cpu")

    def test_objects_that_are_called_run_as_the_functions_of_their_class(self) -> None:
        class Waits:
            async def __call__(self) -> torch.dtype:
                return product().dtype

        class Yields:
            def __call__(self) -> Any:
                yield product().dtype

        assert asyncio.run(amp.autocast("cpu")(Waits())()) is BF16
        assert list(amp.autocast("cpu")(Yields())()) == [BF16]

    def test_generators_autocast_while_they_run_and_not_while_they_wait(self) -> None:
        received = []

        @amp.autocast("cpu")
        def generate() -> Any:
            received.append((yield product()))
            assert product().dtype is BF16
            try:
                yield 1
            except ValueError:
                assert product().dtype is BF16
            return product()

        def delegate() -> Any:
            result = yield from generate()
            assert result.dtype is FP32

        generator = delegate()
        assert next(generator).dtype is FP32
        assert product().dtype is FP32
        assert generator.send("sent") == 1
        with pytest.raises(StopIteration):
            generator.throw(ValueError)
        assert received == ["sent"]

    def test_generators_that_begin_in_a_region_autocast_outside(self) -> None:
        @amp.autocast("cpu")
        def generate() -> Any:
            while True:
                yield product(), product().dtype

        with amp.autocast("cpu"):
            generator = generate()
            y, dtype = next(generator)
        assert y.dtype is dtype is BF16
        y, dtype = next(generator)
        assert (y.dtype, dtype) == (FP32, BF16)

    def test_coroutines_autocast_while_they_run_and_not_while_they_wait(self) -> None:
        @amp.autocast("cpu")
        async def compute() -> Tensor:
            assert product().dtype is BF16
            await asyncio.sleep(0)
            assert product().dtype is BF16
            return product()

        async def plain() -> torch.dtype:
            await asyncio.sleep(0)
            return product().dtype

        async def main() -> list[Any]:
            return list(await asyncio.gather(compute(), plain()))

        result, between = asyncio.run(main())
        assert result.dtype is FP32
        assert between is FP32

    def test_asynchronous_generators_autocast_while_they_run_and_not_while_they_wait(self) -> None:
        @amp.autocast("cpu")
        async def generate() -> AsyncGenerator[Any, Any]:
            sent = yield product()
            await asyncio.sleep(0)
            yield product().dtype, sent

        async def main() -> None:
            generator = generate()
            assert (await anext(generator)).dtype is FP32
            assert product().dtype is FP32
            assert await generator.asend("sent") == (BF16, "sent")
            assert [item async for item in generator] == []

        asyncio.run(main())

    @pytest.mark.parametrize("target", [1, "text", int, dict], ids=str)
    def test_rejects_objects_that_cannot_be_decorated(self, target: Any) -> None:
        with pytest.raises(TypeError, match="torchext.amp decorates functions, methods, modules, and classes"):
            amp.full_precision(target)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result = self.layer(x)
        self.seen = result.dtype
        return result


class WithArguments(nn.Module):
    def __new__(cls, scale: int) -> WithArguments:
        return super().__new__(cls)

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def __getnewargs__(self) -> tuple[int]:
        return (self.scale,)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ x)


class WithReduce(WithArguments):
    def __reduce__(self) -> Any:
        return type(self), (self.scale,)


class TestModules:
    def test_classes(self) -> None:
        @amp.autocast("cpu")
        class Decorated(Net):
            pass

        net = Decorated()
        assert net(torch.ones(1, 2)).dtype is FP32
        assert net.seen is BF16
        assert isinstance(net, Net)
        Net()(torch.ones(1, 2))

    @pytest.mark.parametrize("is_class", [True, False], ids=["class", "instance"])
    @pytest.mark.parametrize("way", [amp.full_precision, amp.lower_precision])
    def test_get_the_requested_dtypes(self, way: Any, is_class: bool) -> None:
        class Kernel(nn.Module):
            def forward(self, x: Tensor) -> tuple[torch.dtype, Tensor]:
                return x.dtype, x * 2

        kernel = way(Kernel)() if is_class else way(Kernel())
        wanted = FP32 if way is amp.full_precision else BF16
        with amp.autocast("cpu"):
            dtype, result = kernel(torch.ones(2, dtype=BF16 if way is amp.full_precision else FP32))
        assert dtype is result.dtype is wanted

    def test_instances_and_no_others(self) -> None:
        net, other = Net(), Net()
        assert amp.autocast("cpu")(net) is net
        assert type(net).__name__ == "Net"
        assert isinstance(net, Net)
        assert net(torch.ones(1, 2)).dtype is FP32
        other(torch.ones(1, 2))
        assert (net.seen, other.seen) == (BF16, FP32)

    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))])
    def test_copies_of_instances_run_on_themselves(self, copied: Any) -> None:
        net = amp.autocast("cpu", dtype=FP16)(Net())
        twin = copied(net)
        nn.init.zeros_(twin.layer.weight)
        net.seen = twin.seen = None
        assert twin(torch.ones(1, 2)).dtype is FP32
        assert (net.seen, twin.seen) == (None, FP16)

    def test_instances_that_are_decorated_twice_or_lazy_are_copied(self) -> None:
        x = torch.full((2, 4), 1 / 3)
        lazy, twice = amp.autocast("cpu")(nn.LazyLinear(3)), amp.full_precision(amp.autocast("cpu")(nn.Linear(4, 3)))
        lazy(x)
        for module in (lazy, twice):
            for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                assert torch.equal(copied(x), module(x))
        with torch.autocast("cpu"):
            assert torch.equal(lazy(x), nn.functional.linear(x, lazy.weight, lazy.bias).float())

    def test_lazy_classes_stay_decorated(self) -> None:
        @amp.autocast("cpu")
        class Layer(nn.LazyLinear):
            pass

        layer, x = Layer(3), torch.full((2, 4), 1 / 3)
        assert torch.equal(layer(x), layer(x))

    def test_scripted_ones_are_refused(self) -> None:
        with pytest.raises(TypeError, match="does not decorate scripted modules"):
            amp.full_precision(torch.jit.script(nn.ReLU()))

    def test_instances_whose_class_takes_arguments_are_copied(self) -> None:
        module = amp.autocast("cpu")(WithArguments(3))
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(amp.autocast("cpu")(WithReduce(3))))):
            assert copied.scale == 3
            assert torch.equal(copied(torch.full((2, 2), 1 / 3)), module(torch.full((2, 2), 1 / 3)))

    def test_instance_with_its_own_forward(self) -> None:
        net = Net()
        net.forward = lambda x: x @ x
        amp.autocast("cpu")(net)
        assert net(torch.ones(2, 2)).dtype is FP32

    def test_float_leaves_parameters_alone(self) -> None:
        net = amp.full_precision(Net())
        with amp.autocast("cpu"):
            assert net(torch.ones(1, 2, dtype=BF16)).dtype is FP32
        assert net.seen is FP32


class TestFloatAndHalf:
    def test_float_disables_and_casts_both_ways(self) -> None:
        @amp.full_precision
        def function(x: Tensor, *, others: list[Any]) -> Any:
            assert x.dtype is FP32
            assert (x @ x).dtype is FP32
            assert [o.dtype for o in others if isinstance(o, Tensor)] == [FP32, FP64, torch.int64]
            return x.to(BF16), others[3]

        others = [torch.ones(1, dtype=FP16), torch.ones(1, dtype=FP64), torch.ones(1, dtype=torch.int64), "text"]
        with amp.autocast("cpu"):
            tensor, text = function(torch.ones(2, 2, dtype=BF16), others=others)
        assert tensor.dtype is FP32
        assert text == "text"

    def test_float_disables_on_the_accelerator_in_use(self) -> None:
        @amp.full_precision
        def function(x: Tensor) -> Tensor:
            return x @ x

        with fake_mode(gpu=True), amp.autocast("cuda"):
            assert function(torch.ones(2, 2, device="cuda", dtype=FP16)).dtype is FP32

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_half_casts_to_the_dtype_of_the_region(self, dtype: torch.dtype) -> None:
        @amp.lower_precision
        def function(*args: Any) -> Any:
            return args

        count = torch.ones(1, dtype=torch.int64)
        with amp.autocast("cpu", dtype=dtype):
            found = function(torch.ones(1), torch.ones(1, dtype=FP64), count, 3)
        assert found[0].dtype is dtype
        assert found[1].dtype is FP64
        assert found[2] is count
        assert found[3] == 3

    def test_half_casts_each_tensor_for_its_device(self) -> None:
        @amp.lower_precision
        def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, y

        with fake_mode(gpu=True), amp.autocast("cuda"):
            x, y = function(torch.ones(1, device="cuda"), torch.ones(1))
        assert (x.dtype, y.dtype) == (FP16, FP32)

    def test_half_casts_nothing_outside(self) -> None:
        assert amp.lower_precision(lambda x: x)(torch.ones(1)).dtype is FP32

    def test_casts_are_seen_by_autograd(self) -> None:
        x = torch.ones(2, requires_grad=True)
        with amp.autocast("cpu"):
            y = amp.lower_precision(lambda x: x * 2)(x)
        amp.full_precision(lambda y: y * 3)(y).sum().backward()
        assert x.grad.tolist() == [6.0, 6.0]


def outside_the_dispatcher(x: Tensor, y: Tensor) -> Tensor:
    """A user's kernel that supports one dtype."""
    assert x.dtype is y.dtype
    return torch.from_numpy(x.detach().view(torch.int16).numpy()).view(x.dtype) if x.dtype is BF16 else x.detach()


class TestAutogradFunctions:
    @pytest.mark.parametrize("way", ["autocast", "float", "half"])
    @pytest.mark.parametrize("has_context", [True, False], ids=["ctx", "setup_context"])
    def test_backward_runs_as_forward_did(self, way: str, has_context: bool) -> None:
        seen = {}

        class WithContext(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                seen["forward"] = x.dtype, (x @ w).dtype
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, w = ctx.saved_tensors
                seen["backward"] = grad.dtype, (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
                return grad @ w.t(), x.t() @ grad

        class WithSetup(torch.autograd.Function):
            @staticmethod
            def forward(x: Tensor, w: Tensor) -> Tensor:
                seen["forward"] = x.dtype, (x @ w).dtype
                return x @ w

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

            backward = WithContext.backward

        cls = WithContext if has_context else WithSetup
        decorated = {"autocast": amp.autocast("cpu"), "float": amp.full_precision, "half": amp.lower_precision}[way](
            cls
        )
        assert decorated is cls
        x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        with amp.autocast("cpu"):
            result = cls.apply(x, w)
        result.sum().backward()
        assert x.grad.dtype is FP32
        assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
        wanted = {
            "autocast": {"forward": (FP32, BF16), "backward": (BF16, BF16)},
            "float": {"forward": (FP32, FP32), "backward": (FP32, FP32)},
            "half": {"forward": (BF16, BF16), "backward": (BF16, BF16)},
        }
        assert seen == wanted[way]

    @pytest.mark.parametrize("has_context", [True, False], ids=["ctx", "setup_context"])
    def test_can_be_differentiated_twice(self, has_context: bool) -> None:
        class WithContext(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
                ctx.save_for_backward(x, w)
                return x * w

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, w = ctx.saved_tensors
                return grad * w, grad * x

        class WithSetup(WithContext):
            @staticmethod
            def forward(x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
                return x * w

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.save_for_backward(*inputs)

        function = amp.full_precision(WithContext if has_context else WithSetup)
        x, w = (torch.full((2,), value, dtype=BF16, requires_grad=True) for value in (3.0, 5.0))
        (grad,) = torch.autograd.grad(function.apply(x, w).square().sum(), x, create_graph=True)
        found = torch.autograd.grad(grad.sum(), [x, w])
        assert [g.tolist() for g in found] == [[50.0, 50.0], [60.0, 60.0]]

    @pytest.mark.parametrize("name", ["backward", "vjp"])
    def test_outermost_function_returns_float32_and_autocasts_backward(self, name: str) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x @ x

        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert product().dtype is BF16
            return grad

        setattr(Product, name, staticmethod(backward))
        x = torch.ones(2, 2, requires_grad=True)
        result = amp.autocast("cpu")(Product).apply(x)
        assert result.dtype is FP32
        result.sum().backward()
        assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]

    def test_kernels_outside_of_the_dispatcher(self) -> None:
        kernel = amp.lower_precision(outside_the_dispatcher)
        with amp.autocast("cpu"):
            x = product()
            assert kernel(x, torch.ones(2, 2)).dtype is BF16
        full = amp.full_precision(outside_the_dispatcher)
        assert full(x, torch.ones(2, 2)).dtype is FP32


def test_operators_without_a_policy_fall_through_the_key() -> None:
    x = torch.ones(2)
    with amp.autocast("cpu"):
        [step] = [step for step in route(torch.ops.aten.neg.default, x) if step.key == "AutocastCPU"]
        assert not step.runs
        assert "AutocastCPU" in route(torch.ops.aten.mm.default, x[None], x[:, None]).keys
