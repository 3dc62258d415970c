"""The headers of safetensors files.

safetensors writes a header only together with the data, which is not computed yet. So it writes the header of stand-ins
with the same names and dtypes and one element each. This determines the order of the tensors, the names of dtypes, and
the errors; sizes and offsets are filled in.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ..tools.dispatch_keys import without_our_keys
from .libraries import safetensors_torch

__all__ = ["LENGTH_BYTES", "Header", "KnownDtype", "TensorPlace", "known_dtypes", "make_header", "parse_header"]

LENGTH_BYTES = 8
"""The number of bytes that hold the length of the header."""


class TensorPlace(NamedTuple):
    """The location of a tensor in a file, in bytes from its beginning."""

    name: str
    begin: int
    end: int


class Header(NamedTuple):
    """The header of a file, and the locations of the tensors."""

    content: bytes
    places: list[TensorPlace]
    """In the order of the file."""

    @property
    def file_size(self) -> int:
        """The size of the file in bytes."""
        return self.places[-1].end if self.places else len(self.content)


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> Header:
    """Return the header of a file of tensors.

    Args:
        tensors: The dtype and the shape of each tensor, by name.
        metadata: More metadata for the header. It is sorted, because safetensors writes it in any order.

    Raises:
        TypeError: safetensors does not support a dtype.
        ValueError: A name is not valid for a tensor.
    """
    content = _stand_in(tensors, metadata)
    places = []
    at = 0
    for name, entry in content.items():
        if name == "__metadata__":
            continue
        dtype, shape = tensors[name]
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        packed = entry["shape"][-1] if shape else 1  # with two numbers in a byte, the last dimension is twice as long
        entry["shape"] = [*shape[:-1], shape[-1] * packed] if shape else []
        entry["data_offsets"] = [at, at + nbytes]
        places.append((name, at, at + nbytes))
        at += nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    begin = LENGTH_BYTES + len(text)
    return Header(
        len(text).to_bytes(LENGTH_BYTES, "little") + text,
        [TensorPlace(name, begin + start, begin + end) for name, start, end in places],
    )


def parse_header(content: bytes) -> dict[str, Any]:
    """Return the header at the beginning of `content`, which safetensors has validated."""
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    parsed: dict[str, Any] = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
    return parsed


class KnownDtype(NamedTuple):
    """A PyTorch dtype that safetensors supports."""

    dtype: torch.dtype
    packed: int
    """The number of entries in the last dimension of the file for each element."""


@functools.cache
def known_dtypes() -> dict[str, KnownDtype]:
    """Return the dtypes that files can have, by their names in headers."""
    known = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        with suppress(TypeError):
            [entry] = _stand_in({"x": (dtype, (1,))}, None).values()
            known[entry["dtype"]] = KnownDtype(dtype, entry["shape"][0])
    return known


def _stand_in(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> dict[str, Any]:
    _check_names(tensors)
    library = safetensors_torch()
    small = {name: _element(name, dtype).view((1,) * len(shape)) for name, (dtype, shape) in tensors.items()}
    try:
        content = parse_header(library.save(small, metadata=dict(sorted(metadata.items())) if metadata else None))
    except KeyError as error:
        raise TypeError(f"safetensors does not support the dtype {error}.") from error
    if "__metadata__" in content:
        content["__metadata__"] = dict(sorted(content["__metadata__"].items()))
    return content


def _element(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of one element, without calling a kernel for its dtype."""
    try:
        with without_our_keys():
            return torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"safetensors does not support the dtype {dtype} of `{name}`.") from error


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name == "__metadata__":
            raise ValueError("A tensor cannot be called `__metadata__`, which safetensors files reserve.")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"A tensor cannot be called {name!r}, which is not valid UTF-8.") from error
