"""Patches for reads of fakes in Python data from which PyTorch makes tensors.

`torch.tensor([x, y])`, `torch.asarray()`, `torch.Tensor()` and similar functions exclude the `Fake` and `DeferredInit`
keys while they read their data (`internal_new_from_data()`, tensor_new.cpp). The dispatcher therefore does not call our
handlers. A TorchFunctionMode could observe these reads, but under such a mode, code that checks
`torch.overrides.has_torch_function()` takes another path (`torch.nn.TransformerEncoder` in eval mode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import _C
from ...internals.dispatch_keys import with_our_keys
from ...internals.leases import while_fakes_live
from ...internals.patching import Concerns

__all__ = ["install"]

# The methods that read an element (`store_scalar()`, python_scalars.h).
READS_OF_ELEMENTS = ("item", "__float__", "__int__", "__index__", "__bool__", "__complex__")

# The factories that accept a storage.
FACTORIES = ("tensor", "as_tensor", "asarray")

Storage = torch.UntypedStorage | torch.TypedStorage

_C.provide("typed_storage", torch.TypedStorage)


def install() -> None:
    """Install the patches."""
    reason = "is called with the Fake key excluded while tensors are made of Python data"
    for name in READS_OF_ELEMENTS:
        while_fakes_live.patch(torch.Tensor, name, _reading_with_keys, reason, concerns=Concerns.FAKES)
    while_fakes_live.patch(torch.Tensor, "__iter__", _iterating_over_values, reason, concerns=Concerns.FAKES)
    for name in FACTORIES:
        while_fakes_live.patch(
            torch,
            name,
            _made_on_storage,
            "makes a tensor on a storage without calling an operator on a fake",
            concerns=Concerns.FAKES,
        )


def _reads_python_data() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded("Fake")


def _reading_with_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: torch.Tensor) -> Any:
        if not _reads_python_data():
            return original(self)
        with with_our_keys():
            return original(self)

    return read


def _iterating_over_values(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Compute the rows of a deferred tensor together."""

    def __iter__(self: torch.Tensor) -> Iterator[Any]:
        if _reads_python_data() and _C.is_deferred(self):
            return original(_C.evaluate(self))
        return original(self)

    return __iter__


def _made_on_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the result of `original` share the memory of a storage of fakes."""

    def make(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Storage)]
        if not given or not _C.is_storage_of_fakes(_untyped(given[0])):
            return original(*args, **kwargs)
        # A call on another storage determines the inferred metadata and the errors.
        other = [_small_storage(value) if value is given[0] else value for value in args]
        others = {name: _small_storage(value) if value is given[0] else value for name, value in kwargs.items()}
        form = original(*other, **others)
        storage = _untyped(given[0])
        made = torch.empty(0, dtype=form.dtype, device=storage.device).set_(storage)
        return made.to(form.device).requires_grad_(form.requires_grad)

    return make


def _small_storage(storage: Storage) -> Storage:
    """Return a real storage of at least one element of any dtype."""
    small = torch.UntypedStorage(16)
    if isinstance(storage, torch.UntypedStorage):
        return small
    return torch.TypedStorage(wrap_storage=small, dtype=storage.dtype, _internal=True)


def _untyped(storage: Storage) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
