"""Addresses of fake tensors, which have no memory, and descriptions of their storages.

In a dry run fakes have the addresses that the simulated allocator has assigned, because programs sort addresses,
compare them and check their alignment. C code that reads from such an address crashes the process. Outside of dry runs
fakes therefore raise, except in functions that are known to only compare addresses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from .. import _C
from ..internals.dispatch_keys import making_fakes, without_our_keys
from ..internals.leases import while_fakes_live

__all__ = [
    "MOST_BYTES",
    "Description",
    "Known",
    "address_of",
    "are_addresses_shown",
    "is_of_fakes",
    "showing_addresses",
    "storage_description",
    "storage_from",
    "typed",
]

# Functions that only compare the addresses of storages and tensors, and never dereference them.
COMPARING: dict[str, frozenset[str]] = {
    # `make_graphed_callables()` compares the input of a graph with the tensor that it has captured.
    "torch.cuda.graphs": frozenset({"backward", "forward"}),
    # `allow_mutation_on_saved_tensors()` checks whether an in-place operator writes a saved tensor.
    "torch.autograd.graph": frozenset({"_get_sid", "_get_tid"}),
    # FSDP checks whether the local tensor still is the shard: after loading a state dict and before the first forward.
    "torch.distributed.fsdp._fully_shard._fsdp_param": frozenset({"reset_sharded_param"}),
    # FSDP1 checks the same, and whether the flat parameter has been freed (which resizes its storage).
    "torch.distributed.fsdp._flat_param": frozenset({"_same_storage"}),
    "torch.distributed.fsdp._runtime_utils": frozenset({"_catch_all_reshard"}),
    "torch.distributed.utils": frozenset({"_data_ptr_allocated"}),
    # Tensors that are read from a file share memory if their storage has any.
    "torch.serialization": frozenset({"load_tensor", "persistent_load"}),
    # These find the tensors of a state dict that share memory.
    "safetensors.torch": frozenset({"_end_ptr", "_filter_shared_not_shared", "_is_complete", "storage_ptr"}),
    "huggingface_hub.serialization._torch": frozenset({"_end_ptr", "_filter_shared_not_shared", "storage_ptr"}),
    "transformers.modeling_utils": frozenset({"_end_ptr", "_find_disjoint", "_find_identical"}),
    "transformers.pytorch_utils": frozenset({"id_tensor_storage"}),
    "accelerate.utils.modeling": frozenset({"id_tensor_storage", "set_module_tensor_to_device"}),
    # Accelerate matches the parameters of the optimizer with those of the model before and after sharding.
    "accelerate.accelerator": frozenset({"_get_named_parameters", "_get_tensor_address", "_prepare_fsdp2"}),
    # Accelerate finds the weights that are tied to one on the disk.
    "accelerate.big_modeling": frozenset({"dispatch_model"}),
    "accelerate.hooks": frozenset({"init_hook"}),
}

# `TypedStorage` forwards to the storage that it wraps.
FORWARDING_MODULE = "torch.storage"

# Before Python 3.12, these run in their own frames.
COMPREHENSIONS = ("<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>")


_showing = 0  # number of open blocks of `showing_addresses()`


@contextmanager
def showing_addresses() -> Iterator[None]:
    """Let fakes return their simulated addresses in the block, on all threads."""
    global _showing
    _showing += 1
    try:
        yield
    finally:
        _showing -= 1


def are_addresses_shown() -> bool:
    """Return true in a dry run, where fakes have simulated addresses."""
    return _showing > 0


def address_of(storage: torch.UntypedStorage, offset: int = 0) -> int | None:
    """Return an address in `storage`, or None if the calling function may not have one.

    The replacement of a method calls this. The caller that is checked is the caller of that method.

    Args:
        storage: A storage without memory.
        offset: In bytes.
    """
    if _showing and not _C.is_deferred(_C.bytes_of_storage(storage)):
        address = _C.fake_address(storage)
    elif _is_compared():
        address = storage._cdata if storage.nbytes() else 0  # 0 if it is empty, as for any empty storage
    else:
        return None
    return address + offset if address else 0


def _is_compared() -> bool:
    """Return true if the caller of the replaced method only compares addresses."""
    frame = sys._getframe(3)
    while frame.f_globals.get("__name__") == FORWARDING_MODULE or frame.f_code.co_name in COMPREHENSIONS:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_code.co_name in COMPARING.get(frame.f_globals.get("__name__", ""), ())


# ---- Storages of fakes for other processes and files: their sizes, devices and known values


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
