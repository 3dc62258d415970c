"""Blocks of inference mode: entering and leaving, nesting, threads, decorated functions, the thread's state."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing
from typing import Any

import pytest
import torch
from torch import Tensor

from torchext.inference import (
    check_dispatch_state,
    inference_mode,
    is_inference_mode_enabled,
    is_inference_tensor,
    normal_tensors,
)

NOT_OPEN = "that is not open on this thread"
STILL_OPEN = "a block that was entered later on this thread is still open"


def thread_state() -> tuple[Any, ...]:
    """Return the thread state that a block may change."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._is_multithreading_enabled(),
        torch._C._is_view_replay_enabled(),
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
    )


@pytest.fixture(autouse=True)
def _leaves_the_thread_as_it_was() -> Iterator[None]:
    before = thread_state()
    yield
    assert thread_state() == before


def nested(*modes: AbstractContextManager[Any]) -> list[tuple[Any, ...]]:
    """Return the states inside each of `modes`, outermost first, and then after each is left."""
    if not modes:
        return []
    with modes[0]:
        return [thread_state(), *nested(*modes[1:]), thread_state()]


class TestState:
    @pytest.mark.parametrize(
        "modes", [[True], [False], [True, False], [False, True], [True, True], [True, False, True]]
    )
    @pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad, lambda: torch._C._DisableAutocast()])
    def test_is_that_of_pytorchs_mode(
        self, modes: list[bool], outer: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        ours = nested(outer(), *map(inference_mode, modes))
        theirs = nested(outer(), *map(torch.inference_mode, modes))
        assert ours == theirs

    def test_nests_with_pytorchs_mode(self) -> None:
        theirs = nested(*map(torch.inference_mode, [True, False, True, False]))
        assert theirs == nested(
            inference_mode(), torch.inference_mode(False), inference_mode(), torch.inference_mode(False)
        )
        assert theirs == nested(
            torch.inference_mode(), inference_mode(False), torch.inference_mode(), inference_mode(False)
        )

    def test_queries_agree_between_our_mode_and_pytorchs(self) -> None:
        for mode in (inference_mode, torch.inference_mode):
            assert not is_inference_mode_enabled()
            with mode():
                assert is_inference_mode_enabled()
                assert torch.is_inference_mode_enabled()
                tensor = torch.ones(1)
            assert is_inference_tensor(tensor)
            assert tensor.is_inference()

    def test_exception_restores(self) -> None:
        with pytest.raises(ZeroDivisionError), inference_mode():
            raise ZeroDivisionError
        assert not is_inference_mode_enabled()

    def test_error_of_an_operator_restores(self) -> None:
        with inference_mode():
            with pytest.raises(RuntimeError, match="must match"), inference_mode(False):
                torch.ones(2) + torch.ones(3)
            assert is_inference_mode_enabled()

    def test_grad_mode_set_inside_does_not_leak(self) -> None:
        with inference_mode():
            torch._C._set_grad_enabled(True)
        assert torch.is_grad_enabled()
        with torch.no_grad():
            with inference_mode(False):
                assert torch.is_grad_enabled()
            assert not torch.is_grad_enabled()

    def test_forward_mode_is_off(self) -> None:
        with torch.autograd.forward_ad.dual_level(), inference_mode():
            assert not torch._C._is_fwd_grad_enabled()

    def test_is_inference_tensor_takes_tensors(self) -> None:
        with pytest.raises(TypeError, match="takes a tensor, but `tensor` is a int"):
            is_inference_tensor(1)


class TestBlocks:
    def test_object_can_be_entered_again_while_it_is_open(self) -> None:
        mode = inference_mode()
        with mode:
            with mode, inference_mode(False), mode:
                assert is_inference_mode_enabled()
            assert is_inference_mode_enabled()
        with mode:
            assert is_inference_mode_enabled()

    def test_object_can_be_shared_by_threads(self) -> None:
        mode = inference_mode()
        barrier = threading.Barrier(4)
        seen: list[bool] = []

        def work() -> None:
            for _ in range(50):
                barrier.wait()
                with mode:
                    seen.append(torch.is_inference_mode_enabled())
                seen.append(not torch.is_inference_mode_enabled())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 400
        assert all(seen)

    @pytest.mark.parametrize("kind", [inference_mode, normal_tensors])
    def test_leaving_without_entering_is_an_error(self, kind: type[inference_mode]) -> None:
        block = kind()
        with pytest.raises(RuntimeError, match=NOT_OPEN):
            block.__exit__(None, None, None)
        with block:
            pass
        with pytest.raises(RuntimeError, match=NOT_OPEN):
            block.__exit__(None, None, None)

    def test_leaving_on_another_thread_is_an_error_there(self) -> None:
        mode = inference_mode()
        errors: list[str] = []

        def leave() -> None:
            try:
                mode.__exit__(None, None, None)
            except RuntimeError as error:
                errors.append(str(error))
            assert not torch.is_inference_mode_enabled()

        with mode:
            thread = threading.Thread(target=leave)
            thread.start()
            thread.join()
            assert is_inference_mode_enabled()
        assert NOT_OPEN in errors[0]

    def test_thread_state_is_restored_after_leaving_out_of_order(self) -> None:
        first, second = inference_mode(), inference_mode()
        first.__enter__()
        second.__enter__()
        with pytest.raises(RuntimeError, match=STILL_OPEN):
            first.__exit__(None, None, None)
        assert is_inference_mode_enabled()
        second.__exit__(None, None, None)
        assert not is_inference_mode_enabled()

    def test_object_that_dies_in_its_block_leaves_it(self) -> None:
        inference_mode().__enter__()
        gc.collect()
        assert not is_inference_mode_enabled()

    def test_block_of_a_dead_thread_ends(self) -> None:
        mode = inference_mode()
        thread = threading.Thread(target=mode.__enter__)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match=NOT_OPEN):
            mode.__exit__(None, None, None)

    def test_objects_can_be_copied(self) -> None:
        for block in (inference_mode(False), inference_mode(), inference_mode(trace=True)):
            for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
                assert type(other) is inference_mode
                assert repr(other) == repr(block)
                assert (other.mode, other.trace) == (block.mode, block.trace)
        assert isinstance(copy.copy(normal_tensors()), normal_tensors)

    def test_arguments_are_checked(self) -> None:
        with pytest.raises(TypeError, match="takes True, False or a function to decorate, but `mode` is a int"):
            inference_mode(1)
        with pytest.raises(TypeError, match="takes True, False or a function to decorate, but `mode` is a Tensor"):
            inference_mode(torch.tensor(True))
        with pytest.raises(TypeError, match="inference_mode decorates functions, but this is a int"):
            inference_mode()(1)  # type: ignore[type-var]
        with pytest.raises(TypeError, match="takes no arguments"):
            normal_tensors(True)

    def test_backward_pass_inside_is_on_this_thread(self) -> None:
        weight = torch.ones(2, requires_grad=True)
        loss = (weight * 2).sum()
        with inference_mode():
            loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0]


