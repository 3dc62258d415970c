"""What PyTorch reads of deferred tensors when it makes tensors of Python data, in constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _C
from ..fake.patches.tensors import make_tensor, real_value
from ..tools.dispatch_keys import with_our_keys

__all__ = ["ReadsInTensorFunctions"]


# The factories that read elements and can be asked for by a mode, and how they call what they read.
DATA_OF_FACTORIES: dict[Callable[..., Any], str] = {torch.tensor: "data", torch.as_tensor: "data", torch.asarray: "obj"}


# What reads an element (`store_scalar()`, python_scalars.h).
READS_OF_ELEMENTS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__index__", "__bool__", "__complex__")
)


class ReadsInTensorFunctions(TorchFunctionMode):
    """Lets `torch.tensor([x, y])`, `torch.asarray()`, `torch.Tensor()` and the like read values of deferred tensors.

    All of them exclude the `Fake` and `DeferredInit` keys while they read their argument (tensor_new.cpp), so the
    dispatcher does not ask us. A mode is asked, on this thread, and leaves nothing behind: about the first two as such,
    about the constructors of tensor types only when they read an element.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, with real values in what it would read."""
        kwargs = kwargs or {}
        if func in DATA_OF_FACTORIES:
            return _make_of_real_values(func, args, kwargs)
        if func in READS_OF_ELEMENTS and torch._C._dispatch_tls_is_dispatch_key_excluded("DeferredInit"):
            return _read_with_keys(func, args)
        return func(*args, **kwargs)


def _make_of_real_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = DATA_OF_FACTORIES[func]
    if not args and name not in kwargs:
        return func(**kwargs)  # raises
    rest = {key: value for key, value in kwargs.items() if args or key != name}
    data = args[0] if args else kwargs[name]
    if isinstance(data, torch.UntypedStorage | torch.TypedStorage) and _C.is_storage_of_fakes(_untyped(data)):
        return _make_on_storage(func, data, rest)
    if func is torch.tensor:
        return make_tensor(data, *args[1:], **rest)
    return func(data if isinstance(data, torch.Tensor) else real_value(data), *args[1:], **rest)


def _make_on_storage(func: Callable[..., Any], storage: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` makes shares the memory of a storage. What it infers and refuses is tried out on another one."""
    other: Any = torch.UntypedStorage(16)  # at least one element of any dtype
    if isinstance(storage, torch.TypedStorage):
        other = torch.TypedStorage(wrap_storage=other, dtype=storage.dtype, _internal=True)
    form = func(other, **kwargs)
    made = torch.empty(0, dtype=form.dtype, device=_untyped(storage).device).set_(_untyped(storage))
    return made.to(form.device).requires_grad_(form.requires_grad)


def _untyped(storage: torch.UntypedStorage | torch.TypedStorage) -> torch.UntypedStorage:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def _read_with_keys(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with with_our_keys():
        return func(*args)
