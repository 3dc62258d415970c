"""The contents of a checkpoint: its tensors, their names, and its files."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..errors import CheckpointError
from ..internals.arguments import check_is_dtype
from ..internals.dispatch_keys import without_our_keys
from ..internals.held_tensors import is_wrapper, shows_all, storage_of
from ..internals.text import in_units

__all__ = [
    "LENGTH_BYTES",
    "Contents",
    "Folder",
    "Header",
    "IncompleteFile",
    "KnownDtype",
    "PlannedFile",
    "TensorPlace",
    "check_dtype",
    "converted_dtype",
    "known_dtypes",
    "lacks_values",
    "make_header",
    "parse_header",
    "plan_files",
    "safetensors_torch",
    "state_of",
]

# ---- The optional libraries for checkpoint files


def safetensors_torch() -> Any:
    """Return `safetensors.torch`.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "torchext.checkpoint reads and writes safetensors files. Install it: pip install safetensors"
        ) from error
    return safetensors.torch


def _hub_serialization() -> Any:
    """Return the module of huggingface_hub that divides checkpoints into files.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub.serialization._base as base
    except ImportError as error:
        raise ImportError(
            "huggingface_hub divides checkpoints into several files. Install it: pip install huggingface_hub"
        ) from error
    return base


# ---- The dtype of a tensor in a checkpoint


def lacks_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor cannot be saved or loaded: it is on the device `meta`, or fake outside of a dry run."""
    is_only_fake = _C.is_fake(tensor) and not _C.is_deferred(tensor) and not _C.materializes_as_fakes()
    return tensor.is_meta or is_only_fake


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError for a dtype that is neither floating point nor complex."""
    check_is_dtype(dtype)
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"`dtype` was expected to be floating point or complex, but it is {dtype}.")


def converted_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype after `Module.to(dtype)`, which does not change integers."""
    is_converted = tensor.is_floating_point() or tensor.is_complex()
    return dtype if dtype is not None and is_converted else tensor.dtype


# ---- The headers of safetensors files
#
# safetensors writes a header only together with the data, which is not computed yet. So it writes the header of
# stand-ins with the same names and dtypes and one element each. This determines the order of the tensors, the names of
# dtypes, and the errors; sizes and offsets are filled in.


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


# ---- Tensors, names and files


SUFFIX = ".safetensors"


class Contents(NamedTuple):
    """The tensors to write."""

    tensors: dict[str, torch.Tensor]
    """The tensors by name. Shared memory occurs once."""
    dtype: torch.dtype | None
    """The dtype of floating point and complex tensors in the files."""
    removed: dict[str, str]
    """The names that are left out, with the name of the tensor that has the same memory."""
    parameters: int | None
    """The number of parameters, which the index of a transformers checkpoint contains."""

    @property
    def are_described(self) -> bool:
        """Return True for fake and deferred tensors in a dry run, which computes no values."""
        return _C.materializes_as_fakes() and any(map(_C.is_fake, self.tensors.values()))

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the files."""
        return converted_dtype(self.tensors[name], self.dtype)

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of a tensor in the files."""
        return self.tensors[name].numel() * self.dtype_of(name).itemsize


class PlannedFile(NamedTuple):
    """A file to write."""

    name: str
    header: Header


class PlannedFiles(NamedTuple):
    """The files, and the index if there are several."""

    files: list[PlannedFile]
    index_file: tuple[str, bytes] | None
    """Its name and its content."""


def state_of(source: Module | Mapping[str, Any], dtype: torch.dtype | None) -> Contents:
    """Return the contents of a checkpoint of `source`.

    Args:
        source: A module, or a state dict.
        dtype: The dtype of floating point and complex tensors in the files.

    Raises:
        TypeError: `source` is of another type, or holds an object that is not a tensor, or `dtype` is neither floating
            point nor complex.
        ValueError: A tensor has no values, is not strided, or is distributed.
        CheckpointError: Tensors share memory, and none of them shows all of it.
    """
    check_dtype(dtype)
    if isinstance(source, Module):
        if _is_of_transformers(source):
            return _state_of_transformers(source, dtype)
        source = source.state_dict()
    elif not isinstance(source, Mapping):
        raise TypeError(f"A module or a state dict was expected, but `source` is a {type(source).__name__}.")
    tensors = dict(source)
    _check(tensors)
    removed = _duplicates(tensors)
    return Contents({name: tensor for name, tensor in tensors.items() if name not in removed}, dtype, removed, None)


