"""Tensor files, mapped into memory."""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..internals.dispatch_keys import without_our_keys
from .contents import LENGTH_BYTES, SUFFIX, known_dtypes, parse_header
from .libraries import safetensors_torch

__all__ = ["Mapped", "StateDict", "read_file", "read_state"]

# Private mappings then take memory only where they are written. Python has the name since 3.11.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Mapped:
    """A file in memory. Writes to the memory do not change the file."""

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
        """Return a tensor on the bytes from `begin` to `end`, which it keeps mapped."""
        with without_our_keys():
            if begin == end:
                return torch.empty(shape, dtype=dtype, device="cpu")
            raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=end - begin, offset=begin)
            if begin % dtype.itemsize:  # safetensors does not write such files
                raw = raw.clone()
            return raw.view(dtype).view(shape)

    def forget(self, tensor: torch.Tensor) -> None:
        """Release the memory pages of `tensor`, which was not written. They can be read again."""
        start = torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()
        begin = tensor.data_ptr() - start
        if 0 <= begin < self._size:
            page = mmap.PAGESIZE
            first, last = -(-begin // page) * page, (begin + tensor.nbytes) // page * page
            if first < last:
                self._bytes.madvise(mmap.MADV_DONTNEED, first, last - first)


class StateDict(NamedTuple):
    """Tensors by name, and their files."""

    tensors: dict[str, Any]
    files: list[Mapped]
    versions: Any = None
    """The versions of modules that `state_dict()` recorded, if any."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Release the memory pages of `tensor`."""
        for file in self.files:
            file.forget(tensor)


def read_state(source: str | os.PathLike[str] | Mapping[str, Any]) -> StateDict:
    """Return the tensors of a checkpoint.

    Args:
        source: A safetensors file, an index of several, a folder with one or the other, a file of `torch.save()`, or a
            state dict.

    Raises:
        FileNotFoundError: The file does not exist, or the folder has no checkpoint.
        CheckpointError: A file is damaged, or has another format. The message names the file and the tensor.
        ImportError: safetensors is required, but not installed.
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
        raise CheckpointError(f"There are two checkpoints in {path}: `{found[0]}` and `{found[1]}`. Name one of them.")
    if found:
        return path / found[0]
    raise FileNotFoundError(f"There is neither `model{SUFFIX}` nor `model{SUFFIX}.index.json` in {path}.")


def _read_files(paths: list[Path]) -> StateDict:
    state = StateDict({}, [])
    for path in paths:
        mapped, tensors = read_file(path)
        if mapped is not None:
            state.files.append(mapped)
        for name, tensor in tensors:
            if name in state.tensors:
                raise CheckpointError(f"{path} has a tensor `{name}`, which is also in another file of the checkpoint.")
            state.tensors[name] = tensor
    return state


def read_file(path: Path) -> tuple[Mapped | None, Iterable[tuple[str, torch.Tensor]]]:
    """Map a file. safetensors validates it: lengths, names, dtypes, and that tensors neither overlap nor leave gaps.

    Dry runs replace this function for files without values.
    """
    library = safetensors_torch()
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with library.safe_open(path, framework="pt"):
            pass
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}") from error
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
            raise CheckpointError(f"`{name}` in {path} has the dtype {entry['dtype']}, which PyTorch does not have.")
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
        raise CheckpointError(
            f"{path} is not the index of a checkpoint: it has no `weight_map` of names to files."
        ) from error
    for name, file in names.items():
        if file.name != str(file) or file.suffix != SUFFIX:
            raise CheckpointError(f"{path} maps `{name}` to {str(file)!r}, which is not a file in its folder.")
    state = _read_files([path.with_name(file) for file in sorted({str(file) for file in names.values()})])
    for name, file in names.items():
        if name not in state.tensors:
            raise CheckpointError(f"{path} maps `{name}` to {file}, which does not contain it.")
    return state


def _read_pickle(path: Path) -> StateDict:
    """Map a file of `torch.save()`, by `torch.load()`."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with without_our_keys():
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a file of torch.save() that holds tensors, or is damaged: {error}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} was expected to hold a state dict, but it holds a {type(content).__name__}.")
    return StateDict(dict(content), [], getattr(content, "_metadata", None))
