"""Descriptions of tensors without values, which a dry run writes so that the program can read them again.

`torch.save()` writes a pickle that describes the fakes. `torch.load()` makes fakes from it that share storages as
before. The file begins with `PLACEHOLDER`, also after it is renamed or copied, so it does not load outside of dry runs.
It is as long as a file with values, with a hole that occupies no disk space.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import torch

from .. import _C
from ..fake import fake_mode
from ..tools.held_tensors import parts_of
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
_place: ContextVar[Place] = ContextVar("place")


class _Storage:
    """The storage of fakes. Fakes on one storage are pickled with the same object."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.device = device

    def bytes(self) -> torch.Tensor:
        """Return the whole storage as bytes. It is created with the first fake."""
        if not hasattr(self, "_bytes"):
            device = _place.get()(torch.device(self.device))
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self._bytes


def _tensor(
    storage: _Storage,
    dtype: torch.dtype,
    size: Any,
    stride: Any,
    offset: int,
    requires_grad: bool,
    marks: dict[str, bool],
    values: list[Any] | None,
) -> torch.Tensor:
    shown = storage.bytes()
    tensor = torch.empty(0, dtype=dtype, device=shown.device)
    tensor.set_(shown.untyped_storage(), offset, size, stride)
    if values is not None:
        tensor.copy_(torch.tensor(values, dtype=dtype).view(size))
    torch._utils.set_tensor_metadata(tensor, marks)
    return tensor.requires_grad_(requires_grad)


def _wrapper(
    kind: Any, members: dict[str, torch.Tensor], context: Any, size: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    wrapper: torch.Tensor = kind.__tensor_unflatten__(members, context, size, stride)
    return wrapper.requires_grad_(requires_grad) if requires_grad else wrapper


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, _Storage] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the values that are not written."""
        return sum(storage.nbytes + RECORD for storage in self._storages.values())

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not any(map(_C.is_fake, parts_of(value))):
            return NotImplemented
        is_wrapper = hasattr(value, "__tensor_flatten__")
        if isinstance(value, torch.nn.Parameter) and not is_wrapper:
            return torch.nn.Parameter.__reduce_ex__(value, pickle.HIGHEST_PROTOCOL)
        make, arguments = _wrapper_description(value) if is_wrapper else self._description(value)
        # As in `torch.Tensor.__reduce_ex__()`: attributes that a class or a program has set on the tensor.
        state = torch._utils._get_obj_state(value)
        if type(value) is torch.Tensor and not state:
            return make, arguments
        return torch._tensor._rebuild_from_type_v2, (make, type(value), arguments, state)

    def _description(self, value: torch.Tensor) -> tuple[Any, ...]:
        storage = value.untyped_storage()
        stored = self._storages.setdefault(storage._cdata, _Storage(storage.nbytes(), str(value.device)))
        geometry = tuple(value.size()), value.stride(), value.storage_offset()
        marks = torch._utils.get_tensor_metadata(value)
        return _tensor, (stored, value.dtype, *geometry, _is_trained(value), marks, known_list(value))


def _wrapper_description(value: Any) -> tuple[Any, ...]:
    names, context = value.__tensor_flatten__()
    members = {name: getattr(value, name) for name in names}
    return _wrapper, (type(value), members, context, value.size(), value.stride(), _is_trained(value))


def known_list(value: torch.Tensor) -> list[Any] | None:
    """Return the values of a small fake whose values are known, such as a step counter; otherwise None."""
    known = _C.known_value(value) if 0 < value.numel() <= MOST_VALUES else None
    return None if known is None else list(known.flatten().tolist())


def _is_trained(value: torch.Tensor) -> bool:
    return value.requires_grad and value.is_leaf


class _WeightsUnpickler(pickle.Unpickler):
    """Rejects the classes that `torch.load(weights_only=True)` rejects."""

    def find_class(self, module: str, name: str) -> Any:
        from torch import _weights_only_unpickler as allowed

        full_name = f"{module}.{name}"
        known = {**allowed._get_allowed_globals(), **allowed._get_user_allowed_globals()}
        if module != __name__ and full_name not in known:
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
    lengths = [len(header), nbytes if _can_have_holes(file) else 0]
    file.write(PLACEHOLDER + b"".join(length.to_bytes(LENGTH, "little") for length in lengths) + header)
    if lengths[1]:
        file.seek(lengths[1] - 1, os.SEEK_CUR)
        file.write(b"\0")


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
    token = _place.set(lambda device: _mapped(device, map_location))
    try:
        with opened(file, "rb") as content, fake_mode():
            header = io.BytesIO(read_header(content))
            return (_WeightsUnpickler if weights_only else pickle.Unpickler)(header).load()
    finally:
        _place.reset(token)


def _mapped(device: torch.device, map_location: Any) -> torch.device:
    if map_location is None:
        return device
    if isinstance(map_location, Mapping):
        return torch.device(map_location.get(str(device), device))
    if callable(map_location):
        found = map_location(torch.empty(0, dtype=torch.uint8).untyped_storage(), str(device))
        return device if found is None else torch.device(found.device)
    return torch.device(map_location)