def decorators() -> list[Any]:
    return [
        pytest.param(inference_mode, id="bare"),
        pytest.param(inference_mode(), id="called"),
        pytest.param(inference_mode(True), id="with True"),
        pytest.param(inference_mode(mode=True), id="with mode=True"),
    ]


enabled = is_inference_mode_enabled


@pytest.mark.parametrize("decorate", decorators())
class TestDecorated:
    def test_function(self, decorate: Any) -> None:
        @decorate
        def double(x: Tensor, *, scale: int = 2) -> Tensor:
            """Double the argument."""
            assert enabled()
            return x * scale

        assert double(torch.ones(1), scale=3).tolist() == [3.0]
        assert double(torch.ones(1)).is_inference()
        assert (double.__name__, double.__doc__) == ("double", "Double the argument.")
        assert list(inspect.signature(double).parameters) == ["x", "scale"]

    def test_function_may_call_itself(self, decorate: Any) -> None:
        @decorate
        def count(n: int) -> int:
            with inference_mode(False):
                return 0 if n == 0 else 1 + count(n - 1)

        assert count(5) == 5

    def test_method(self, decorate: Any) -> None:
        class Model(torch.nn.Module):
            @decorate
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        assert Model()(torch.ones(1)).is_inference()

    def test_error_passes(self, decorate: Any) -> None:
        @decorate
        def fail() -> None:
            raise KeyError("why")

        with pytest.raises(KeyError, match="why"):
            fail()

    def test_generator_is_inside_only_while_it_runs(self, decorate: Any) -> None:
        @decorate
        def generate(n: int) -> Iterator[Tensor]:
            try:
                for _ in range(n):
                    assert enabled()
                    yield torch.ones(1)
                    assert enabled()
            finally:
                assert enabled()

        assert inspect.isgeneratorfunction(generate)
        for tensor in generate(3):
            assert tensor.is_inference()
            assert not enabled()
        with inference_mode(False):
            unfinished = generate(3)
            next(unfinished)
            assert not enabled()
            unfinished.close()

    def test_generators_take_turns(self, decorate: Any) -> None:
        @decorate
        def generate() -> Iterator[bool]:
            while True:
                yield enabled()

        first, second = generate(), generate()
        for _ in range(3):
            assert next(first)
            assert not enabled()
            assert next(second)
            assert not enabled()
        first.close()
        assert next(second)

    def test_generator_gets_sent_values_and_exceptions(self, decorate: Any) -> None:
        @decorate
        def echo() -> Iterator[Any]:
            given = None
            while given != "end":
                try:
                    given = yield given
                except KeyError as error:
                    assert enabled()
                    given = f"caught {error.args[0]}"
            return "returned"  # type: ignore[return-value]

        generator = echo()
        assert next(generator) is None
        assert generator.send("a") == "a"
        assert generator.throw(KeyError("b")) == "caught b"
        assert not enabled()
        with pytest.raises(StopIteration) as stopped:
            generator.send("end")
        assert stopped.value.value == "returned"
        generator = echo()
        next(generator)
        with pytest.raises(ValueError, match="not caught"):
            generator.throw(ValueError("not caught"))
        assert not enabled()

    def test_coroutine_is_inside_only_while_it_runs(self, decorate: Any) -> None:
        @decorate
        async def work(name: str, log: list[str]) -> Tensor:
            for _ in range(3):
                assert enabled()
                log.append(name)
                await asyncio.sleep(0)
            return torch.ones(1)

        async def main() -> None:
            log: list[str] = []
            tasks = [asyncio.create_task(work(name, log)) for name in "ab"]
            while not all(task.done() for task in tasks):
                assert not enabled()
                await asyncio.sleep(0)
            assert log == ["a", "b"] * 3
            assert [task.result().is_inference() for task in tasks] == [True, True]

        assert inspect.iscoroutinefunction(work)
        asyncio.run(main())

    def test_coroutine_is_cancelled_inside(self, decorate: Any) -> None:
        seen: list[bool] = []

        @decorate
        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                seen.append(enabled())

        async def main() -> None:
            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not enabled()

        asyncio.run(main())
        assert seen == [True]

    def test_asynchronous_generator_is_inside_only_while_it_runs(self, decorate: Any) -> None:
        closed: list[bool] = []

        @decorate
        async def generate() -> AsyncIterator[Any]:
            given = None
            try:
                while given != "end":
                    await asyncio.sleep(0)
                    assert enabled()
                    try:
                        given = yield given
                    except KeyError:
                        given = "caught"
            finally:
                closed.append(enabled())

        async def main() -> None:
            generator: Any = generate()
            assert await anext(generator) is None
            assert not enabled()
            assert await generator.asend("a") == "a"
            assert await generator.athrow(KeyError("b")) == "caught"
            assert not enabled()
            with pytest.raises(StopAsyncIteration):
                await generator.asend("end")
            async with aclosing(generate()) as unfinished:
                async for _ in unfinished:
                    break
            assert not enabled()

        assert inspect.isasyncgenfunction(generate)
        asyncio.run(main())
        assert closed == [True, True]


