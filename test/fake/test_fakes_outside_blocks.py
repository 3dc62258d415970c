"""Results of fakes are fake in and outside of blocks, including PyTorch's temporary buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweeps.operators import tensors_in
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake

DIFFERENTIABLE = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]


def fake(*shape: int) -> Tensor:
    return fake_like(torch.ones(*shape, device="meta"), device="cpu")


def invertible() -> Tensor:
    return torch.arange(9.0).reshape(3, 3).add_(torch.eye(3))


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    function(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    return x.grad


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1).values,
    "sgn": torch.sgn,
    "matrix_exp": torch.matrix_exp,
    "compiled": torch.compile(lambda x: x.max(1).values + x.sgn().sum(), backend="aot_eager"),
}

CALLS: dict[str, Callable[[Tensor], object]] = {
    "inv": lambda x: torch.linalg.inv(x, out=torch.empty_like(x)),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x, x[:2]]),
    "norm": torch.linalg.norm,
    "stack": lambda x: torch.vstack([x, x], out=x.new_empty(6, 3)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_fakes_are_fake(name: str) -> None:
    found = gradient(GRADIENTS[name], fake(3, 3))
    assert is_fake(found)
    assert found.shape == (3, 3)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_real_tensors_stay_real_while_fakes_live(name: str) -> None:
    alive = fake(3)
    assert not is_fake(gradient(GRADIENTS[name], torch.ones(3, 3)))
    assert is_fake(alive)


def test_each_root_of_a_backward_pass_decides_for_itself() -> None:
    real, other = torch.ones(3, 3, requires_grad=True), fake(3, 3).requires_grad_()
    torch.autograd.backward([real.max(1).values.sum() + real.sgn().sum(), other.max(1).values.sum()])
    assert not is_fake(real.grad)
    assert is_fake(other.grad)


def test_factories_of_a_users_backward_make_real_tensors() -> None:
    made = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            made.append(torch.zeros(3))
            return grads[0] * 2

    assert is_fake(gradient(lambda x: Doubled.apply(x).sgn(), fake(3)))
    assert not is_fake(made[0])
    assert not is_fake(torch.zeros(3))


@pytest.mark.parametrize("name", CALLS)
def test_temporaries_of_composite_operators_are_fake(name: str) -> None:
    results = tree_leaves(CALLS[name](fake(3, 3)))
    expected = tree_leaves(CALLS[name](torch.eye(3)))
    assert [(is_fake(found), found.shape) for found in results] == [(True, real.shape) for real in expected]


@pytest.mark.parametrize("name", ["max", "sgn", "matrix_exp", *CALLS])
def test_allocations_for_deferred_tensors_are_deferred(name: str) -> None:
    def run(x: Tensor) -> list[Any]:
        return [gradient(GRADIENTS[name], x)] if name in GRADIENTS else tree_leaves(CALLS[name](x))

    found = run(deferred_init(invertible))
    assert all(map(is_deferred, found))
    assert all(map(torch.equal, map(materialize_tensor, found), run(invertible())))


def forward_and_backward(op: OpInfo, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the results, and the gradients of the arguments."""
    results = tensors_in(op.op(args[0], *args[1], **args[2]))
    losses = [result.sum() for result in results if result.requires_grad]
    if losses:
        sum(losses[1:], losses[0]).backward()
    return [*results, *(tensor.grad for tensor in tensors_in(args) if tensor.is_leaf and tensor.grad is not None)]


def samples_of(op: OpInfo) -> Iterator[tuple[Any, ...]]:
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 4):
        args = (sample.input, sample.args, sample.kwargs)
        tensors = tensors_in(args)
        if tensors and all(tensor.layout is torch.strided for tensor in tensors):
            yield args


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_all_results_and_gradients_are_fake(part: int) -> None:
    wrong: dict[str, object] = {}
    for op in DIFFERENTIABLE[part::8]:
        name = op.formatted_name
        for args in samples_of(op):
            fakes = tree_map_only(Tensor, fake_like, args)
            try:
                results = forward_and_backward(op, fakes)
            except Exception as error:  # other tests cover errors
                if "into the real tensor" in str(error):
                    wrong[name] = error
                continue
            if not all(map(is_fake, results)):
                wrong[name] = [is_fake(result) for result in results]
    assert not wrong


def test_code_recomputed_by_a_checkpoint_makes_the_same_tensors() -> None:
    made: list[bool] = []

    def function(x: Tensor) -> Tensor:
        made.append(is_fake(torch.zeros(1)))
        return x.exp() * x.sin()

    checkpoint(function, fake(3).requires_grad_(), use_reentrant=False).sum().backward()
    assert made == [False, False]


def test_code_that_a_checkpoint_computes_again_cannot_compare_fakes() -> None:
    calls = itertools.count()

    def function(x: Tensor) -> Tensor:
        if next(calls) > 0:
            torch.allclose(x, x)
        return x.exp() * x.sin()

    result = checkpoint(function, fake(3).requires_grad_(), use_reentrant=False)
    with pytest.raises(DataDependentError, match="allclose"):
        result.sum().backward()


@pytest.mark.parametrize("is_default", [False, True], ids=["of one tensor", "of a block"])
def test_function_that_unpacks_saved_fakes_may_write_real_tensors(is_default: bool) -> None:
    count = torch.zeros(())

    def unpack(tensor: Tensor) -> Tensor:
        count.add_(torch.ones(()))
        return tensor

    x = fake(3).requires_grad_()
    if is_default:
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
            y = x.sin()
    else:
        y = x.sin()
        y.grad_fn._raw_saved_self.register_hooks(torch.detach, unpack)  # type: ignore[union-attr]
    y.sum().backward()
    assert count == 1
    assert x.grad is not None
    assert is_fake(x.grad)


def test_function_that_unpacks_saved_fakes_makes_fakes_in_fake_mode() -> None:
    made: list[bool] = []

    def unpack(tensor: Tensor) -> Tensor:
        made.append(is_fake(torch.ones(())))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
        y = fake(3).requires_grad_().sin().sum()
    with fake_mode():
        y.backward()
    assert made == [True]


@pytest.mark.parametrize("are_named", [False, True])
def test_engine_that_is_called_directly_runs_on_fake_cuda(are_named: bool) -> None:
    """Like Megatron."""
    with fake_mode(gpu=True):
        weight = torch.ones(3, device="cuda", requires_grad=True)
        loss = (weight * 2).sum()
        grads = (torch.ones_like(loss),)
    named = {"tensors": (loss,), "grad_tensors": grads, "keep_graph": False, "create_graph": False, "inputs": ()}
    arguments, named = ((), named) if are_named else (tuple(named.values()), {})
    run = torch.autograd.Variable._execution_engine.run_backward
    run(*arguments, **named, allow_unreachable=True, accumulate_grad=True)
    assert str(weight.grad.device) == "cuda:0"
