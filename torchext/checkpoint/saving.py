"""From a module, deferred or not, to files of safetensors."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..tools.progress import progress_bar
from ..tools.sizes import bytes_of, readable
from .contents import SUFFIX, Contents, PlannedFile, PlannedFiles, plan_files, state_of
from .folder import Folder, IncompleteFile
from .pieces import Budget, Pieces, cut
from .writer import Writer

__all__ = ["Plan", "plan_checkpoint", "save_safetensors"]

LEAST_MEMORY = 4 << 20


class Plan(NamedTuple):
    """What is going to be written."""

    place: Path
    """The folder that the files are in."""
    files: PlannedFiles
    pieces: dict[str, Pieces]
    contents: Contents
    text: str
    """Tells this plan from others: what is in the files, and how it comes about."""
    budget: Budget
    stem: str
    """How the names of the files begin."""

    @property
    def nbytes(self) -> int:
        """The size of all files, without the index."""
        return sum(file.header.file_size for file in self.files.files)

    def others(self) -> list[str]:
        """Files in the place that would be taken for a part of this checkpoint."""
        own = {file.name for file in self.files.files} | (
            {self.files.index_file[0]} if self.files.index_file else set()
        )
        kin = re.compile(rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}(\.index\.json)?")
        return [path.name for path in self.place.iterdir() if kin.fullmatch(path.name) and path.name not in own]


def save_safetensors(
    source: Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    max_memory: int | str = "1GiB",
    dtype: torch.dtype | None = None,
    progress: bool = False,
    metadata: Mapping[str, str] | None = None,
    resume: bool = False,
) -> None:
    """Writes a module or a state dict to files of safetensors, in bounded memory.

    Deferred tensors are computed piece by piece, written to their places, and stay deferred. The files have the bytes
    that they would have if all had been constructed eagerly and saved at once. Real tensors are written as they are.
    What shares memory is written once.

    Args:
        source: A module or a state dict, deferred as a whole, in parts, or not at all.
        path: One file, if it ends in `.safetensors`: what `safetensors.torch.save_file(source.state_dict(), path)`
            would write, or, if tensors share memory, `save_model`. Otherwise a folder, for what `save_pretrained` would
            write of the weights of a model of transformers, and `huggingface_hub.save_torch_model` of others:
            `model.safetensors`, or several files and `model.safetensors.index.json`.
        max_shard_size: How large a file in a folder may be, in bytes, or as "5GB" or "1GiB". A larger tensor has a file
            of its own.
        max_memory: How much more memory the process may have than before, in bytes, or as "5GB" or "1GiB".
        dtype: What to convert floating point and complex tensors to, as `source.to(dtype)` would.
        progress: Show a bar of bytes, and their rate, while it lasts. Needs tqdm.
        metadata: What else to write into the header of a file, or into the index if there is one.
        resume: Go on where a call has stopped that was killed, with the files that it had completed. It must have been
            about the same tensors, recordings and options.

    Raises:
        TypeError: `source` is neither a module nor a state dict, or a tensor has a dtype that safetensors does not
            know.
        ValueError: An argument is out of range, or a tensor has no values or a layout that cannot be saved.
        RuntimeError: Tensors share memory and none of them shows all of it, another call is writing into the folder, or
            a value cannot be computed.
        MemoryError: A tensor cannot be computed in as little memory. Nothing has been written.
        FileExistsError: Files are there that are not to be gone on with. Nothing has been written.
        OSError: There is too little space, or the files cannot be written. Files that are complete are left, for
            `resume=True`; others are removed.
        ImportError: safetensors is not installed, or another library that an argument needs.
    """
    plan = plan_checkpoint(
        source, path, max_shard_size=max_shard_size, max_memory=max_memory, dtype=dtype, metadata=metadata
    )
    folder = Folder(plan.place, plan.stem)
    sizes = {file.name: file.header.file_size for file in plan.files.files}
    index = plan.files.index_file
    with folder.locked():
        complete = folder.begin(sizes, index[0] if index else None, plan.others(), plan.text, resume)
        try:
            _write_files(plan, complete, progress)
            if index is not None:
                _write_index(plan.place / index[0], index[1])
        except BaseException:
            folder.forget_unless_begun(sizes)
            raise
        folder.end()


def plan_checkpoint(
    source: Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    max_memory: int | str = "1GiB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Returns what `save_safetensors` would write, and how. Takes its arguments, and raises what it would raise."""
    budget = Budget(bytes_of(max_memory, "max_memory"))
    if budget.max_memory < LEAST_MEMORY:
        raise ValueError(
            f"`max_memory` was expected to be at least {readable(LEAST_MEMORY)}, but it is "
            f"{readable(budget.max_memory)}."
        )
    target = Path(path)
    _check_target(target)
    _check_metadata(metadata)
    contents = state_of(source, dtype)
    files = plan_files(contents, target, bytes_of(max_shard_size, "max_shard_size"), metadata)
    pieces = {name: cut(name, tensor, contents.dtype_of(name), budget) for name, tensor in contents.tensors.items()}
    place = target.parent if target.suffix == SUFFIX else target
    stem = target.stem if target.suffix == SUFFIX else "model"
    return Plan(place, files, pieces, contents, _digest_of(contents, files), budget, stem)


