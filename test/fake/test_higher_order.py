"""Higher-order operators (`torch.cond` and similar ones) on fake tensors, on fake CUDA devices, and deferred."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from common import assert_same_tensor
from comparisons import PROPERTIES, metadata
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn import Linear, Module, Parameter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake
from torchext.internals.patching import TORCH_RELEASE

Program = Callable[[], Any]


def numbers(*shape: int, requires_grad: bool = False) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) / count).reshape(shape).requires_grad_(requires_grad)


def cond() -> Any:
    x = numbers(3, 4)
    return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), (x,))


def cond_on_constant() -> Any:
    return torch.cond(torch.tensor(False), lambda x: x.cos(), lambda x: x.sin(), (numbers(3),))


def cond_of_several() -> Any:
    x, y = numbers(3), numbers(3, 2)
    return torch.cond(y.sum() > 0, lambda x, y: (x + 1, {"y": y + 1}), lambda x, y: (x - 1, {"y": y * 2}), (x, y))


def gradient_of_cond() -> Any:
    x = numbers(3, 4, requires_grad=True)
    y = torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), (x,))
    return y, torch.autograd.grad(y.sum(), x)


def gradient_of_what_is_closed_over() -> Any:
    x, weight = numbers(3), numbers(3, requires_grad=True)
    y = torch.cond(x.sum() > 0, lambda x: x * weight, lambda x: x + weight, (x,))
    return y, torch.autograd.grad(y.sum(), weight)


def loop() -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), numbers(3)))


def loop_on_values() -> Any:
    return while_loop(lambda x: x.sum() < 30, lambda x: (x + 1,), (numbers(3),))


def scan_of_sums() -> Any:
    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), numbers(3, 4))


def gradient_of_scan() -> Any:
    x, weight = numbers(3, 4, requires_grad=True), numbers(4, requires_grad=True)
    carry, results = scan(lambda carry, x: (carry + x * weight, carry * x), torch.zeros(4), x)
    return carry, results, torch.autograd.grad(carry.sum() + results.sum(), (x, weight))


def gradient_of_what_a_scan_has_closed_over() -> Any:
    x, weight = numbers(3, 4), numbers(4, requires_grad=True)
    carry, results = scan(lambda carry, x: (carry + x * weight, carry * x), torch.zeros(4), x)
    return carry, results, torch.autograd.grad(carry.sum() + results.sum(), weight)


def map_over_rows() -> Any:
    return map_(lambda x, y: x + y, numbers(3, 4), numbers(4))


def associative() -> Any:
    return associative_scan(lambda x, y: x + y, numbers(3, 4), dim=0, combine_mode="generic")


def flex() -> Any:
    query = numbers(1, 2, 16, 8)
    return flex_attention(query, query, query, score_mod=lambda score, b, h, q, kv: score + q - kv)


def flex_with_blocks() -> Any:
    query = numbers(1, 2, 128, 8).transpose(1, 2).contiguous().transpose(1, 2)
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 128, 128, device=query.device.type)
    return flex_attention(query, query, query, block_mask=blocks)


@mark_compile_region
def region(x: Tensor) -> Tensor:
    return x.sin() + 1


def subgraph() -> Any:
    return region(numbers(3))


def product_in_another_dtype() -> Any:
    x = torch.ones(3, 3, dtype=torch.int8)
    return out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)


def recomputed() -> Any:
    x = numbers(3, requires_grad=True)
    y = checkpoint(torch.sin, x, use_reentrant=False)
    return y, torch.autograd.grad(y.sum(), x)


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        *(cond, cond_on_constant, cond_of_several, gradient_of_cond, gradient_of_what_is_closed_over),
        *(
            loop,
            loop_on_values,
            scan_of_sums,
            gradient_of_scan,
            gradient_of_what_a_scan_has_closed_over,
            map_over_rows,
            associative,
        ),
        *(flex, flex_with_blocks, subgraph, product_in_another_dtype, recomputed),
    )
}


@contextmanager
def quietly() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice to compile
        yield


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_fakes_have_the_metadata_of_real_results(name: str) -> None:
    with quietly():
        wanted = PROGRAMS[name]()
        with fake_mode():
            found = PROGRAMS[name]()
    assert all(map(is_fake, tree_leaves(found)))
    assert metadata(found) == metadata(wanted)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_have_fakes_on_fake_devices(name: str) -> None:
    with quietly():
        wanted = PROGRAMS[name]()
        with fake_mode(gpu=True), torch.device("cuda"):
            found = PROGRAMS[name]()
    assert all(tensor.is_cuda for tensor in tree_leaves(found))
    assert metadata(found, PROPERTIES - {"device"}) == metadata(wanted, PROPERTIES - {"device"})


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_deferred_results_have_the_bits_of_eager_ones(name: str) -> None:
    if name in ("gradient_of_scan", "gradient_of_what_a_scan_has_closed_over") and TORCH_RELEASE < (2, 13):
        pytest.skip("eager gradients of `scan` are wrong before 2.13, and those of deferred tensors are not")
    with quietly():
        wanted = tree_leaves(PROGRAMS[name]())
        found = tree_leaves(deferred_init(PROGRAMS[name]))
    assert len(found) == len(wanted)
    for tensor, real in zip(found, wanted, strict=True):
        assert is_deferred(tensor)
        assert_same_tensor(materialize_tensor(tensor).detach(), real.detach(), strictly=False)


class Gated(Module):
    """Branches that use a buffer, and scans that use a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Parameter(torch.ones(()))
        self.linear = Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(self.gate.detach() > 0, lambda x: self.linear(x), lambda x: x * self.gate, (x,))
        carry, _ = scan(lambda carry, row: (carry + row, row * 2), torch.zeros(4), x)
        return carry


