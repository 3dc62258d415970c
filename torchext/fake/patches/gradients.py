"""Patches for allocations of Python functions in backward passes.

Gradient formulas in C++ are observed: csrc/extensions/composites/gradient_formulas.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ... import _C
from ...internals.dispatch_keys import making_fakes
from ...internals.leases import while_fakes_live
from ...internals.patching import Function

__all__: list[str] = []

# It recomputes the user's functions, whose factories make real tensors.
CHECKPOINT = "torch.utils.checkpoint"


def _hook(count: int, original: Function, /, *args: Any, **kwargs: Any) -> None:
    """Wrap the last two of `count` arguments, which pack and unpack a tensor."""
    # Errors about wrong arguments quote the arguments. aot_autograd inspects hooks that are graphs, and these do
    # not call functions of the program.
    is_method = not args[:-2] or isinstance(args[0], torch._C._autograd.SavedTensor)
    are_hooks = not kwargs and len(args) == count and is_method and all(map(callable, args[-2:]))
    if not are_hooks or any(isinstance(one, torch.fx.GraphModule) for one in args[-2:]):
        original(*args, **kwargs)
        return
    outside = (update_wrapper(partial(_C.call_outside_of_formula, one), one) for one in args[-2:])
    original(*args[:-2], *outside)


for _owner, _name, _count in (
    (torch._C._autograd, "_push_saved_tensors_default_hooks", 2),
    (torch._C._autograd.SavedTensor, "register_hooks", 3),
):
    while_fakes_live.replaces(_owner, _name, reason="makes formulas call functions of the program")(
        partial(_hook, _count)
    )


FUNCTIONS_ALLOCATE = "lets functions allocate, such as the compiled ones of aot_autograd"


@while_fakes_live.replaces(BackwardCFunction, "apply_boxed", needs="apply_boxed", reason=FUNCTIONS_ALLOCATE)
@while_fakes_live.replaces(BackwardCFunction, "apply", reason=FUNCTIONS_ALLOCATE)
def _apply(original: Function, self: Any, *args: Any) -> Any:
    module: str = getattr(getattr(self, "_forward_cls", None), "__module__", "")
    if not module.startswith("torch.") or module == CHECKPOINT:
        return original(self, *args)
    with _factories_like(args[0] if len(args) == 1 and isinstance(args[0], list) else args):
        return original(self, *args)


@contextmanager
def _factories_like(gradients: Any) -> Iterator[None]:
    """Let factories make tensors like those among `gradients`: deferred, fake or real."""
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
