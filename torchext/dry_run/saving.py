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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from .. import _C
from ..fake.addresses import storage_description, storage_from, typed
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.held_tensors import parts_of
from ..internals.imports import patching
from ..internals.patching import Make
from . import safetensors_files
from .files import PLACEHOLDER
from .placeholders import is_placeholder, load_placeholder, save_placeholder

__all__ = ["not_writing_fakes"]

NOT_WRITTEN = "not written"


@contextmanager
def not_writing_fakes() -> Iterator[None]:
    """Keep fakes out of files in the block. safetensors may be imported before the block or in it."""
    with ExitStack() as imports:
        for name in _PATCHES:
            imports.enter_context(patching(name, (), _patch_safetensors))
        yield


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


def _skipping_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_fakes(obj):
            return original(obj, f, *args, **kwargs)
        if files_apart() is None:
            return note_reading("torch.save", NOT_WRITTEN, sys._getframe(1))
        return save_placeholder(obj, f)

    return save


def _loading_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, pickle_module: Any = None, **kwargs: Any) -> Any:
        if not is_placeholder(f):
            return original(f, map_location, pickle_module, **kwargs)
        return load_placeholder(f, map_location, weights_only=_loads_weights_only(pickle_module, **kwargs))

    return load


def _loads_weights_only(pickle_module: Any, *, weights_only: bool | None = None, **kwargs: Any) -> bool:
    """Decide as `torch.load()` does."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return True
    if os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        return bool(weights_only)
    return pickle_module is None if weights_only is None else weights_only


def _skipping_files_of_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_file(tensors: Mapping[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_fakes(dict(tensors)):
            return original(tensors, filename, *args, **kwargs)
        if files_apart() is None:
            return note_reading("safetensors.save_file", NOT_WRITTEN, sys._getframe(1))
        return safetensors_files.save_file(tensors, filename, *args, **kwargs)

    return save_file


def _skipping_checkpoints_of_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_plan(plan: Any, progress: bool, resume: bool) -> Any:
        if plan.contents.are_described and files_apart() is None:
            return note_reading("checkpoint.save_safetensors", NOT_WRITTEN, sys._getframe(2))
        return original(plan, progress, resume)

    return write_plan


def _describing_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_files(plan: Any, complete: set[str], progress: bool) -> None:
        if not plan.contents.are_described:
            original(plan, complete, progress)
            return
        for file in plan.files.files:
            if file.name not in complete:
                described = {name: _described(plan.contents, name) for name, *_ in file.header.places}
                metadata = json.loads(file.header.content[8:]).get("__metadata__")
                safetensors_files.save_file(described, plan.place / file.name, metadata)

    return write_files


def _described(contents: Any, name: str) -> torch.Tensor:
    """Return a tensor with the shape and the dtype that the file would have, and with the values that are known."""
    tensor, dtype = contents.tensors[name], contents.dtype_of(name)
    is_same = tensor.dtype == dtype and not _C.is_deferred(tensor)
    return tensor if is_same else torch.empty(tensor.shape, dtype=dtype, device="meta")


def _reading_described_checkpoints(original: Callable[..., Any]) -> Callable[..., Any]:
    def read_file(path: Any) -> Any:
        if not is_placeholder(path):
            return original(path)
        return None, safetensors_files.PlaceholderFile(path).get_tensors().items()

    return read_file


def _describing_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        describes = holds_fakes(dict(tensors))
        return (safetensors_files.placeholder_bytes if describes else original)(tensors, *args, **kwargs)

    return save


def _reading_described_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(data: bytes) -> Any:
        is_described = data.startswith(PLACEHOLDER)
        return safetensors_files.load_bytes(data) if is_described else original(data)

    return load


def _opening_files_of_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        if is_placeholder(filename):
            return safetensors_files.PlaceholderFile(filename, framework, device)
        if safetensors_files.is_moved(framework, device):
            return safetensors_files.MovedFile(original(filename, framework, "cpu", **options), device)
        return original(filename, framework, device, **options)

    return safe_open


def files_apart() -> Any:
    """Return the files of this process (`files.Overlay`) if they are kept apart, or None."""
    files = sys.modules.get("torchext_dry_run_files")
    return None if files is None else files.active()


def _describing_storages(original: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce__(self: torch.UntypedStorage) -> Any:
        return (storage_from, storage_description(self)) if _C.is_storage_of_fakes(self) else original(self)

    return __reduce__


def _describing_typed_storages(original: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce__(self: torch.TypedStorage) -> Any:
        untyped = self._untyped_storage
        if not _C.is_storage_of_fakes(untyped):
            return original(self)
        return _typed_from, (self.dtype, *storage_description(untyped))  # a copy for each tensor, as of real ones

    return __reduce__


def _typed_from(dtype: torch.dtype, *description: Any) -> torch.TypedStorage:
    return typed(storage_from(*description), dtype)


def _install() -> None:
    reason = "writes memory into a pickle"
    while_values_are_assumed.patch(torch.UntypedStorage, "__reduce__", _describing_storages, reason)
    while_values_are_assumed.patch(torch.TypedStorage, "__reduce__", _describing_typed_storages, reason)
    while_values_are_assumed.patch(torch, "save", _skipping_fakes, "truncates the file, and then reads memory")
    while_values_are_assumed.patch(torch, "load", _loading_fakes, "cannot read the files that describe fakes")


_OPEN = ("safe_open", _opening_files_of_fakes, "cannot read files without values")
_PATCHES: dict[str, tuple[tuple[str, Make, str], ...]] = {
    "safetensors": (_OPEN,),
    "safetensors.torch": (
        _OPEN,
        ("save_file", _skipping_files_of_fakes, "reads the memory of tensors"),
        ("save", _describing_fakes, "reads the memory of tensors"),
        ("load", _reading_described_fakes, "cannot read tensors without values"),
    ),
    "torchext.checkpoint.reading": (("read_file", _reading_described_checkpoints, "maps values"),),
    "torchext.checkpoint.saving": (
        ("write_plan", _skipping_checkpoints_of_fakes, "writes files"),
        ("write_files", _describing_checkpoints, "computes tensors"),
    ),
}


def _patch_safetensors(module: ModuleType) -> None:
    for function, make, reason in _PATCHES[module.__name__]:
        while_values_are_assumed.patch(module, function, make, reason)


while_values_are_assumed.declare(_install)
