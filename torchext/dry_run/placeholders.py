"""What a dry run writes of tensors without values, so that the program can read it again.

`torch.save()` writes a pickle that describes the fakes, and `torch.load()` makes fakes of it, which share their
storages as before. Of a file of safetensors there is everything but the values, in whose place are holes.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import torch

from .. import _C
from ..fake import fake_mode
from ..tools.wrappers import storages_of

__all__ = ["is_placeholder", "load_placeholder", "save_placeholder", "save_safetensors_placeholder"]

MAGIC = b"torchext: tensors without values, of a dry run\n"

Place = Callable[[torch.device], torch.device]
_place: ContextVar[Place] = ContextVar("place")


class _Storage:
    """The storage of fakes. The fakes on one are pickled with the same object."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.device = device

    def bytes(self) -> torch.Tensor:
        """Returns all of it, which is made when it is first asked for."""
        if not hasattr(self, "_bytes"):
            device = _place.get()(torch.device(self.device))
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self._bytes


def _tensor(
    storage: _Storage,
    kind: type,
    dtype: torch.dtype,
    size: Any,
    stride: Any,
    offset: int,
    requires_grad: bool,
    value: complex | None,
) -> torch.Tensor:
    shown = storage.bytes()
    tensor = torch.empty(0, dtype=dtype, device=shown.device)
    tensor.set_(shown.untyped_storage(), offset, size, stride)
    if value is not None:
        tensor.fill_(value)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _wrapper(kind: Any, members: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> torch.Tensor:
    wrapper: torch.Tensor = kind.__tensor_unflatten__(members, context, size, stride)
    return wrapper


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not any(map(_C.is_fake, storages_of(value))):
            return NotImplemented
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            members = {name: getattr(value, name) for name in names}
            return _wrapper, (type(value), members, context, value.size(), value.stride())
        storage = value.untyped_storage()
        stored = self._storages.setdefault(storage._cdata, _Storage(storage.nbytes(), str(value.device)))
        kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
        geometry = tuple(value.size()), value.stride(), value.storage_offset()
        requires_grad = value.requires_grad and value.is_leaf
        known = _C.known_value(value) if value.numel() == 1 else None
        return _tensor, (stored, kind, value.dtype, *geometry, requires_grad, None if known is None else known.item())


@contextmanager
def _opened(file: Any, mode: str) -> Iterator[IO[bytes]]:
    if isinstance(file, (str, Path)) or hasattr(file, "__fspath__"):
        with Path(file).open(mode) as opened:
            yield opened
    else:
        yield file


def save_placeholder(value: object, file: Any) -> None:
    """Writes `value`, whose fakes are described, to a path or a file."""
    content = io.BytesIO()
    _Pickler(content).dump(value)  # first: a file is not truncated for what cannot be pickled
    with _opened(file, "wb") as opened:
        opened.write(MAGIC)
        opened.write(content.getbuffer())


def is_placeholder(file: Any) -> bool:
    """Returns whether a path or a file has been written by `save_placeholder()`."""
    try:
        with _opened(file, "rb") as opened:
            position = opened.tell()
            found = opened.read(len(MAGIC))
            opened.seek(position)
            return found == MAGIC
    except (AttributeError, OSError, io.UnsupportedOperation):
        return False


def load_placeholder(file: Any, map_location: Any = None) -> Any:
    """Returns what has been saved, with fakes on the devices that `torch.load(map_location=...)` says."""
    token = _place.set(lambda device: _mapped(device, map_location))
    try:
        with _opened(file, "rb") as opened, fake_mode():
            opened.read(len(MAGIC))
            return pickle.Unpickler(opened).load()
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


def save_safetensors_placeholder(tensors: Mapping[str, torch.Tensor], path: Any, metadata: Any = None) -> None:
    """Writes a file of safetensors that takes no room on the disk."""
    from safetensors.torch import _TYPES as TYPES

    names = {dtype: name for name, dtype in TYPES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with Path(path).open("wb") as file:
        file.write(len(content).to_bytes(8, "little"))
        file.write(content)
        file.truncate(8 + len(content) + end)