def test_forward_of_a_deferred_model_is_that_of_the_eager_one() -> None:
    x = numbers(3, 4)
    torch.manual_seed(0)
    eager = Gated()
    torch.manual_seed(0)
    deferred = deferred_init(Gated)
    with quietly():
        wanted = eager(x)
        found = deferred(x)
    assert is_deferred(found)
    assert_same_tensor(materialize_tensor(found).detach(), wanted.detach(), strictly=False)
    found.sum().backward()
    assert deferred.linear.weight.grad is not None
    materialize_module(deferred)
    assert_same_tensor(deferred.linear.weight.detach(), eager.linear.weight.detach())


def test_model_of_fakes_gets_all_gradients() -> None:
    model = fake_like(Gated())
    with quietly():
        result = model(fake_like(numbers(3, 4)))
        result.sum().backward()
    assert all(parameter.grad is not None and is_fake(parameter.grad) for parameter in model.parameters())


def test_branches_that_return_something_else_need_the_value() -> None:
    with quietly(), fake_mode(), pytest.raises(DataDependentError, match=r"`torch.cond` returns .* if true and"):
        torch.cond(numbers(3).sum() > 0, lambda x: x, lambda x: x[:1], (numbers(3),))


def test_branches_of_different_structure_are_refused() -> None:
    with quietly(), fake_mode(), pytest.raises(RuntimeError, match="Unmatched output spec"):
        torch.cond(numbers(3).sum() > 0, lambda x: x, lambda x: (x, x), (numbers(3),))


def test_operator_that_is_defined_later_is_met() -> None:
    class Twice(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("torchext_twice")  # type: ignore[no-untyped-call]

        def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
            return super().__call__(function, x)  # type: ignore[no-untyped-call]

    with fake_mode():
        pass
    twice = Twice()
    twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda function, x: function(function(x)))
    with fake_mode():
        assert is_fake(twice(torch.sin, numbers(3)))
    found = deferred_init(lambda: twice(torch.sin, numbers(3)))
    assert_same_tensor(materialize_tensor(found), numbers(3).sin().sin())


def test_real_tensors_are_left_to_the_original() -> None:
    with quietly():
        assert type(gradient_of_cond()[0].grad_fn).__name__ == "CondAutogradOpBackward"
