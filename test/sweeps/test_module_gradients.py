"""Training of every module of `module_db`, deferred: outputs, parameters, gradients and buffers have eager's bits."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiers
import torch
from common import some
from sweeps.checks.deferred import WAYS, Function, assert_same_values, differentiable, weighted
from torch import nn
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import ModuleInfo, module_db, modules
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_leaves

from torchext.deferred_init import deferred_init, is_deferred, materialize_module


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


class TestModules(TestCase):
    @pytest.mark.scaled
    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_training_equals_eager_training(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> None:
        sweep_module(module_info, dtype, training, ["plain"], tiers.amount(2, 16), both=False)

    @pytest.mark.long
    @modules(module_db, allowed_dtypes=(torch.float32, torch.float64, torch.bfloat16))
    def test_training_in_all_ways_equals_eager_training(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> None:
        sweep_module(module_info, dtype, training, list(WAYS), None, both=True)


instantiate_device_type_tests(TestModules, globals(), only_for="cpu")
