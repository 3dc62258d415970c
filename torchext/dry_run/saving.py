"""Checkpoints in a dry run: objects that hold fakes have no values to write.

`torch.save()` truncates the file before it reads the memory of the first tensor. So objects are searched for fakes
first. On the command line, which keeps files apart, a description is written that can be read again
(`placeholders.py`). In `world()` nothing is written, existing files are unchanged, and each place is counted and
reported like a read of a value.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from .. import _C
from ..fake.assumed_values import note_reading, while_values_are_assumed
from ..tools.held_tensors import parts_of
from ..tools.imports import patching
from ..tools.patching import Make
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
        self.has_found |= any(_C.is_fake(member) for member in parts_of(value))
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


def _install() -> None:
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
}


def _patch_safetensors(module: ModuleType) -> None:
    for function, make, reason in _PATCHES[module.__name__]:
        while_values_are_assumed.patch(module, function, make, reason)


while_values_are_assumed.declare(_install)
