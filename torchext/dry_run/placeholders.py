"""Descriptions of tensors without values, which a program writes and reads again, and data loaders of real data.

`torch.save()` writes a pickle that describes the fakes. `torch.load()` makes fakes from it that share storages as
before. The file begins with `PLACEHOLDER`, also after it is renamed or copied, so it does not load outside of dry runs.
It is as long as a file with values, with a hole that occupies no disk space.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.utils.data
from torch.utils.data import dataloader, dataset
from torch.utils.data._utils import worker

from .. import _C
from ..fake import fake_mode
from ..fake.addresses import Description, Known, is_of_fakes, storage_description, storage_from, typed
from ..internals.dispatch_keys import call_on_real_tensors, without_our_keys
from ..internals.patching import Function
from .current import while_world_is_open
from .files import PLACEHOLDER

__all__ = [
    "is_placeholder",
    "known_list",
    "load_placeholder",
    "opened",
    "read_header",
    "save_placeholder",
    "write_placeholder",
]

LENGTH = 8  # bytes of an integer in a file
RECORD = 128  # bytes that `torch.save()` writes for a storage in addition to its values, with their alignment
MOST_VALUES = 1 << 16  # larger tensors are written without values

Place = Callable[[torch.device], torch.device]


class _Pickler(pickle.Pickler):
    """Describes each storage of fakes once, as `torch.save()` writes each storage once."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._descriptions: dict[int, tuple[torch.UntypedStorage, Description]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the values that are not written."""
        return sum(nbytes + RECORD - _length(known) for _, (nbytes, _, known) in self._descriptions.values())

    def persistent_id(self, value: Any) -> Any:
        """Describe a storage of fakes, which has the same key each time. Other objects are pickled."""
        is_typed = isinstance(value, torch.TypedStorage)
        storage = value._untyped_storage if is_typed else value
        if not is_of_fakes(storage):
            return None
        if storage._cdata not in self._descriptions:
            self._descriptions[storage._cdata] = storage, storage_description(storage)
        return storage._cdata, value.dtype if is_typed else None, self._descriptions[storage._cdata][1]


def _length(known: Known | None) -> int:
    return sum(len(part or b"") for part in known or ())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], place: Place) -> None:
        super().__init__(file)
        self._place = place
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, description: Any) -> Any:
        """Return the storage, which is created the first time."""
        key, dtype, (nbytes, device, known) = description
        if key not in self._made:
            self._made[key] = storage_from(nbytes, str(self._place(torch.device(device))), known)
        return typed(self._made[key], dtype or torch.uint8)  # as PyTorch does


def known_list(value: torch.Tensor) -> list[Any] | None:
    """Return the values of a small fake whose values are known, such as a step counter; otherwise None."""
    known = _C.known_value(value) if 0 < value.numel() <= MOST_VALUES else None
    return None if known is None else list(known.flatten().tolist())


class _WeightsUnpickler(_Unpickler):
    """Rejects the classes that `torch.load(weights_only=True)` rejects."""

    def find_class(self, module: str, name: str) -> Any:
        from torch import _weights_only_unpickler as allowed

        full_name = f"{module}.{name}"
        known = {**allowed._get_allowed_globals(), **allowed._get_user_allowed_globals()}
        if full_name not in known:
            raise pickle.UnpicklingError(
                f"torch.load(weights_only=True): GLOBAL {full_name} is not an allowed global. Allow it by "
                f"`torch.serialization.add_safe_globals([{name}])`, or load with weights_only=False"
            )
        return super().find_class(module, name)


@contextmanager
def opened(file: Any, mode: str) -> Iterator[IO[bytes]]:
    """Yield `file`, or the opened file if it is a path."""
    if isinstance(file, (str, Path)) or hasattr(file, "__fspath__"):
        with Path(file).open(mode) as new:
            yield new
    else:
        yield file


