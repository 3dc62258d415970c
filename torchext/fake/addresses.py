"""Addresses of fakes, behind which there is no memory.

In a dry run fakes have the addresses that the simulated allocator has given them: programs sort by them, compare them
and check how they are aligned. Code in C that reads from one ends the process, so outside of dry runs fakes refuse,
except functions that are known to compare addresses only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _C

__all__ = ["address_of", "are_addresses_shown", "showing_addresses"]

# Functions that compare the addresses of storages and tensors, and hand them to nobody who would look behind them.
COMPARING: dict[str, frozenset[str]] = {
    # Is the input of a graph the tensor that it has captured? (`make_graphed_callables()`)
    "torch.cuda.graphs": frozenset({"backward", "forward"}),
    # Does an in-place operator write a tensor that was saved (`allow_mutation_on_saved_tensors()`)?
    "torch.autograd.graph": frozenset({"_get_sid", "_get_tid"}),
    # Is the local tensor still the shard? Asked when a state dict has been loaded, and before the first forward pass.
    "torch.distributed.fsdp._fully_shard._fsdp_param": frozenset({"reset_sharded_param"}),
    # The same of FSDP's first version; has the flat parameter been freed (which resizes its storage)?
    "torch.distributed.fsdp._flat_param": frozenset({"_same_storage"}),
    "torch.distributed.fsdp._runtime_utils": frozenset({"_catch_all_reshard"}),
    "torch.distributed.utils": frozenset({"_data_ptr_allocated"}),
    # Has what was read from a file memory? Then later tensors on it share it.
    "torch.serialization": frozenset({"load_tensor", "persistent_load"}),
    # Which tensors of a state dict share memory?
    "safetensors.torch": frozenset({"_end_ptr", "_filter_shared_not_shared", "_is_complete", "storage_ptr"}),
    "huggingface_hub.serialization._torch": frozenset({"_end_ptr", "_filter_shared_not_shared", "storage_ptr"}),
    "transformers.modeling_utils": frozenset({"_end_ptr", "_find_disjoint", "_find_identical"}),
    "transformers.pytorch_utils": frozenset({"id_tensor_storage"}),
    "accelerate.utils.modeling": frozenset({"id_tensor_storage", "set_module_tensor_to_device"}),
    # Which parameters of an optimizer are which of the model, before and after it is sharded?
    "accelerate.accelerator": frozenset({"_get_named_parameters", "_get_tensor_address", "_prepare_fsdp2"}),
    # Which weights are tied to one that is on the disk?
    "accelerate.big_modeling": frozenset({"dispatch_model"}),
    "accelerate.hooks": frozenset({"init_hook"}),
}

# `TypedStorage` asks the storage that it wraps.
PASSING_ON = "torch.storage"

# Which Python before 3.12 runs in frames of their own.
COMPREHENSIONS = ("<dictcomp>", "<genexpr>", "<listcomp>", "<setcomp>")


_showing = 0  # how many blocks of `showing_addresses()` are open


@contextmanager
def showing_addresses() -> Iterator[None]:
    """Lets fakes tell their simulated addresses in the block, on all threads."""
    global _showing
    _showing += 1
    try:
        yield
    finally:
        _showing -= 1


def are_addresses_shown() -> bool:
    """Returns true in a dry run, in which fakes stand for tensors with memory."""
    return _showing > 0


def address_of(storage: torch.UntypedStorage, offset: int = 0) -> int | None:
    """An address in `storage`, if the function that asks may have one.

    Called by the replacement of a method, which that function has called.

    Args:
        storage: A storage without memory.
        offset: In bytes.
    """
    if _showing and not _C.is_deferred(_C.bytes_of_storage(storage)):
        address = _C.fake_address(storage)
    elif _is_compared():
        address = storage._cdata if storage.nbytes() else 0  # as of a storage that has nothing, whoever it is
    else:
        return None
    return address + offset if address else 0


def _is_compared() -> bool:
    """Returns true if the caller of the replaced method only compares addresses."""
    frame = sys._getframe(3)
    while frame.f_globals.get("__name__") == PASSING_ON or frame.f_code.co_name in COMPREHENSIONS:
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_code.co_name in COMPARING.get(frame.f_globals.get("__name__", ""), ())
