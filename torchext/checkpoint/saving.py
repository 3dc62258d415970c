"""From a module, deferred or not, to safetensors files."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .. import _C
from ..tools.progress import progress_bar
from ..tools.results import Column, Table
from ..tools.sizes import bytes_of, readable
from .contents import SUFFIX, Contents, PlannedFile, PlannedFiles, plan_files, state_of
from .folder import Folder, IncompleteFile
from .pieces import Budget, Pieces, cut
from .writer import Writer

__all__ = ["LEAST_MEMORY", "CheckpointPlan", "Plan", "check_target", "plan_checkpoint", "save_safetensors"]

logger = logging.getLogger(__package__)

LEAST_MEMORY = 4 << 20
OTHER_SUFFIXES = {".pt", ".pth", ".bin", ".safetensor"}


class CheckpointPlan(NamedTuple):
    """The files that `save_safetensors` would write."""

    place: Path
    """The folder of the files."""
    files: PlannedFiles
    pieces: dict[str, Pieces]
    contents: Contents
    text: str
    """A digest of the contents of the files and their recordings."""
    budget: Budget
    stem: str
    """The beginning of the names of the files."""

    @property
    def nbytes(self) -> int:
        """The size of all files, without the index."""
        return sum(file.header.file_size for file in self.files.files)

    def others(self) -> list[str]:
        """Return the existing files that would be read as a part of this checkpoint."""
        own = {file.name for file in self.files.files} | (
            {self.files.index_file[0]} if self.files.index_file else set()
        )
        related = re.compile(rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}(\.index\.json)?")
        return [path.name for path in self.place.iterdir() if related.fullmatch(path.name) and path.name not in own]

    def _table(self) -> Table:
        columns = [Column("file"), Column("tensors", is_number=True), Column("bytes", readable, is_number=True)]
        rows = [(file.name, len(file.header.places), file.header.file_size) for file in self.files.files]
        return Table(columns, rows)

    def __str__(self) -> str:
        return str(self._table())

    def __repr__(self) -> str:
        return f"CheckpointPlan({len(self.files.files)} files, {readable(self.nbytes)}, in {str(self.place)!r})"

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the folder, and the name, tensors and bytes of each file, as plain values."""
        return {"place": str(self.place), "bytes": self.nbytes, "files": self._table().to_dict()}


Plan = CheckpointPlan


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
    """Write a module or a state dict to safetensors files, in bounded memory.

    Deferred tensors are computed piece by piece, written to their places, and stay deferred. The files have the same
    bytes as if all tensors had been constructed eagerly and saved at once. Real tensors are written unchanged. Shared
    memory is written once. In a dry run, whose tensors have no values, descriptions are written that the run can load.

    Args:
        source: A module or a state dict. Its tensors may be deferred or real.
        path: One file, if it ends in `.safetensors`: the file that `safetensors.torch.save_file(source.state_dict(),
            path)` would write, or, if tensors share memory, `save_model`. Otherwise a folder, with the files that
            `save_pretrained` would write for the weights of a transformers model, and
            `huggingface_hub.save_torch_model` for other models: `model.safetensors`, or several files and
            `model.safetensors.index.json`.
        max_shard_size: The maximum size of a file in a folder, in bytes, or as "5GB" or "1GiB". A larger tensor gets
            its own file.
        max_memory: Maximum growth of the process's resident memory, in bytes, or as "5GB" or "1GiB".
        dtype: The dtype of floating point and complex tensors in the files, as in `source.to(dtype)`.
        progress: Show a progress bar of bytes and their rate. Needs tqdm.
        metadata: More metadata for the header of a file, or for the index if there is one.
        resume: Resume a call that was killed, and keep the files that it completed. It must have had the same tensors,
            recordings and options.

    Raises:
        TypeError: `source` is neither a module nor a state dict, or safetensors does not support the dtype of a tensor.
        ValueError: An argument is out of range or names a `.pt` file, or a tensor has no values, or a layout that
            cannot be saved.
        CheckpointError: Tensors share memory and none of them shows all of it, or another call is writing into the
            folder.
        MaterializationError: A value cannot be computed.
        MemoryError: A tensor cannot be computed in `max_memory`. Nothing has been written.
        FileExistsError: Files exist that cannot be resumed. Nothing has been written.
        OSError: The disk has too little space, or the files cannot be written. Complete files stay, for `resume=True`;
            others are removed.
        ImportError: safetensors, or another library that an argument needs, is not installed.
    """
    plan = plan_checkpoint(
        source, path, max_shard_size=max_shard_size, max_memory=max_memory, dtype=dtype, metadata=metadata
    )
    write_plan(plan, progress, resume)


