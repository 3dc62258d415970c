"""Compares deferred with eager construction on CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from common import assert_same_tensor
from cuda_constructors import tensors_of
from ledger import generator_states
from torch import nn

from torchext.deferred_init import deferred_init, is_deferred, materialize_module, materialize_tensor

__all__ = ["assert_same_values"]


def assert_same_values(build: Callable[[], Any], *, may_only_hold_arguments: bool = False) -> None:
    """Assert that tensors have the values of eager construction in three orders, and modules as a whole.

    At least one must be deferred, unless `build` may return only given tensors.
    """
    torch.manual_seed(0)
    eager = tensors_of(build())
    after_eager = generator_states()
    names = list(eager)
    for order in (names, names[::-1], random.Random(0).sample(names, len(names))):
        torch.manual_seed(0)
        deferred = tensors_of(deferred_init(build))
        assert generator_states() == after_eager, "deferred construction left the generators elsewhere"
        torch.manual_seed(99)
        torch.randn(1000, device="cuda")
        before = generator_states()
        defers = any(is_deferred(tensor) for tensor in deferred.values())
        assert defers or may_only_hold_arguments or not deferred, "nothing is deferred"
        for name in order:
            if is_deferred(deferred[name]):
                materialize_tensor(deferred[name])
            assert_same_tensor(deferred[name], eager[name], name, strictly=False)
        assert generator_states() == before, "materializing moved a generator"
        del deferred

    torch.manual_seed(0)
    module = deferred_init(build)
    if isinstance(module, nn.Module):
        materialize_module(module)
        for name, tensor in tensors_of(module).items():
            assert_same_tensor(tensor, eager[name], name, strictly=False)
        assert generator_states() == after_eager
