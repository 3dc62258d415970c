"""Blocks of inference mode inside and around compiled code: one graph, and the same tensors as eager code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import BACKENDS, check_compiled, check_same, compiled, graph_breaks, graphs
from torch import Tensor, nn

from torchext.inference import (
    inference_mode,
    is_inference_mode_enabled,
    normal_tensors,
    origin,
    to_normal,
    trace_origins,
)

THIS = Path(__file__).name


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


W = torch.eye(2) + 0.5
ON, OFF, NORMAL = inference_mode(), inference_mode(False), normal_tensors()


@inference_mode
def decorated(x: Tensor) -> Any:
    return x @ W, [torch.zeros(3)]


@inference_mode(False)
def training(x: Tensor) -> Tensor:
    return x @ W


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    @inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


MODEL = Model()


def block(x: Tensor) -> Any:
    with inference_mode():
        y = x @ W
    return y, x * 2


def nested(x: Tensor) -> Any:
    with ON:
        y = x * 2
        with OFF:
            a = torch.ones(2) + 1
            with inference_mode():
                b = a + 1
        with normal_tensors():
            c = x + 1
            with NORMAL, ON:
                d = c + 1
        y.add_(1)
    return y, a, b, c, d, x + 1


def views(x: Tensor) -> Any:
    with inference_mode():
        y = x * 2
        return y, y.view(-1), y.t(), y[0], x * 3


def views_of_inputs(x: Tensor) -> Any:
    with inference_mode():
        return x.view(-1), x[0], x


def decorators(x: Tensor) -> Any:
    return decorated(x), training(x), MODEL(x)


def decorates_inside(x: Tensor) -> Any:
    @inference_mode
    def on(x: Tensor) -> Tensor:
        return x @ W

    @normal_tensors()
    def normal(x: Tensor) -> Tensor:
        return on(x) + 1

    return on(x), normal(x), OFF(lambda x: x @ W)(x)


def exception(x: Tensor) -> Any:
    try:
        with inference_mode(), inference_mode(False):
            y = x @ W
            raise ValueError
    except ValueError:
        return y, x @ W


def used_afterwards(x: Tensor) -> Any:
    with inference_mode():
        y = x * 2
    with normal_tensors():
        z = x * 3
    return y + 1, y, z, z * 2


def empty(x: Tensor) -> Any:
    with inference_mode():
        pass
    with inference_mode(False), normal_tensors():
        pass
    return x + 1


def made_normal(x: Tensor) -> Any:
    with inference_mode():
        y, z = x @ W, x * 1
        y.add_(1)
        a = y + 1
    return to_normal(y), to_normal([z]), a, y.view(-1)


def asked_for_the_mode(x: Tensor) -> Any:
    with inference_mode():
        on = is_inference_mode_enabled()
        with normal_tensors():
            return on, is_inference_mode_enabled(), x + 1


def with_autocast(x: Tensor) -> Any:
    with inference_mode(), torch.autocast("cpu"):
        return x @ W, x + 1


PROGRAMS = [
    block,
    nested,
    views,
    views_of_inputs,
    decorators,
    decorates_inside,
    exception,
    used_afterwards,
    empty,
    made_normal,
    asked_for_the_mode,
    with_autocast,
]


@pytest.mark.cases(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_is_one_graph_with_eager_results(program: Callable[[Tensor], Any], backend: str) -> None:
    x = torch.arange(4.0).view(2, 2)
    check_compiled(program, x, backend=backend)
    check_compiled(program, x.requires_grad_(), backend=backend)


@pytest.mark.cases(10)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_inside_of_inference_mode(program: Callable[[Tensor], Any], backend: str, requires_grad: bool) -> None:
    x = torch.arange(4.0).view(2, 2).requires_grad_(requires_grad)
    with inference_mode():
        wanted = program(x)
        found = compiled(program, backend)(x)
    check_same(found, wanted)
    assert graph_breaks() == 0


@pytest.mark.ci
@pytest.mark.parametrize("program", [nested, decorated])
def test_inductor(program: Callable[[Tensor], Any]) -> None:
    x = torch.arange(4.0).view(2, 2).requires_grad_()
    check_same(compiled(program, "inductor")(x), program(x), counts_writes=False)
    assert graph_breaks() == 0


@pytest.mark.parametrize("backend", BACKENDS)
class TestWrites:
    def test_inputs_that_are_written_count_versions(self, backend: str) -> None:
        def function(x: Tensor, cache: Tensor) -> Tensor:
            with inference_mode():
                x.add_(1)
                cache[0] = x
                return x + cache

        def run(function: Callable[..., Tensor]) -> Any:
            x = torch.zeros(2)
            with inference_mode():
                cache = torch.zeros(2, 2)
            return function(x, cache), x, x._version > 0, cache

        check_same(run(compiled(function, backend))[0], run(function)[0])
        found, wanted = run(compiled(function, backend)), run(function)
        assert found[2] is wanted[2] is True
        torch.testing.assert_close(found[1:], wanted[1:])

    def test_training_continues_during_a_block(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            with inference_mode():
                scale = x.sum()
            loss = (x * x).sum()
            return loss, scale

        x = torch.ones(2, requires_grad=True)
        loss, scale = compiled(function, backend)(x)
        loss.backward()
        assert scale.is_inference()
        assert x.grad.tolist() == [2.0, 2.0]

    def test_inference_tensor_shares_no_memory_with_saved_tensors(self, backend: str) -> None:
        if backend == "eager":
            pytest.skip("autograd refuses to save the inference tensor, as in eager code")

        def function(x: Tensor, weight: Tensor) -> Any:
            with inference_mode():
                scale = x * 2
            return (weight * scale).sum(), scale

        weight = torch.ones(2, requires_grad=True)
        loss, scale = compiled(function, backend)(torch.ones(2), weight)
        with inference_mode():
            scale.zero_()
        loss.backward()
        assert weight.grad.tolist() == [2.0, 2.0]


class TestGraphBreaks:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_state_is_restored_behind_a_break_in_a_block(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            with inference_mode():
                y = x @ W
                with normal_tensors():
                    torch._dynamo.graph_break()
                    z = y @ W
                a = y + 1
            return y, z, a, x @ W

        x = torch.eye(2)
        check_same(compiled(function, backend, fullgraph=False)(x), function(x))
        assert graph_breaks() == 1
        assert not torch.is_inference_mode_enabled()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_an_error_of_an_operator_leaves_the_block(self, backend: str) -> None:
        def function(x: Tensor, index: Tensor) -> Tensor:
            with inference_mode(), normal_tensors(), inference_mode():
                return (x @ W)[index]

        run = compiled(function, backend)
        run(torch.eye(2), torch.tensor([0]))
        with pytest.raises(IndexError, match="out of (bounds|range)"):
            run(torch.eye(2), torch.tensor([7]))
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        with inference_mode():  # pairs, so no block is open
            pass

    def test_to_normal_of_inputs_is_not_traced(self) -> None:
        def function(x: Tensor) -> Tensor:
            return to_normal(x)

        with inference_mode():
            x = torch.ones(2)
        assert compiled(function, fullgraph=False)(x) is x
        assert not x.is_inference()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torchext: to_normal.* an input of the compiled code"):
            compiled(function)(x)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_to_normal_needs_no_block_in_the_graph(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            return to_normal(x * 2), x + 1

        x = torch.ones(2)
        with inference_mode():
            found, wanted = compiled(function, backend)(x), function(x)
        check_same(found, wanted)
        assert graph_breaks() == 0

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_to_normal_of_all_that_a_block_has_made(self, backend: str) -> None:
        def function(x: Tensor) -> Any:
            with inference_mode():
                y = x * 2
            return to_normal(y)

        check_compiled(function, torch.ones(2, requires_grad=True), backend=backend)

    def test_to_normal_of_views_is_not_traced(self) -> None:
        def function(x: Tensor) -> Any:
            with inference_mode():
                y = x * 2
                view = y.view(-1)
            to_normal(y).add_(1)
            return y, view

        x = torch.ones(2)
        check_same(compiled(function, fullgraph=False)(x), function(x))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="torchext: to_normal.* shares memory with another one"):
            compiled(function)(x)

    def test_block_in_a_checkpoint_is_refused(self) -> None:
        def function(x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

        with pytest.raises(Exception, match="torchext: block of inference mode in a higher-order operator"):
            compiled(function, "aot_eager")(torch.eye(2))


class TestRecompilation:
    def test_as_often_as_for_blocks_of_pytorch(self) -> None:
        counts = []
        for mode in (inference_mode, torch.inference_mode):

            def function(x: Tensor, is_enabled: bool, mode: Any = mode) -> Tensor:
                with mode(is_enabled):
                    return x @ W

            run = compiled(function)
            for is_enabled in (True, False, True):
                run(torch.eye(2), is_enabled)
                with mode():
                    run(torch.eye(2), is_enabled)
            counts.append(graphs())
        assert counts[0] == counts[1]

    def test_blocks_that_are_alike_share_a_graph(self) -> None:
        def function(x: Tensor, block: Any) -> Tensor:
            with block:
                return x @ W

        run = compiled(function)
        assert [run(torch.eye(2), inference_mode()).is_inference() for _ in range(3)] == [True] * 3
        assert graphs() == 1
        assert not run(torch.eye(2), OFF).is_inference()
        assert not run(torch.eye(2), NORMAL).is_inference()
        assert graphs() == 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_compiled_block_is_one_origin(backend: str, is_everywhere: bool) -> None:
    def function(x: Tensor) -> Any:
        with inference_mode(trace=not is_everywhere):
            return x @ W + 1

    run = compiled(function, backend)
    trace_origins(is_everywhere)
    try:
        result = run(torch.eye(2))
    finally:
        trace_origins(False)
    assert Path(origin(result).file).name == THIS
    assert graph_breaks() == 0