def save_placeholder(value: object, file: Any) -> None:
    """Write `value`, whose fakes are described, to a path or a file."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)  # first: a file is not truncated for values that cannot be pickled
    with opened(file, "wb") as new:
        write_placeholder(new, content.getvalue(), pickler.nbytes)


def write_placeholder(file: IO[bytes], header: bytes, nbytes: int) -> None:
    """Write a header, and a hole of `nbytes` in place of values if the file can have one."""
    target = _file_behind(file)
    lengths = [len(header), max(nbytes, 0) if _can_have_holes(target) else 0]
    file.write(PLACEHOLDER + b"".join(length.to_bytes(LENGTH, "little") for length in lengths) + header)
    if lengths[1]:
        target.seek(lengths[1] - 1, os.SEEK_CUR)
        target.write(b"\0")


def _file_behind(file: IO[bytes]) -> IO[bytes]:
    """Return the file to which the writers of `torch.distributed.checkpoint` pass on, or the file itself."""
    is_writer = isinstance(file, io.IOBase) and not file.seekable()
    found: IO[bytes] = getattr(file, "raw", file) if is_writer else file
    return found


def read_header(file: IO[bytes]) -> bytes:
    """Return the header of a placeholder, and move the file to its end."""
    file.read(len(PLACEHOLDER))
    size, nbytes = (int.from_bytes(file.read(LENGTH), "little") for _ in range(2))
    header = file.read(size)
    if nbytes:
        file.seek(nbytes, os.SEEK_CUR)
    return header


def _can_have_holes(file: IO[bytes]) -> bool:
    with suppress(AttributeError, OSError):
        return file.seekable() and os.fstat(file.fileno()).st_nlink > 0
    return False


def is_placeholder(file: Any) -> bool:
    """Return true if a path or a file begins with a description of tensors."""
    try:
        with opened(file, "rb") as content:
            position = content.tell()
            found = content.read(len(PLACEHOLDER))
            content.seek(position)
            return found == PLACEHOLDER
    except (AttributeError, OSError, io.UnsupportedOperation):
        return False


def load_placeholder(file: Any, map_location: Any = None, *, weights_only: bool = False) -> Any:
    """Return the saved object, with fakes on the devices of `torch.load(map_location=...)`."""
    with opened(file, "rb") as content, fake_mode():
        header = io.BytesIO(read_header(content))
        unpickler = _WeightsUnpickler if weights_only else _Unpickler
        settings = torch.serialization._serialization_tls  # read by functions that rebuild wrappers
        before, settings.map_location = settings.map_location, map_location
        unvalidated = len(torch._utils._sparse_tensors_to_validate)
        try:
            return unpickler(header, lambda device: _mapped(device, map_location)).load()
        finally:
            settings.map_location = before
            del torch._utils._sparse_tensors_to_validate[unvalidated:]  # they have no values


def _mapped(device: torch.device, map_location: Any) -> torch.device:
    if map_location is None:
        return device
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get(str(device), device))
    if callable(map_location):
        found = map_location(torch.empty(0, dtype=torch.uint8).untyped_storage(), str(device))
        return device if found is None else torch.device(found.device)
    return torch.device(map_location)


# ---- Data loaders, which read real data in this process
#
# Samplers shuffle real numbers and datasets open real files, so a loader computes with real tensors; a batch becomes
# fake when it is moved to a fake device. A dataset that holds fakes, for example from `torch.randn()` in the program,
# is read unchanged, and only the sampler computes with real tensors. Nothing is pinned, because the devices are fake.


# The depth to which wrapped datasets and containers are searched for tensors.
DEEPEST = 6

ITERATOR: Any = dataloader._BaseDataLoaderIter


@while_world_is_open.replaces(ITERATOR, "__init__", reason="reads a seed, and starts to pin memory")
def _init(original: Function, /, self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    with without_our_keys():
        original(self, loader, *args, **kwargs)
    self._pin_memory = False


@while_world_is_open.replaces(ITERATOR, "__next__", reason="computes with the values of indices and data")
def _next(original: Function, self: Any) -> Any:
    with _state_for(self._dataset):
        return original(self)


@while_world_is_open.replaces(
    dataloader.DataLoader, "_get_iterator", reason="starts workers, which inherit the fake mode"
)
def _get_iterator(original: Function, self: Any) -> Any:
    """Start workers without fake mode. A dataset of fakes cannot be sent to them, so it is read in this process."""
    if self.num_workers and holds_fakes(self.dataset):
        workers, self.num_workers = self.num_workers, 0
        prefetch, self.prefetch_factor = self.prefetch_factor, None
        try:
            return original(self)
        finally:
            self.num_workers, self.prefetch_factor = workers, prefetch
    with without_our_keys():
        return original(self)


for _owner, _name, _reason in (
    (ITERATOR, "_next_index", "computes with the values of indices"),
    (worker, "_worker_loop", "computes with data in another process"),
    (dataset, "random_split", "reads a permutation"),
):
    while_world_is_open.replaces(_owner, _name, reason=_reason)(call_on_real_tensors)


def _state_for(data: object) -> AbstractContextManager[None]:
    return nullcontext() if holds_fakes(data) else without_our_keys()


def holds_fakes(value: object, depth: int = DEEPEST) -> bool:
    """Return true if a dataset, or one that it wraps, has a fake tensor in its attributes."""
    if isinstance(value, torch.Tensor):
        return _C.is_fake(value)
    if depth == 0:
        return False
    if isinstance(value, list | tuple):
        return any(holds_fakes(item, depth - 1) for item in value[:16])
    if isinstance(value, dict):
        return any(holds_fakes(item, depth - 1) for item in list(value.values())[:16])
    if isinstance(value, torch.utils.data.Dataset):
        return any(holds_fakes(item, depth - 1) for item in vars(value).values())
    return False
