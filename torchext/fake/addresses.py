"""Addresses that are only compared: what asks for them need not be given memory.

Libraries find tied weights by the addresses of their memory. Fakes have none, but they know which of them share it.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["address_to_compare"]

# Functions that compare the addresses of storages and tensors, and hand them to nobody who would look behind them.
COMPARING: dict[str, frozenset[str]] = {
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


def address_to_compare(storage: torch.UntypedStorage, offset: int = 0) -> int | None:
    """A number that stands for an address in `storage`, if the function that asks will only compare it.

    Called by the replacement of a method, which that function has called.

    Args:
        storage: A storage without memory.
        offset: In bytes.
    """
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == PASSING_ON or frame.f_code.co_name in COMPREHENSIONS:
        if frame.f_back is None:
            break
        frame = frame.f_back
    if frame.f_code.co_name not in COMPARING.get(frame.f_globals.get("__name__", ""), ()):
        return None
    address: int = storage._cdata + offset
    return address if storage.nbytes() else 0  # as of a storage that has nothing, whoever it is