def _check(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"Names of tensors were expected to be strings, but one is {name!r}.")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"`{name}` was expected to be a tensor, but it is a {type(tensor).__name__}.")
        if is_wrapper(tensor):
            raise ValueError(
                f"`{name}` is a {type(tensor).__name__}, which wraps other tensors. Save distributed tensors with "
                "torch.distributed.checkpoint.save()."
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"`{name}` has the layout {tensor.layout}, but safetensors supports strided tensors only.")
        if lacks_values(tensor):
            kind = "is on the device `meta`" if tensor.is_meta else "is fake"
            raise ValueError(f"`{name}` {kind}, so it has no values to save. Construct it in deferred_init().")


# ---- Shared memory


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte, and the end, of a tensor in its storage."""
    begin = tensor.storage_offset()
    last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = last + 1 if tensor.numel() else begin
    return int(begin) * tensor.itemsize, int(end) * tensor.itemsize


def _duplicates(tensors: Mapping[str, torch.Tensor], discarded: Iterable[str] = ()) -> dict[str, str]:
    """Return the names to leave out and the names of tensors with the same memory, chosen as by safetensors.

    Args:
        tensors: The tensors.
        discarded: Names to leave out in preference to others.
    """
    removed = {}
    for names in _sharing(tensors):
        complete = [name for name in names if shows_all(tensors[name])]
        if not complete and _are_one_tensor([tensors[name] for name in names]):
            complete = names
        if not complete:
            raise CheckpointError(
                f"{', '.join(f'`{name}`' for name in names)} share memory, and none of them shows all of it, so it is "
                "ambiguous which to save. Clone them, or save the tensor that they are views of."
            )
        kept = min(set(complete).difference(discarded) or complete)
        removed.update({name: kept for name in names if name != kept})
    return removed


def _are_one_tensor(tensors: list[torch.Tensor]) -> bool:
    views = {(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors}
    return len(views) == 1


def _sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return groups of names whose tensors overlap."""
    by_storage: dict[tuple[int, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() > 0:
            by_storage.setdefault(storage_of(tensor), []).append(name)
    groups = []
    for names in by_storage.values():
        group: list[str] = []
        end = 0
        for begin, last, name in sorted((*_extent(tensors[name]), name) for name in names):
            if group and begin >= end:
                groups.append(group)
                group, end = [], 0
            group.append(name)
            end = max(end, last)
        groups.append(group)
    return [sorted(group) for group in groups if len(group) > 1]


# ---- Models of transformers


def _is_of_transformers(module: Module) -> bool:
    """Return True if `module` has `save_pretrained()`."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _state_of_transformers(module: Any, dtype: torch.dtype | None) -> Contents:
    """Return the contents that `save_pretrained()` would save. It leaves names out, and renames others."""
    tensors = dict(module.state_dict())
    for name in module._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    _check(tensors)
    kept = _names_of_transformers(module, tensors)
    tensors = _as_in_checkpoints(module, {name: tensors[name] for name in kept})
    _check(tensors)
    return Contents(tensors, dtype, {}, module.num_parameters())


def _names_of_transformers(module: Any, tensors: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """Return the names that transformers keeps. It compares addresses, so it gets meta tensors with the same names."""
    import transformers.modeling_utils as modeling

    remove = getattr(modeling, "remove_tied_weights_from_state_dict", None)
    if remove is None:
        tied = [name for name in tensors if name in (module._tied_weights_keys or ())]
        return tensors.keys() - _duplicates(tensors, tied).keys()
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    return dict(remove(stand_ins, module))


def _as_in_checkpoints(module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo conversions of loading, such as joining the weights of experts. The operators are recorded."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not hasattr(loading, "revert_weight_conversion"):
        return tensors
    with torch.no_grad():
        return dict(loading.revert_weight_conversion(module, tensors))


# ---- Files


def plan_files(contents: Contents, path: Path, max_shard_size: int, metadata: Mapping[str, str] | None) -> PlannedFiles:
    """Divide a checkpoint into files.

    Args:
        contents: The contents of the checkpoint.
        path: One file, if it ends in `.safetensors`; otherwise a folder, with the files that huggingface_hub would
        write.
        max_shard_size: The size of a file in a folder, in bytes. A larger tensor gets its own file.
        metadata: More metadata for the files.
    """
    if path.suffix == SUFFIX:
        notes = {**contents.removed, **(metadata or {})}
        return PlannedFiles([_plan_file(path.name, contents, contents.tensors, notes)], None)
    if not contents.tensors:
        return PlannedFiles([_plan_file(f"model{SUFFIX}", contents, (), {"format": "pt", **(metadata or {})})], None)
    split = _hub_serialization().split_state_dict_into_shards_factory(
        {name: _stored(contents, name) for name in contents.tensors},
        get_storage_size=lambda stored: stored[1],
        get_storage_id=lambda stored: stored,
        filename_pattern=f"model{{suffix}}{SUFFIX}",
        max_shard_size=max_shard_size,
    )
    notes = {**contents.removed, **(metadata or {})}
    of_files = {"format": "pt"} if split.is_sharded else {"format": "pt", **notes}
    files = [_plan_file(name, contents, names, of_files) for name, names in split.filename_to_tensors.items()]
    return PlannedFiles(files, _index(contents, split, notes) if split.is_sharded else None)


def _plan_file(name: str, contents: Contents, names: Iterable[str], metadata: Mapping[str, str]) -> PlannedFile:
    tensors = {one: (contents.dtype_of(one), tuple(contents.tensors[one].shape)) for one in names}
    return PlannedFile(name, make_header(tensors, metadata))


def _stored(contents: Contents, name: str) -> tuple[int, int]:
    """Return the storage that huggingface_hub would find, and its size. Converted tensors have their own."""
    tensor = contents.tensors[name]
    if contents.dtype_of(name) != tensor.dtype or not (tensor.is_contiguous() or contents.parameters is not None):
        return id(tensor), contents.nbytes_of(name)
    storage, nbytes = storage_of(tensor)
    return (storage, nbytes) if nbytes else (0, 0)


def _index(contents: Contents, split: Any, notes: Mapping[str, str]) -> tuple[str, bytes]:
    index = {"metadata": {**split.metadata, **notes}, "weight_map": split.tensor_to_filename}
    if contents.parameters is None:  # as huggingface_hub writes it
        text = json.dumps(index, indent=2)
    else:  # as transformers does
        index["metadata"]["total_parameters"] = contents.parameters
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return f"model{SUFFIX}.index.json", text.encode()


# ---- A folder in which each file is either complete or absent
#
# A file is written under a hidden name, flushed to the disk, and renamed. A killed process leaves complete files and
# one hidden file, which the next call removes. A hidden record describes the checkpoint, so that another call can
# resume it.


class IncompleteFile:
    """A file under a hidden name."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._hidden = path.with_name(f".{path.name}.incomplete")
        self.descriptor: int = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._reserve(size)
        except BaseException:
            self.discard()
            raise

    def _reserve(self, size: int) -> None:
        """Reserve the space, so that a full disk raises before anything is computed."""
        if size > 0 and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.descriptor, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise OSError(
                        error.errno, f"{os.strerror(error.errno or 0)}: {in_units(size)} for {self.path.name}"
                    ) from error

    def write(self, content: memoryview, at: int) -> None:
        """Write all of `content` at an offset in the file."""
        while content:
            written = os.pwrite(self.descriptor, content, at)
            content = content[written:]
            at += written

    def complete(self) -> None:
        """Flush the file to the disk, and rename it to its final name."""
        os.fsync(self.descriptor)
        self._close()
        self._hidden.rename(self.path)
        _flush_names(self.path.parent)

    def discard(self) -> None:
        """Remove the file if it is incomplete."""
        self._close()
        self._hidden.unlink(missing_ok=True)

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Folder:
    """A folder with a checkpoint that only one process writes at a time.

    Args:
        path: The folder. It is created if it does not exist.
        name: The name of the checkpoint, for the lock and the record.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._lock = path / f".{name}.lock"
        self._record = path / f".{name}.record"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while the block runs.

        Raises:
            NotADirectoryError: A file has the name of the folder.
            OSError: The folder cannot be created or written.
            CheckpointError: Another call is writing into the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock_file():
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    @contextmanager
    def _lock_file(self) -> Iterator[None]:
        """Lock a file. The kernel releases the lock when the process ends or is killed."""
        import fcntl

        while True:
            with self._lock.open("a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.seek(0)
                    owner = lock.read().strip() or "another process"
                    raise CheckpointError(
                        f"{self.path} is being written into by {owner}. Wait until it is done, or choose another "
                        "folder."
                    ) from None
                if self._is_there(lock.fileno()):
                    lock.truncate(0)
                    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
                    lock.flush()
                    yield
                    return

    def _is_there(self, descriptor: int) -> bool:
        """Return False if the last owner has removed the lock file."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._lock.stat())
        return False

    def begin(
        self, files: Mapping[str, int], last: str | None, others: Iterable[str], content: str, resume: bool
    ) -> set[str]:
        """Start writing files, or resume.

        Args:
            files: The files by name, with their sizes.
            last: The file that is written after all of them, if any.
            others: Existing files that would be read as a part of the checkpoint.
            content: A digest of the contents.
            resume: Whether to resume an interrupted call.

        Returns:
            The complete files among `files`.

        Raises:
            FileExistsError: Files exist that cannot be resumed.
            OSError: The disk has too little space.
        """
        present = {name for name in files if (self.path / name).exists()}
        if others := sorted(others):
            raise FileExistsError(
                errno.EEXIST,
                f"Files of another checkpoint exist. Remove them, or choose another place: {', '.join(others)}",
                os.fspath(self.path),
            )
        is_ended = (self.path / last).exists() if last else present == set(files)
        record = self._read_record()
        if present or is_ended:
            names = ", ".join(sorted(present | ({last} if last and is_ended else set())))
            if not resume:
                raise FileExistsError(
                    errno.EEXIST,
                    "The files exist already. Remove them, choose another place, or resume an interrupted call with "
                    f"`resume=True`: {names}",
                    os.fspath(self.path),
                )
            if record is None or record["content"] != content:
                why = "was not interrupted" if record is None else "had other tensors, values or options"
                raise FileExistsError(
                    errno.EEXIST,
                    f"`resume=True` cannot resume, because the call that wrote these files {why}. Remove them, or "
                    f"choose another place: {names}",
                    os.fspath(self.path),
                )
            damaged = sorted(name for name in present if (self.path / name).stat().st_size != files[name])
            if damaged:
                raise FileExistsError(
                    errno.EEXIST,
                    f"`resume=True` cannot resume: these files have changed since. Remove them: {', '.join(damaged)}",
                    os.fspath(self.path),
                )
        self._remove_hidden(record)
        missing = {name: size for name, size in files.items() if name not in present}
        self._check_space(sum(missing.values()))
        self._write_record({"content": content, "files": [*files, *([last] if last else [])]})
        return present

    def end(self) -> None:
        """Remove the record of a complete checkpoint."""
        self._record.unlink(missing_ok=True)

    def forget_unless_begun(self, files: Mapping[str, int]) -> None:
        """Remove the record if no file is complete."""
        if not any((self.path / name).exists() for name in files):
            self.end()

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: {in_units(needed)} needed, {in_units(free)} free",
                os.fspath(self.path),
            )

    def _read_record(self) -> dict[str, object] | None:
        try:
            record = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):  # or the process was killed while writing it
            return None
        return record if isinstance(record, dict) and {"content", "files"} <= record.keys() else None

    def _write_record(self, record: Mapping[str, object]) -> None:
        text = json.dumps(record).encode()
        file = IncompleteFile(self._record, len(text))
        try:
            file.write(memoryview(text), 0)
            file.complete()
        finally:
            file.discard()

    def _remove_hidden(self, record: Mapping[str, object] | None) -> None:
        """Remove the hidden files of a killed process."""
        names = record["files"] if record is not None else []
        for name in [*(names if isinstance(names, list) else []), self._record.name]:
            (self.path / f".{Path(str(name)).name}.incomplete").unlink(missing_ok=True)


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