def test_decorator_can_turn_the_mode_off() -> None:
    @inference_mode(False)
    def make() -> Tensor:
        return torch.ones(1, requires_grad=True) * 2

    with inference_mode():
        assert make().grad_fn is not None


@pytest.mark.parametrize("mode", [inference_mode, torch.inference_mode])
def test_decorating_a_class_makes_a_function_and_warns(mode: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = torch.ones(1)

    with pytest.warns(FutureWarning, match="[Dd]ecorat"):
        make = mode()(Model)
    assert isinstance(make(), Model)
    assert make().weight.is_inference()


def test_blocks_held_across_await_are_reported() -> None:
    async def work() -> None:
        with inference_mode():
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def main() -> Any:
        return await asyncio.gather(work(), work(), return_exceptions=True)

    results: list[Any] = asyncio.run(main())
    assert [str(result) for result in results if result is not None] == [str(results[0])]
    assert STILL_OPEN in str(results[0])
    assert not enabled()


class TestCompiled:
    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # by 2.11
    def test_block_in_a_compiled_function(self) -> None:
        @torch.compile(backend="eager")
        def run(x: Tensor) -> Tensor:
            y = x + 1
            with inference_mode():
                return y * 2

        assert run(torch.ones(2)).is_inference()

    def test_compiled_function_in_a_block(self) -> None:
        @torch.compile(backend="eager")
        def run(x: Tensor) -> Tensor:
            return x * 2

        x = torch.ones(2, requires_grad=True)
        assert run(x).requires_grad
        with inference_mode():
            assert run(x).is_inference()
        assert run(x).requires_grad


class TestCheckDispatchState:
    @pytest.mark.parametrize(
        "mode",
        [
            torch.enable_grad,
            torch.no_grad,
            inference_mode,
            torch.inference_mode,
            normal_tensors,
            torch._C._AutoDispatchBelowAutograd,
            torch._C._AutoDispatchBelowADInplaceOrView,
        ],
    )
    def test_guards_are_legal(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        with mode():
            assert check_dispatch_state() == []

    def test_tracking_must_not_be_taken_out_while_autograd_is_there(self) -> None:
        keys = torch._C._dispatch_tls_local_include_set().remove(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._ForceDispatchKeyGuard(keys, torch._C._dispatch_tls_local_exclude_set()):
            (found,) = check_dispatch_state()
        assert "`ADInplaceOrView` is not included although `Autograd` is not excluded" in found

    def test_tracking_must_not_be_excluded_while_autograd_is_there(self) -> None:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)):
            (found,) = check_dispatch_state()
        assert "`ADInplaceOrView` is excluded although `Autograd` is not" in found

    def test_autograd_must_not_be_included(self) -> None:
        with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutogradCPU):
            (found,) = check_dispatch_state()
        assert "An `Autograd` key is included" in found

    def test_grad_mode_is_off_in_inference_mode(self) -> None:
        with inference_mode(), torch.enable_grad():
            (found,) = check_dispatch_state()
        assert "Inference mode is on, and so is grad mode" in found

    def test_keys_and_flag_must_agree(self) -> None:
        outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with inference_mode():
            inside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
            with torch._C._ForceDispatchKeyGuard(*outside):
                found = check_dispatch_state()
        assert any("but `Autograd` is not excluded" in sentence for sentence in found)
        assert any("but `ADInplaceOrView` is included" in sentence for sentence in found)
        with torch._C._ForceDispatchKeyGuard(*inside):
            (sentence,) = check_dispatch_state()
        assert "The keys are those of inference mode, but inference mode is off" in sentence
