"""The patches for backward passes: what PyTorch's own functions in Python allocate there.

The formulas in C++ are observed: csrc/fake/gradient_factories.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ... import _C
from ...tools.dispatch_keys import making_fakes
from ...tools.leases import while_fakes_live

__all__ = ["install"]

# Recomputes what the user's functions compute, whose factories make real tensors.
CHECKPOINT = "torch.utils.checkpoint"


def install() -> None:
    """Installs the patches."""
    for name in ("apply", "apply_boxed"):
        if hasattr(BackwardCFunction, name):
            while_fakes_live.patch(
                BackwardCFunction,
                name,
                _with_factories_of_gradients,
                "lets functions allocate, such as the compiled ones of aot_autograd",
            )
    for owner, name in (
        (torch._C._autograd, "_push_saved_tensors_default_hooks"),
        (torch._C._autograd.SavedTensor, "register_hooks"),
    ):
        while_fakes_live.patch(
            owner, name, _unpacking_outside_of_formulas, "has gradient formulas call what unpacks saved tensors"
        )


def _unpacking_outside_of_formulas(original: Callable[..., None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        *others, unpack = args
        # aot_autograd looks at hooks that are graphs, which call nothing of the user's.
        if callable(unpack) and not isinstance(unpack, torch.fx.GraphModule):
            unpack = partial(_C.call_outside_of_formula, unpack)
        original(*others, unpack)

    return hook


def _with_factories_of_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, *args: Any) -> Any:
        module: str = getattr(getattr(self, "_forward_cls", None), "__module__", "")
        if not module.startswith("torch.") or module == CHECKPOINT:
            return original(self, *args)
        with _factories_like(args[0] if len(args) == 1 and isinstance(args[0], list) else args):
            return original(self, *args)

    return apply


@contextmanager
def _factories_like(gradients: Any) -> Iterator[None]:
    """Lets factories make what the tensors among `gradients` are: deferred tensors, fakes or real ones."""
    tensors = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    if any(map(_C.is_deferred, tensors)):
        _C.enter_deferred_init()
        try:
            yield
        finally:
            _C.leave_deferred_init()
    elif any(map(_C.is_fake, tensors)):
        with making_fakes():
            yield
    else:
        yield
