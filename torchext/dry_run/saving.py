"""Checkpoints in a dry run: what holds fakes is not written, and a file that is there already stays as it is.

`torch.save()` opens the file before it asks the first tensor for its memory. So it is looked through first. As values
that are read, each place is counted and reported.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from ..tools.imports import once_imported
from ..tools.wrappers import storages_of
from .values import note_reading, while_values_are_assumed

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
        return note_reading("torch.save", NOT_WRITTEN, sys._getframe(1))

    return save


def _skipping_files_of_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_file(tensors: Mapping[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_fakes(dict(tensors)):
            return original(tensors, filename, *args, **kwargs)
        return note_reading("safetensors.save_file", NOT_WRITTEN, sys._getframe(1))

    return save_file


def _install() -> None:
    while_values_are_assumed.patch(torch, "save", _skipping_fakes, "truncates the file, and then wants memory")


_taught: set[int] = set()


def _teach_safetensors() -> None:
    module = sys.modules.get(SAFETENSORS)
    if module is not None and id(module) not in _taught:
        _taught.add(id(module))
        while_values_are_assumed.patch(module, "save_file", _skipping_files_of_fakes, "wants the memory of tensors")


while_values_are_assumed.declare(_install)
