"""Checkpoints in a dry run: what holds fakes has no values to write.

`torch.save()` opens the file before it asks the first tensor for its memory. So it is looked through first. On the
command line, whose files are kept apart, what is written can be read again (`placeholders.py`). In a program nothing is
written, and a file that is there already stays as it is; as values that are read, each place is counted and reported.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from ..fake.assumed_values import note_reading, while_values_are_assumed
from ..tools.imports import once_imported
from ..tools.wrappers import storages_of
from .placeholders import is_placeholder, load_placeholder, save_placeholder, save_safetensors_placeholder

__all__ = ["not_writing_fakes"]

SAFETENSORS = "safetensors.torch"
NOT_WRITTEN = "not written"


@contextmanager
def not_writing_fakes() -> Iterator[None]:
    """Teaches safetensors as well, which may be imported before the block or in it."""
    _teach_safetensors()
    with once_imported(SAFETENSORS, _teach_safetensors):
        yield


def holds_fakes(value: object) -> bool:
    """Returns true if pickling `value` would come to a fake tensor."""
    search = _Search()
    try:
        search.dump(value)
    except Exception:  # what cannot be pickled: saving it will say so
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
        """Goes on with what is no tensor. The data of real tensors need not be copied."""
        if not isinstance(value, torch.Tensor):
            return None
        self.has_found |= any(_C.is_fake(member) for member in storages_of(value))
        return "tensor"


def _skipping_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_fakes(obj):
            return original(obj, f, *args, **kwargs)
        if files_apart() is None:
            return note_reading("torch.save", NOT_WRITTEN, sys._getframe(1))
        save_placeholder(obj, f)
        _note(f)
        return None

    return save


def _loading_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load_placeholder(f, map_location) if is_placeholder(f) else original(f, map_location, *args, **kwargs)

    return load


def _skipping_files_of_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_file(tensors: Mapping[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_fakes(dict(tensors)):
            return original(tensors, filename, *args, **kwargs)
        if files_apart() is None:
            return note_reading("safetensors.save_file", NOT_WRITTEN, sys._getframe(1))
        save_safetensors_placeholder(tensors, filename, *args, **kwargs)
        _note(filename)
        return None

    return save_file


def _note(file: Any) -> None:
    path = getattr(file, "name", file)
    if isinstance(path, (str, os.PathLike)):
        files = files_apart()
        files.note_without_values(files.resolve(os.fspath(path)))


def files_apart() -> Any:
    """Returns the files of this process (`files.Tree`) if they are kept apart, or None."""
    files = sys.modules.get("torchext_dry_run_files")
    return None if files is None else files.active()


def _install() -> None:
    while_values_are_assumed.patch(torch, "save", _skipping_fakes, "truncates the file, and then wants memory")
    while_values_are_assumed.patch(
        torch, "load", _loading_fakes, "does not know what `torch.save()` has written of fakes"
    )


_taught: set[int] = set()


def _teach_safetensors() -> None:
    module = sys.modules.get(SAFETENSORS)
    if module is not None and id(module) not in _taught:
        _taught.add(id(module))
        while_values_are_assumed.patch(module, "save_file", _skipping_files_of_fakes, "wants the memory of tensors")


while_values_are_assumed.declare(_install)