def write_plan(plan: CheckpointPlan, progress: bool, resume: bool) -> None:
    """Write the files of a plan: see `save_safetensors()`. `world()` replaces this function."""
    folder = Folder(plan.place, plan.stem)
    sizes = {file.name: file.header.file_size for file in plan.files.files}
    index = plan.files.index_file
    with folder.locked():
        complete = folder.begin(sizes, index[0] if index else None, plan.others(), plan.text, resume)
        logger.info(
            "Writing %d files of %s to %s; %d are complete.",
            len(sizes),
            readable(plan.nbytes),
            plan.place,
            len(complete),
        )
        try:
            write_files(plan, complete, progress)
            if index is not None:
                _write_index(plan.place / index[0], index[1])
        except BaseException:
            folder.forget_unless_begun(sizes)
            raise
        folder.end()
        logger.info("The checkpoint in %s is complete.", plan.place)


def plan_checkpoint(
    source: Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    max_memory: int | str = "1GiB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> CheckpointPlan:
    """Return the files that `save_safetensors` would write, without computing values.

    It takes the same arguments and raises the same errors, except those of the file system.
    """
    budget = Budget(bytes_of(max_memory, "max_memory"))
    if budget.max_memory < LEAST_MEMORY:
        raise ValueError(
            f"`max_memory` was expected to be at least {readable(LEAST_MEMORY)}, but it is "
            f"{readable(budget.max_memory)}."
        )
    target = Path(path)
    check_target(target)
    _check_metadata(metadata)
    contents = state_of(source, dtype)
    files = plan_files(contents, target, bytes_of(max_shard_size, "max_shard_size"), metadata)
    computed = {} if contents.are_described else contents.tensors
    pieces = {name: cut(name, tensor, contents.dtype_of(name), budget) for name, tensor in computed.items()}
    place = target.parent if target.suffix == SUFFIX else target
    stem = target.stem if target.suffix == SUFFIX else "model"
    return CheckpointPlan(place, files, pieces, contents, _digest_of(contents, files), budget, stem)


def check_target(target: Path) -> None:
    """Check that `target` is a folder, or a file that ends in `.safetensors`, or can become one of these.

    Raises:
        ValueError: It has the suffix of another kind of file.
        OSError: It exists, and is the other one.
    """
    if target.suffix in OTHER_SUFFIXES:
        raise ValueError(f"`path` must be a folder, or a file that ends in `{SUFFIX}`, got {os.fspath(target)!r}.")
    if target.suffix == SUFFIX and target.is_dir():
        raise IsADirectoryError(f"`path` is a file, because it ends in `{SUFFIX}`, but {target} is a folder.")
    if target.suffix != SUFFIX and target.exists() and not target.is_dir():
        raise NotADirectoryError(f"`path` is a folder, unless it ends in `{SUFFIX}`, but {target} is a file.")


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"`metadata` was expected to have strings only, but it has {key!r}: {value!r}.")


def _digest_of(contents: Contents, files: PlannedFiles) -> str:
    """Return a digest that differs between checkpoints with different bytes."""
    computed = () if contents.are_described else contents.tensors.values()
    deferred = [tensor for tensor in computed if _C.is_deferred(tensor)]
    recorded = iter(_C.digests_of_recordings(deferred))
    found = hashlib.sha256()
    for tensor in computed:
        digest = next(recorded) if _C.is_deferred(tensor) else _C.digest_of(tensor.detach())
        shown = tensor.stride(), tensor.is_conj(), tensor.is_neg()
        found.update(repr((_C.is_deferred(tensor), digest, shown)).encode())
    for file in files.files:
        found.update(file.name.encode() + file.header.content)
    if files.index_file is not None:
        found.update(files.index_file[1])
    return found.hexdigest()


def write_files(plan: CheckpointPlan, complete: set[str], progress: bool) -> None:
    """Write the files that are not complete. Dry runs replace this function."""
    files = [file for file in plan.files.files if file.name not in complete]
    total = sum(plan.contents.nbytes_of(place.name) for file in files for place in file.header.places)
    with ExitStack() as stack:
        step = stack.enter_context(progress_bar(total, "saving")) if progress else None
        open_files = stack.enter_context(ExitStack())  # closed after the writer
        writer = stack.enter_context(Writer(step))
        memory = _C.RecycledMemory(plan.budget.slack)
        for file in files:
            incomplete = IncompleteFile(plan.place / file.name, file.header.file_size)
            open_files.callback(incomplete.discard)
            _write_file(plan, file, incomplete, writer, memory)


def _write_file(
    plan: CheckpointPlan, file: PlannedFile, incomplete: IncompleteFile, writer: Writer, memory: _C.RecycledMemory
) -> None:
    incomplete.write(memoryview(file.header.content), 0)
    for place in file.header.places:
        at = place.begin
        for piece in plan.pieces[place.name].values(memory):
            writer.write(incomplete, piece, at)
            at += piece.numel() * piece.itemsize
        logger.debug("Wrote %s of %s.", place.name, file.name)
    writer.complete(incomplete)


def _write_index(path: Path, content: bytes) -> None:
    file = IncompleteFile(path, len(content))
    try:
        file.write(memoryview(content), 0)
        file.complete()
    finally:
        file.discard()
