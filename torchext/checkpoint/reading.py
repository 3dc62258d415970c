"""Files of tensors, mapped into memory."""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..tools.dispatch_keys import without_our_keys
from .contents import SUFFIX
from .header import LENGTH_BYTES, known_dtypes, parse_header
from .libraries import safetensors_torch

__all__ = ["Mapped", "StateDict", "read_state"]

# What else is private to the process, but takes memory only where it is written. Python names it since 3.11.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Mapped:
    """A file in memory. What is written there is not written to the file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            self._bytes = mmap.mmap(
                file.fileno(),
                self._size,
                flags=mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )

    def tensor(self, dtype: torch.dtype, shape: list[int], begin: int, end: int) -> torch.Tensor:
        """Returns a tensor on the bytes from `begin` to `end`, which it keeps mapped."""
        with without_our_keys():
            if begin == end:
                return torch.empty(shape, dtype=dtype, device="cpu")
            raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=end - begin, offset=begin)
            if begin % dtype.itemsize:  # safetensors does not write such files
                raw = raw.clone()
            return raw.view(dtype).view(shape)

    def forget(self, tensor: torch.Tensor) -> None:
        """Lets go of the memory of what has been read of `tensor`, which was not written. It can be read again."""
        start = torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()
        begin = tensor.data_ptr() - start
        if 0 <= begin < self._size:
            page = mmap.PAGESIZE
            first, last = -(-begin // page) * page, (begin + tensor.nbytes) // page * page
            if first < last:
                self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)


class StateDict(NamedTuple):
    """Tensors by name, and the files that they are in."""

    tensors: dict[str, Any]
    files: list[Mapped]
    versions: Any = None
    """What `state_dict()` has noted of the versions of modules, if it was there."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Lets go of the memory of what has been read of `tensor`."""
        for file in self.files:
            file.forget(tensor)


def read_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> StateDict:
    """Returns what there is to be loaded.

    Args:
        source: A file of safetensors, an index of several, a folder with one or the other, a file of `torch.save()`, or
            a state dict.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.
        ValueError: A file is not what it should be. The message names it and, if it is about one, the tensor.
        ImportError: safetensors is needed and not installed.
    """
    if isinstance(source, Mapping):
        return StateDict(dict(source), [], getattr(source, "_metadata", None))
    path = _file_of(Path(source))
    if path.suffix == ".json":
        return _read_index(path)
    if path.suffix == SUFFIX:
        return _read_files([path])
    return _read_pickle(path)


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [name for name in (f"model{SUFFIX}", f"model{SUFFIX}.index.json") if (path / name).exists()]
    if len(found) > 1:
        raise ValueError(f"There are two checkpoints in {path}: `{found[0]}` and `{found[1]}`. Name one of them.")
    if found:
        return path / found[0]
    raise FileNotFoundError(f"There is neither `model{SUFFIX}` nor `model{SUFFIX}.index.json` in {path}.")


def _read_files(paths: list[Path]) -> StateDict:
    state = StateDict({}, [])
    for path in paths:
        mapped, tensors = _read_file(path)
        state.files.append(mapped)
        for name, tensor in tensors:
            if name in state.tensors:
                raise ValueError(f"{path} has a tensor `{name}`, which is in another file of the checkpoint, too.")
            state.tensors[name] = tensor
    return state


def _read_file(path: Path) -> tuple[Mapped, Iterator[tuple[str, torch.Tensor]]]:
    """Has safetensors check the file: lengths, names, dtypes, and that no tensors overlap or leave gaps."""
    library = safetensors_torch()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with library.safe_open(path, framework="pt"):
            pass
    except Exception as error:
        raise ValueError(f"{path} is not a file of safetensors, or is damaged: {error}") from error
    mapped = Mapped(path)
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        content = length + file.read(int.from_bytes(length, "little"))
    return mapped, _tensors_of(path, mapped, content)


def _tensors_of(path: Path, mapped: Mapped, content: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in parse_header(content).items():
        if name == "__metadata__":
            continue
        known = known_dtypes().get(entry["dtype"])
        if known is None:
            raise ValueError(f"`{name}` in {path} has the dtype {entry['dtype']}, which PyTorch does not know.")
        begin, end = (len(content) + offset for offset in entry["data_offsets"])
        shape = entry["shape"]
        if known.packed > 1:
            shape = [*shape[:-1], shape[-1] // known.packed]
        yield name, mapped.tensor(known.dtype, shape, begin, end)


def _read_index(path: Path) -> StateDict:
    try:
        places = json.loads(path.read_text())["weight_map"]
        names = {str(name): Path(str(file)) for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not the index of a checkpoint: it has no `weight_map` of names to files."
        ) from error
    for name, file in names.items():
        if file.name != str(file) or file.suffix != SUFFIX:
            raise ValueError(f"{path} says that `{name}` is in {str(file)!r}, which is not a file of its folder.")
    state = _read_files([path.with_name(file) for file in sorted({str(file) for file in names.values()})])
    for name, file in names.items():
        if name not in state.tensors:
            raise ValueError(f"{path} says that `{name}` is in {file}, but it is not.")
    return state


def _read_pickle(path: Path) -> StateDict:
    """Those of `torch.save()` are mapped by `torch.load()`."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with without_our_keys():
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a file of torch.save() that holds tensors, or is damaged: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} was expected to hold a state dict, but it holds a {type(content).__name__}.")
    return StateDict(dict(content), [], getattr(content, "_metadata", None))
