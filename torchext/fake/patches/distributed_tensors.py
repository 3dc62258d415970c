"""Distributed tensors of fakes.

Before PyTorch 2.13, operators on them need help. The `Fake` key was above `Python` then, and `dispatchDTensorOp()` in
`python_variable.cpp` calls the operator on the local tensors with all keys above `Python` excluded. If arguments have
to be redistributed first, it leaves the call to Python, where `_patch_calls_of_handlers()` in `tensors.py` can restore
the keys. The patch therefore makes it redistribute always, from the present placements to the same placements.

Some operators have their own handlers (`OpDispatcher._custom_op_handlers`). These are called in the same state, and
call PyTorch functions as well as operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from typing import Any

import torch

from ... import _C
from ...internals.imports import patch_imported
from ...internals.leases import while_fakes_live
from ...internals.torch_release import DIFFERENCES
from ..collectives import teach_offsets

__all__ = ["teach_sharding"]

_MODULES_OF_HANDLERS = ("_dispatch", "_nonlinear_redux", "_tp_conv", "parallel.loss")
_MODULE_OF_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"

_FAKE_ABOVE_PYTHON = DIFFERENCES["fake_above_python"]


def teach_sharding() -> None:
    """Patch the code that distributes tensors, if the program has imported it. Importing it is slow."""
    teach_offsets()
    if _FAKE_ABOVE_PYTHON.applies:
        patch_imported("torch.distributed.tensor._dispatch", ("OpDispatcher",), _teach_propagation)
        # The handlers of context parallelism are in their own module, and registered on first use.
        patch_imported(_MODULE_OF_CONTEXT_PARALLEL, ("_sdpa_handler",), _teach_handlers)


def _teach_propagation(module: Any) -> None:
    while_fakes_live.patch(
        module.OpDispatcher,
        "_propagate_op_sharding_dispatch_slow_path",
        _leaving_calls_to_python,
        "calls operators on local tensors below the Fake key",
        releases=_FAKE_ABOVE_PYTHON.releases,
    )
    while_fakes_live.patch(
        module.OpDispatcher,
        "redistribute_local_args",
        _from_handler,
        "computes on local tensors below the Fake key",
        releases=_FAKE_ABOVE_PYTHON.releases,
    )
    for name in _MODULES_OF_HANDLERS:
        _teach_handlers(import_module(f"torch.distributed.tensor.{name}"))


def _teach_handlers(module: Any) -> None:
    for name, function in vars(module).items():
        if isfunction(function) and function.__module__ == module.__name__ and name.endswith("_handler"):
            while_fakes_live.patch(
                module,
                name,
                _from_handler,
                "computes on local tensors below the Fake key",
                releases=_FAKE_ABOVE_PYTHON.releases,
            )


def _leaving_calls_to_python(original: Callable[..., Any]) -> Callable[..., Any]:
    # The cache may hold results for real tensors, which would bypass the patch.
    torch._C._clear_DTensor_sharding_propagator_cache()

    def _propagate_op_sharding_dispatch_slow_path(
        self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
    ) -> Any:
        sharding = original(self, op_call, args, kwargs, op_info, try_cache)
        if not dataclasses.is_dataclass(sharding) or getattr(sharding, "needs_redistribute", True):
            return sharding
        return dataclasses.replace(sharding, needs_redistribute=True, redistribute_schema=op_info.schema)  # type: ignore[type-var]

    return _propagate_op_sharding_dispatch_slow_path


def _from_handler(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _C.call_from_handler(original, *args, **kwargs)

    return run
