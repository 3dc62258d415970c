"""Patches for reads of fakes in Python data from which PyTorch makes tensors.

`torch.tensor([x, y])`, `torch.asarray()`, `torch.Tensor()` and similar functions exclude the `Fake` and `DeferredInit`
keys while they read their data (`internal_new_from_data()`, tensor_new.cpp). The dispatcher therefore does not call our
handlers. A TorchFunctionMode could observe these reads, but under such a mode, code that checks
`torch.overrides.has_torch_function()` takes another path (`torch.nn.TransformerEncoder` in eval mode).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...internals.dispatch_keys import with_our_keys
from ...internals.leases import while_fakes_live
from ...internals.patching import Concerns, Function

__all__: list[str] = []

Storage = torch.UntypedStorage | torch.TypedStorage

_C.provide("typed_storage", torch.TypedStorage)


replaces = functools.partial(while_fakes_live.replaces, concerns=Concerns.FAKES)

WITHOUT_FAKE_KEY = "is called with the Fake key excluded while tensors are made of Python data"


def _reads_python_data() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded("Fake")


# The methods that read an element: `store_scalar()`, python_scalars.h.
@replaces(Tensor, "item", "__float__", "__int__", "__index__", "__bool__", "__complex__", reason=WITHOUT_FAKE_KEY)
def _read(original: Function, self: Tensor) -> Any:
    if not _reads_python_data():
        return original(self)
    with with_our_keys():
        return original(self)


@replaces(Tensor, "__iter__", reason=WITHOUT_FAKE_KEY)
def _iter(original: Function, self: Tensor) -> Any:
    """Compute the rows of a deferred tensor together."""
    if _reads_python_data() and _C.is_deferred(self):
        return original(_C.evaluate(self))
    return original(self)


# The factories that accept a storage.
@replaces(
    torch, "tensor", "as_tensor", "asarray", reason="makes a tensor on a storage without calling an operator on a fake"
)
def _make_on_storage(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Make the result of `original` share the memory of a storage of fakes."""
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


def _small_storage(storage: Storage) -> Storage:
    """Return a real storage of at least one element of any dtype."""
    small = torch.UntypedStorage(16)
    if isinstance(storage, torch.UntypedStorage):
        return small
    return torch.TypedStorage(wrap_storage=small, dtype=storage.dtype, _internal=True)


def _untyped(storage: Storage) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
