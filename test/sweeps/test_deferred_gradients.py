"""Forward and backward on deferred tensors give eager's bits, including gradients, in any order of materialization.

All of `module_db`, and all differentiable and all in-place operators of `op_db`. The exceptions are the tables below.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import some
from torch import Tensor, nn
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db, modules
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

# The results of LAPACK's least squares depend on where the matrices are in memory.
NOT_REPRODUCIBLE = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
NO_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

Function = Callable[..., Any]


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.dtype in (torch.float32, torch.float64) else tensor.clone()


def halved(tensor: Tensor) -> Tensor:
    return tensor / 2 if tensor.dtype in (torch.float32, torch.float64) else tensor


def with_hooks(fn: Function) -> Function:
    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(doubled, halved):
            return fn(*args)

    return run


def with_checkpoint(fn: Function) -> Function:
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


WAYS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda fn: fn,
    "hooks": with_hooks,
    "checkpoint": with_checkpoint,
}


def leaf(value: object) -> object:
    """Return a copy of a tensor, which deferred_init records, as a leaf."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())
    return copy.requires_grad_(value.requires_grad)


def differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]


def weighted(output: Tensor) -> Tensor:
    return torch.full_like(output, 0.5)


def in_place(op: OpInfo) -> Function:
    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        written = first.clone()
        op.inplace_variant(written, *args, **kwargs)
        return written

    return run


def differentiate(fn: Function, inputs: Any) -> list[Any]:
    """Return the results of `fn`, and the gradients of its inputs."""
    first, args, kwargs = inputs
    results = fn(first, *args, **kwargs)
    outputs = differentiable(results)
    leaves = differentiable(inputs)
    found: list[Any] = list(tree_leaves(results))
    if outputs and leaves:
        found += torch.autograd.grad(outputs, leaves, [weighted(o) for o in outputs], allow_unused=True)
    return [*found, *leaves]


def deferred(sample: SampleInput) -> Any:
    return deferred_init(tree_map, leaf, (sample.input, tuple(sample.args), sample.kwargs))


def eager(sample: SampleInput) -> Any:
    return tree_map(leaf, (sample.input, tuple(sample.args), sample.kwargs))


def assert_same_values(found: list[Any], wanted: list[Any], with_values: bool, in_reverse: bool) -> None:
    assert len(found) == len(wanted)
    for tensor in reversed(found) if in_reverse else found:
        if isinstance(tensor, Tensor) and is_deferred(tensor):
            materialize_tensor(tensor)
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, Tensor):
            assert type(one) is type(other)
            assert one == other or one != one
            continue
        assert (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
        assert one.requires_grad == other.requires_grad
        if with_values:
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


def compare(fn: Function, sample: SampleInput, with_values: bool, orders: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    try:
        wanted = differentiate(fn, eager(sample))
    except Exception:  # a sample that this build of PyTorch cannot run
        return
    for in_reverse in orders:
        torch.manual_seed(0)
        found = differentiate(fn, deferred(sample))
        assert_same_values(found, wanted, with_values, in_reverse)


def sweep(op: OpInfo, make: Callable[[OpInfo], Function], ways: list[str], count: int | None, both: bool) -> None:
    orders = (False, True) if both else (True,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that are meant to provoke them
        for way in ways:
            samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
            for sample in itertools.islice(samples, count):
                compare(WAYS[way](make(op)), sample, op.name not in NO_VALUES, orders)


def out_of_place(op: OpInfo) -> Function:
    function: Function = op.op
    return function


def train(module: nn.Module, inputs: Any, way: Callable[[Function], Function]) -> list[Any]:
    """Take two steps, and return the outputs, parameters, gradients and buffers."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) if list(module.parameters()) else None
    found: list[Any] = []
    for _ in range(2):
        args, kwargs = copy.deepcopy(inputs)
        results = way(lambda *args, kwargs=kwargs: module(*args, **kwargs))(*args)
        outputs = differentiable(results)
        if outputs:
            torch.autograd.backward(outputs, [weighted(output) for output in outputs])
        if optimizer is not None:
            optimizer.step()
        found += tree_leaves(results)
    return [*found, *module.parameters(), *(p.grad for p in module.parameters()), *module.buffers()]


def compare_module(info: ModuleInfo, make: Callable[[], nn.Module], inputs: Any, way: str, in_reverse: bool) -> None:
    torch.manual_seed(0)
    try:
        wanted = train(make(), inputs, WAYS[way])
    except Exception:  # an input that this build of PyTorch cannot run
        return
    torch.manual_seed(0)
    module = deferred_init(make)
    found = train(module, inputs, WAYS[way])
    if not in_reverse:
        materialize_module(module)
        assert not any(is_deferred(parameter.grad) for parameter in module.parameters() if parameter.grad is not None)
    assert_same_values(found, wanted, with_values=True, in_reverse=in_reverse)


def sweep_module(
    info: ModuleInfo, dtype: torch.dtype, training: bool, ways: list[str], count: int | None, both: bool
) -> None:
    torch.manual_seed(0)
    options = {"device": "cpu", "dtype": dtype, "requires_grad": False, "training": training}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about the arguments
        inputs_of_module = [one for one in info.module_inputs_func(info, **options) if one.forward_input is not None]
        for one in some(inputs_of_module, count):
            built = one.constructor_input

            def make(built: Any = built) -> nn.Module:
                module: nn.Module = info.module_cls(*built.args, **built.kwargs)
                return module.train(training)

            inputs = (one.forward_input.args, one.forward_input.kwargs)
            for way, in_reverse in itertools.product(ways, (False, True) if both else (False,)):
                compare_module(info, make, inputs, way, in_reverse)


DIFFERENTIABLE = [op for op in op_db if op.supports_autograd and full_name(op) not in NOT_REPRODUCIBLE]
IN_PLACE = [op for op in op_db if op.inplace_variant is not None and full_name(op) not in NOT_REPRODUCIBLE]


class TestOperators(TestCase):
    @ops(IN_PLACE, allowed_dtypes=(torch.float32,))
    def test_gradients_of_overwritten_values(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        sweep(op, in_place, ["plain", "hooks"], 1, both=False)

    @ops(DIFFERENTIABLE, allowed_dtypes=(torch.float32,))
    def test_gradients(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        sweep(op, out_of_place, ["hooks"], 1, both=False)


class TestModules(TestCase):
    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_gradients(self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool) -> None:
        sweep_module(module_info, dtype, training, ["plain"], 16, both=False)


class TestAllSamples(TestCase):
    @pytest.mark.long
    @modules(module_db, allowed_dtypes=(torch.float32, torch.float64, torch.bfloat16))
    def test_gradients_of_modules(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> None:
        sweep_module(module_info, dtype, training, list(WAYS), None, both=True)

    @pytest.mark.long
    @ops(IN_PLACE, allowed_dtypes=(torch.float32,))
    def test_gradients_of_overwritten_values(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        sweep(op, in_place, list(WAYS), None, both=True)

    @pytest.mark.long
    @ops(DIFFERENTIABLE, allowed_dtypes=(torch.float32,))
    def test_gradients(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        sweep(op, out_of_place, list(WAYS), None, both=True)


instantiate_device_type_tests(TestOperators, globals(), only_for="cpu")
instantiate_device_type_tests(TestModules, globals(), only_for="cpu")
instantiate_device_type_tests(TestAllSamples, globals(), only_for="cpu")
