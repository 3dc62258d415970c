"""Thread state that deferred initialization records, keeps and restores, also with several threads."""

from __future__ import annotations

import threading

import pytest
import torch
from common import (
    assert_same_module,
    assert_same_tensor,
    assert_tensors_defer_exactly,
    build_both,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import fake_mode, is_fake


def encoded(mask: Tensor | None) -> Tensor:
    """Run an encoder in eval mode, which takes another path if a TorchFunctionMode may be active."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        output: Tensor = encoder(torch.randn(2, 3, 8), src_key_padding_mask=mask)
    return output


PADDING = {
    "none": lambda: None,
    "left-aligned": lambda: torch.tensor([[False, False, True], [False, True, True]]),
    "not left-aligned": lambda: torch.tensor([[False, True, False], [False, True, True]]),
}


def answers_about_modes() -> list[object]:
    tensor, module = torch.ones(3), nn.Linear(2, 2)
    return [
        torch.overrides.has_torch_function((tensor, module.weight)),
        torch.overrides.has_torch_function_unary(tensor),
        torch.overrides._get_current_function_mode_stack(),
        torch._C._is_torch_function_mode_enabled(),
        torch._C._is_torch_function_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
        torch._C._functorch.peek_interpreter_stack(),
        torch.compiler.is_compiling(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        isinstance(tensor, torch.FloatTensor),
        isinstance(tensor, torch.LongTensor),
        isinstance(module.weight, torch.FloatTensor),
        tensor.type(),
    ]


class TestState:
    def test_constructors_are_given_eager_answers_about_modes(self) -> None:
        assert deferred_init(answers_about_modes) == answers_about_modes()

    @pytest.mark.parametrize("padding", PADDING)
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
    def test_constructors_take_the_fast_path_of_transformers(self, padding: str) -> None:
        eager, deferred = build_both(lambda: encoded(PADDING[padding]()))
        assert torch.equal(materialize_tensor(deferred), eager)

    def test_default_dtype_of_the_recording_counts(self) -> None:
        def build() -> list[Tensor]:
            torch.set_default_dtype(torch.float64)
            try:
                return [torch.ones(2), torch.ones(2, dtype=torch.int64) / 3]
            finally:
                torch.set_default_dtype(torch.float32)

        assert_tensors_defer_exactly(build)
        assert torch.get_default_dtype() == torch.float32

    def test_autocast_of_the_recording_counts(self) -> None:
        def build() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.eye(4) @ torch.arange(16.0).view(4, 4).div(3)

        assert deferred_init(build).dtype == torch.bfloat16
        assert_tensors_defer_exactly(build)

    def test_materializing_inside_other_modes_gives_the_same(self) -> None:
        def build() -> Tensor:
            return torch.ones(2, 2) @ torch.full((2, 2), 1 / 3)

        wanted = build()
        for mode in (
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(),
            torch.no_grad(),
            fake_mode(),
            torch.device("meta"),
        ):
            deferred = deferred_init(build)
            with mode:
                materialize_tensor(deferred)
            assert_same_tensor(deferred, wanted)

    def test_materializing_inside_deferred_init(self) -> None:
        def build() -> Tensor:
            return materialize_tensor(torch.arange(3.0))

        tensor = deferred_init(build)
        assert not is_deferred(tensor)
        assert tensor.tolist() == [0.0, 1.0, 2.0]

    def test_cast_of_a_fake_is_not_in_autocasts_cache_when_it_is_real(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weight = deferred_init(lambda: nn.Parameter(torch.ones(2, 2)))
            torch.mm(torch.ones(2, 2), weight)
            materialize_tensor(weight)
            assert not is_fake(torch.mm(torch.ones(2, 2), weight))

    def test_user_mode_decides_what_an_operator_does(self) -> None:
        class AddTen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
                result = func(*args, **(kwargs or {}))
                return result + 10 if func.overloadpacket is torch.ops.aten.mul else result

        def build() -> Tensor:
            with AddTen():  # type: ignore[no-untyped-call]
                return torch.ones(2) * 2

        assert materialize_tensor(deferred_init(build)).tolist() == build().tolist() == [12.0, 12.0]

    def test_handler_of_a_mode_is_recorded(self) -> None:
        class Nothing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
                return func(*args, **(kwargs or {}))

        def build() -> list[Tensor]:
            tensor = torch.randn(3)
            with Nothing():  # type: ignore[no-untyped-call]
                tensor.add_(1)
                tensor[:1].normal_()
                doubled = tensor * 2
                shape = tensor[tensor > doubled.sum().item()].shape
            return [tensor, doubled, torch.rand(shape), torch.rand(1)]

        assert_tensors_defer_exactly(build)

    def test_handler_of_a_subclass_is_recorded(self) -> None:
        class Wrapper(Tensor):
            wrapped: Tensor

            @staticmethod
            def __new__(cls: type[Wrapper], inner: Tensor) -> Wrapper:
                wrapper: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
                wrapper.wrapped = inner
                return wrapper

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override] # noqa: ANN001, ANN206
                unwrapped = tree_map_only(Wrapper, lambda wrapper: wrapper.wrapped, (args, kwargs or {}))
                return tree_map_only(Tensor, Wrapper, func(*unwrapped[0], **unwrapped[1]))

        def build() -> list[Tensor]:
            wrapper = Wrapper(torch.randn(3))
            wrapper.mul_(2)
            sum_ = wrapper + 1
            assert isinstance(sum_, Wrapper)
            return [wrapper.wrapped, sum_.wrapped, torch.rand(1)]

        assert_tensors_defer_exactly(build)

    def test_default_device_of_the_recording_counts(self) -> None:
        def build() -> Tensor:
            with torch.device("meta"):
                return torch.ones(2)

        assert deferred_init(build).device.type == "meta"

    def test_nests(self) -> None:
        def outer() -> tuple[Tensor, Tensor]:
            inner = deferred_init(torch.ones, 2)
            return inner, torch.zeros(2)

        first, second = deferred_init(outer)
        assert is_deferred(first)
        assert is_deferred(second)
        assert not is_fake(torch.ones(1))

    def test_nests_with_fake_mode(self) -> None:
        def build() -> Tensor:
            with fake_mode():
                a = torch.ones(2)
            return a + torch.ones(2)

        assert materialize_tensor(deferred_init(build)).tolist() == [2.0, 2.0]

    def test_exception_of_the_constructor_is_the_users_own(self) -> None:
        class Broken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))
                raise LookupError("mine")

        with pytest.raises(LookupError, match="^mine$"):
            deferred_init(Broken)
        assert not is_fake(torch.ones(1))

    def test_two_threads_at_once(self) -> None:
        torch.manual_seed(0)
        wanted = {n: nn.Sequential(*(nn.Linear(n, n) for _ in range(20))) for n in (3, 4)}
        results: dict[int, nn.Module] = {}
        start = threading.Barrier(2)

        def build(n: int) -> None:
            start.wait()
            module = deferred_init(lambda: nn.Sequential(*(nn.Linear(n, n) for _ in range(20))))
            assert is_deferred(module)
            materialize_module(module)
            results[n] = module

        threads = [threading.Thread(target=build, args=(n,)) for n in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, module in results.items():
            assert [p.shape for p in module.parameters()] == [p.shape for p in wanted[n].parameters()]
            assert not is_deferred(module)
        assert len(results) == 2

    def test_deferred_on_one_thread_and_materialized_on_another(self) -> None:
        eager, deferred = build_both(lambda: nn.Linear(5, 5))
        thread = threading.Thread(target=materialize_module, args=(deferred,))
        thread.start()
        thread.join()
        assert_same_module(deferred, eager)


class TestThreads:
    def test_reading_does_not_wait_with_the_interpreters_lock(self) -> None:
        # Replaying `slow` runs a kernel written in Python; `read` is read with the interpreter's lock held.
        slow = deferred_init(lambda: [nn.init.trunc_normal_(torch.empty(500, 200), a=-1, b=1) for _ in range(5)])
        read = deferred_init(lambda: [torch.full((), 2) + i for i in range(300)])
        reader = threading.Thread(target=lambda: [torch.zeros(4000)[index] for index in read], daemon=True)
        reader.start()
        materialize_module(nn.ParameterList(slow))
        reader.join(timeout=60)
        assert not reader.is_alive()

    def test_viewing_and_materializing_at_once(self) -> None:
        tensors = deferred_init(lambda: [torch.ones(3) for _ in range(300)])

        def view() -> None:
            for tensor in tensors:
                for _ in range(5):
                    tensor.data  # noqa: B018

        def materialize() -> None:
            for tensor in tensors:
                materialize_tensor(tensor)

        threads = [threading.Thread(target=target) for target in (view, materialize, materialize)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(is_fake(tensor) for tensor in tensors)

    def test_threads_do_not_get_the_same_numbers(self) -> None:
        tensors: list[Tensor] = []

        def draw() -> None:
            tensors.extend(deferred_init(torch.randn, 20) for _ in range(200))

        threads = [threading.Thread(target=draw) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({tuple(materialize_tensor(tensor).tolist()) for tensor in tensors}) == 600