def _check_target(target: Path) -> None:
    if target.suffix == SUFFIX and target.is_dir():
        raise IsADirectoryError(f"`path` is a file, because it ends in `{SUFFIX}`, but {target} is a folder.")
    if target.suffix != SUFFIX and target.exists() and not target.is_dir():
        raise NotADirectoryError(f"`path` is a folder, unless it ends in `{SUFFIX}`, but {target} is a file.")


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"`metadata` was expected to have strings only, but it has {key!r}: {value!r}.")


def _digest_of(contents: Contents, files: PlannedFiles) -> str:
    """Tells a checkpoint from others that have other bytes."""
    deferred = [tensor for tensor in contents.tensors.values() if _C.is_deferred(tensor)]
    recorded = iter(_C.digests_of_recordings(deferred))
    found = hashlib.sha256()
    for tensor in contents.tensors.values():
        digest = next(recorded) if _C.is_deferred(tensor) else _C.digest_of(tensor.detach())
        shown = tensor.stride(), tensor.is_conj(), tensor.is_neg()
        found.update(repr((_C.is_deferred(tensor), digest, shown)).encode())
    for file in files.files:
        found.update(file.name.encode() + file.header.content)
    if files.index_file is not None:
        found.update(files.index_file[1])
    return found.hexdigest()


def _write_files(plan: Plan, complete: set[str], progress: bool) -> None:
    files = [file for file in plan.files.files if file.name not in complete]
    total = sum(plan.contents.nbytes_of(place.name) for file in files for place in file.header.places)
    with ExitStack() as stack:
        step = stack.enter_context(progress_bar(total, progress, "saving"))
        open_files = stack.enter_context(ExitStack())  # left after the writer
        writer = stack.enter_context(Writer(step))
        memory = _C.RecycledMemory(plan.budget.slack)
        for file in files:
            incomplete = IncompleteFile(plan.place / file.name, file.header.file_size)
            open_files.callback(incomplete.discard)
            _write_file(plan, file, incomplete, writer, memory)


def _write_file(
    plan: Plan, file: PlannedFile, incomplete: IncompleteFile, writer: Writer, memory: _C.RecycledMemory
) -> None:
    incomplete.write(memoryview(file.header.content), 0)
    for place in file.header.places:
        at = place.begin
        for piece in plan.pieces[place.name].values(memory):
            writer.write(incomplete, piece, at)
            at += piece.numel() * piece.itemsize
    writer.complete(incomplete)


def _write_index(path: Path, content: bytes) -> None:
    file = IncompleteFile(path, len(content))
    try:
        file.write(memoryview(content), 0)
        file.complete()
    finally:
        file.discard()
