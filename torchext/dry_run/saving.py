"""Checkpoints in a dry run: objects that hold fakes have no values to write.

`torch.save()` truncates the file before it reads the memory of the first tensor. So objects are searched for fakes
first. On the command line, which keeps files apart, a description is written that can be read again
(`placeholders.py`). In `world()` nothing is written, existing files are unchanged, and each place is counted and
reported like a read of a value.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .. import _C
from ..fake.addresses import storage_description, storage_from, typed
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.held_tensors import parts_of
from ..internals.patching import Function
from . import safetensors_files
from .files import PLACEHOLDER
from .placeholders import is_placeholder, load_placeholder, save_placeholder

__all__: list[str] = []

replaces = while_values_are_assumed.replaces

NOT_WRITTEN = "not written"


def holds_fakes(value: object) -> bool:
    """Return true if pickling `value` would reach a fake tensor."""
    search = _Search()
    try:
        search.dump(value)
    except Exception:  # `value` cannot be pickled, so saving it will fail
        return False
    return search.has_found


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Search(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self.has_found = False

    def persistent_id(self, value: object) -> str | None:
        """Continue with objects that are not tensors. The data of real tensors need not be copied."""
        if not isinstance(value, torch.Tensor):
            return None
        shards = getattr(value, "_local_shards", None)  # of a `ShardedTensor`
        members = parts_of(value) if shards is None else (shard.tensor for shard in shards)
        self.has_found |= any(map(_C.is_fake, members))
        return "tensor"


def files_apart() -> Any:
    """Return the files of this process (`files.Overlay`) if they are kept apart, or None."""
    files = sys.modules.get("torchext_dry_run_files")
    return None if files is None else files.active()


# ---- PyTorch


@replaces(torch, "save", reason="truncates the file, and then reads memory")
def _save(original: Function, /, obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
    if not holds_fakes(obj):
        return original(obj, f, *args, **kwargs)
    if files_apart() is None:
        return note_reading("torch.save", NOT_WRITTEN, sys._getframe(1))
    return save_placeholder(obj, f)


@replaces(torch, "load", reason="cannot read the files that describe fakes")
def _load(original: Function, /, f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
    if not is_placeholder(f):
        return original(f, map_location, pickle_module, **kwargs)
    return load_placeholder(f, map_location, weights_only=_loads_weights_only(pickle_module, **kwargs))


def _loads_weights_only(pickle_module: Any, *, weights_only: bool | None = None, **kwargs: Any) -> bool:
    """Decide as `torch.load()` does."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return True
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return bool(weights_only)
    return pickle_module is None if weights_only is None else weights_only


@replaces(torch.UntypedStorage, "__reduce__", reason="writes memory into a pickle")
def _reduce_storage(original: Function, self: torch.UntypedStorage) -> Any:
    return (storage_from, storage_description(self)) if _C.is_storage_of_fakes(self) else original(self)


@replaces(torch.TypedStorage, "__reduce__", reason="writes memory into a pickle")
def _reduce_typed_storage(original: Function, self: torch.TypedStorage) -> Any:
    untyped = self._untyped_storage
    if not _C.is_storage_of_fakes(untyped):
        return original(self)
    return _typed_from, (self.dtype, *storage_description(untyped))  # a copy for each tensor, as of real ones


def _typed_from(dtype: torch.dtype, *description: Any) -> torch.TypedStorage:
    return typed(storage_from(*description), dtype)


# ---- safetensors


@replaces("safetensors.torch", "safe_open", reason="cannot read files without values")
@replaces("safetensors", "safe_open", reason="cannot read files without values")
def _safe_open(original: Function, /, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
    if is_placeholder(filename):
        return safetensors_files.PlaceholderFile(filename, framework, device)
    if safetensors_files.is_moved(framework, device):
        return safetensors_files.MovedFile(original(filename, framework, "cpu", **options), device)
    return original(filename, framework, device, **options)


@replaces("safetensors.torch", "save_file", reason="reads the memory of tensors")
def _save_file(
    original: Function, /, tensors: Mapping[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any
) -> Any:
    if not holds_fakes(dict(tensors)):
        return original(tensors, filename, *args, **kwargs)
    if files_apart() is None:
        return note_reading("safetensors.save_file", NOT_WRITTEN, sys._getframe(1))
    return safetensors_files.save_file(tensors, filename, *args, **kwargs)


@replaces("safetensors.torch", "save", reason="reads the memory of tensors")
def _save_bytes(original: Function, /, tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    describes = holds_fakes(dict(tensors))
    return (safetensors_files.placeholder_bytes if describes else original)(tensors, *args, **kwargs)


@replaces("safetensors.torch", "load", reason="cannot read tensors without values")
def _load_bytes(original: Function, data: bytes) -> Any:
    is_described = data.startswith(PLACEHOLDER)
    return safetensors_files.load_bytes(data) if is_described else original(data)


# ---- Checkpoints of torchext


@replaces("torchext.checkpoint.reading", "read_file", reason="maps values")
def _read_file(original: Function, path: Any) -> Any:
    if not is_placeholder(path):
        return original(path)
    return None, safetensors_files.PlaceholderFile(path).get_tensors().items()


@replaces("torchext.checkpoint.saving", "write_plan", reason="writes files")
def _write_plan(original: Function, plan: Any, progress: bool, resume: bool) -> Any:
    if plan.contents.are_described and files_apart() is None:
        return note_reading("checkpoint.save_safetensors", NOT_WRITTEN, sys._getframe(2))
    return original(plan, progress, resume)


@replaces("torchext.checkpoint.saving", "write_files", reason="computes tensors")
def _write_files(original: Function, plan: Any, complete: set[str], progress: bool) -> None:
    if not plan.contents.are_described:
        original(plan, complete, progress)
        return
    for file in plan.files.files:
        if file.name not in complete:
            described = {name: _described(plan.contents, name) for name, *_ in file.header.places}
            metadata = json.loads(file.header.content[8:]).get("__metadata__")
            safetensors_files.save_file(described, plan.place / file.name, metadata)


def _described(contents: Any, name: str) -> torch.Tensor:
    """Return a tensor with the shape and the dtype that the file would have, and with the values that are known."""
    tensor, dtype = contents.tensors[name], contents.dtype_of(name)
    is_same = tensor.dtype == dtype and not _C.is_deferred(tensor)
    return tensor if is_same else torch.empty(tensor.shape, dtype=dtype, device="meta")
