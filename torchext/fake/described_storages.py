"""Storages of fakes for other processes and files: their sizes, devices and known values."""

from __future__ import annotations

from typing import TypeAlias

import torch

from .. import _C
from ..tools.dispatch_keys import making_fakes, without_our_keys
from ..tools.leases import while_fakes_live

__all__ = ["MOST_BYTES", "is_of_fakes", "storage_description", "storage_from", "typed"]

Description: TypeAlias = tuple[int, str, bytes | None]

MOST_BYTES = 1 << 19  # of known values


def is_of_fakes(storage: object) -> bool:
    """Return true if `storage` is a storage of fakes without memory."""
    return isinstance(storage, torch.UntypedStorage) and _C.is_storage_of_fakes(storage)


def storage_description(storage: torch.UntypedStorage) -> Description:
    """Return the arguments with which `storage_from()` makes a storage like this one of fakes."""
    known = _C.known_value(_C.bytes_of_storage(storage)) if storage.nbytes() <= MOST_BYTES else None
    return storage.nbytes(), str(storage.device), None if known is None else bytes(known.tolist())


def storage_from(nbytes: int, device: str, known: bytes | None) -> torch.UntypedStorage:
    """Return a storage of fakes with this size, values and device, which must exist."""
    with while_fakes_live.hold(), making_fakes():  # this may be the first fake of a process that receives it
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if known:
            with without_our_keys():
                values = torch.frombuffer(bytearray(known), dtype=torch.uint8)
            made.copy_(values)
    return made.untyped_storage()


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with the elements of this one, without a warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
