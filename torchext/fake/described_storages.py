"""Storages of fakes for other processes and files: their sizes, devices and known values."""

from __future__ import annotations

import re
from typing import TypeAlias

import torch

from .. import _C
from ..tools.dispatch_keys import making_fakes, without_our_keys
from ..tools.leases import while_fakes_live

__all__ = ["MOST_BYTES", "Description", "Known", "is_of_fakes", "storage_description", "storage_from", "typed"]

Known: TypeAlias = tuple[bytes, bytes | None]
"""The bytes of a storage, and, if only some of them are known, truth values: which ones."""

Description: TypeAlias = tuple[int, str, Known | None]

MOST_RANGES = 256  # each is written separately; more of them become unknown
MOST_BYTES = 1 << 20  # larger storages keep no values: csrc/extensions/values/known_bytes.h


def is_of_fakes(storage: object) -> bool:
    """Return true if `storage` is a storage of fakes without memory."""
    return isinstance(storage, torch.UntypedStorage) and _C.is_storage_of_fakes(storage)


def storage_description(storage: torch.UntypedStorage) -> Description:
    """Return the arguments with which `storage_from()` makes a storage like this one of fakes."""
    return storage.nbytes(), str(storage.device), _known(storage) if storage.nbytes() <= MOST_BYTES else None


def _known(storage: torch.UntypedStorage) -> Known | None:
    all_bytes = _C.bytes_of_storage(storage)
    if (known := _C.known_value(all_bytes)) is not None:
        return bytes(known.tolist()), None
    if (parts := _C.known_parts(all_bytes)) is None:
        return None
    values, mask = (bytes(part.tolist()) for part in parts)
    return (values, mask) if len(_ranges(mask)) <= MOST_RANGES else None


def storage_from(nbytes: int, device: str, known: Known | None) -> torch.UntypedStorage:
    """Return a storage of fakes with this size, values and device, which must exist."""
    with while_fakes_live.hold(), making_fakes():  # this may be the first fake of a process that receives it
        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if known is not None and nbytes:
            values, mask = known
            if mask is None:
                made.copy_(_real(values))
            else:
                for begin, end in _ranges(mask):
                    made[begin:end].copy_(_real(values[begin:end]))
    return made.untyped_storage()


def _real(values: bytes) -> torch.Tensor:
    with without_our_keys():
        return torch.frombuffer(bytearray(values), dtype=torch.uint8)


def _ranges(mask: bytes) -> list[tuple[int, int]]:
    """Return the ranges of true bytes."""
    return [match.span() for match in re.finditer(rb"\x01+", mask)]


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with the elements of this one, without a warning."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
