"""From a module, deferred or not, to safetensors files."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch.nn import Module
from typing_extensions import Self

from .. import _C
from ..internals.document import Column, Document, Table
from ..internals.held_tensors import shows_all
from ..internals.text import bytes_of, in_units, progress_bar
from .contents import SUFFIX, Contents, Folder, IncompleteFile, PlannedFile, PlannedFiles, plan_files, state_of

__all__ = [
    "LARGEST_PIECE",
    "LEAST_MEMORY",
    "Budget",
    "CheckpointFile",
    "CheckpointPlan",
    "Pieces",
    "Plan",
    "Writer",
    "check_target",
    "cut",
    "parts_of_shape",
    "plan_checkpoint",
    "planned",
    "recorded_as",
    "save_safetensors",
]

logger: logging.Logger = logging.getLogger(__package__)

LEAST_MEMORY = 4 << 20
OTHER_SUFFIXES = {".pt", ".pth", ".bin", ".safetensor"}


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint.

    Attributes:
        name: Its name.
        tensors: The number of its tensors.
        nbytes: Its size.
    """

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointPlan(Document):
    """The files that `save_safetensors` would write.

    Attributes:
        place: Their folder.
        files: The files with tensors.
        index: The name of the index, if there are several files.
    """

    place: Path
    files: tuple[CheckpointFile, ...]
    index: str | None

    @property
    def nbytes(self) -> int:
        """The size of all files, without the index."""
        return sum(file.nbytes for file in self.files)

    def _parts(self) -> list[Table]:
        return [Table(("file", "tensors", Column("bytes", in_units)), map(astuple, self.files))]


class Plan(NamedTuple):
    """What `save_safetensors` writes."""

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

    @property
    def summary(self) -> CheckpointPlan:
        """The plan for the caller."""
        files = tuple(
            CheckpointFile(file.name, len(file.header.places), file.header.file_size) for file in self.files.files
        )
        return CheckpointPlan(self.place, files, self.files.index_file[0] if self.files.index_file else None)


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
    write_plan(planned(source, path, max_shard_size, max_memory, dtype, metadata), progress, resume)


def write_plan(plan: Plan, progress: bool, resume: bool) -> None:
    """Write the files of a plan: see `save_safetensors()`. `world()` replaces this function."""
    folder = Folder(plan.place, plan.stem)
    sizes = {file.name: file.header.file_size for file in plan.files.files}
    index = plan.files.index_file
    with folder.locked():
        complete = folder.begin(sizes, index[0] if index else None, plan.others(), plan.text, resume)
        logger.info(
            "Writing %d files of %s to %s; %d are complete.",
            len(sizes),
            in_units(plan.nbytes),
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
    return planned(source, path, max_shard_size, max_memory, dtype, metadata).summary


def planned(
    source: Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    max_shard_size: int | str,
    max_memory: int | str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Return what `save_safetensors` writes. It raises the errors of `plan_checkpoint()`."""
    budget = Budget(bytes_of(max_memory, "max_memory"))
    if budget.max_memory < LEAST_MEMORY:
        raise ValueError(
            f"`max_memory` was expected to be at least {in_units(LEAST_MEMORY)}, but it is "
            f"{in_units(budget.max_memory)}."
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
    return Plan(place, files, pieces, contents, _digest_of(contents, files), budget, stem)


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


def write_files(plan: Plan, complete: set[str], progress: bool) -> None:
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
    plan: Plan, file: PlannedFile, incomplete: IncompleteFile, writer: Writer, memory: _C.RecycledMemory
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


# ---- Tensors in pieces of bounded size, computed one by one


LARGEST_PIECE = 16 << 20
"""The allocator reuses memory up to this size. It returns larger memory to the system immediately."""

SMALLEST_PIECE = 64 << 10

OVERHEAD = 2 << 20
"""The memory of Python and the recording, in bytes."""

IN_FLIGHT = 2
"""The number of pieces besides the computed one: one waits, and one is being written."""


class Budget(NamedTuple):
    """The memory that writing may use."""

    max_memory: int
    """The total in bytes."""

    @property
    def piece(self) -> int:
        """The size of a piece in bytes."""
        return max(SMALLEST_PIECE, min(LARGEST_PIECE, (self.max_memory - OVERHEAD) // 8))

    @property
    def for_computing(self) -> int:
        """The memory for computing one piece."""
        return self.max_memory - self.beside_computing

    @property
    def beside_computing(self) -> int:
        """The rest: waiting pieces, and freed memory that is not reused."""
        return IN_FLIGHT * self.piece + self.slack + OVERHEAD

    @property
    def slack(self) -> int:
        """The freed memory that is not returned to the system immediately."""
        return self.piece


@dataclass(frozen=True)
class Pieces:
    """A tensor, divided into pieces."""

    tensor: torch.Tensor
    dtype: torch.dtype
    """The dtype in the file."""
    piece: int
    """The size of a piece in elements. 0 if the tensor is computed as a whole, and then divided."""
    nbytes: int
    needs: int
    """The memory for computing a piece, in bytes."""
    is_on_device: bool = False
    """Whether the whole tensor is computed in the memory of a device, and copied in pieces."""

    def values(self, memory: _C.RecycledMemory) -> Iterator[torch.Tensor]:
        """Yield the elements in order, as real CPU tensors that are computed in `memory`."""
        elements = max(1, LARGEST_PIECE // self.dtype.itemsize)
        if self.is_on_device:
            whole = _C.evaluate_in(recorded_as(self.tensor, self.dtype), memory)
            yield from (whole[part].to("cpu") for part in parts_of_shape(whole.shape, self.piece))
        elif self.piece == 0:
            whole = _values(self.tensor, self.dtype, memory)
            yield from (whole[part] for part in parts_of_shape(whole.shape, elements))
        else:
            yield from (
                _values(self.tensor[part], self.dtype, memory) for part in parts_of_shape(self.tensor.shape, self.piece)
            )


def cut(name: str, tensor: torch.Tensor, dtype: torch.dtype, budget: Budget) -> Pieces:
    """Divide a tensor so that each piece can be computed in the memory of `budget`.

    Random fills, copies and simple arithmetic are computed piece by piece. Other operators, such as `orthogonal_`, are
    computed once, as a whole, if memory allows.

    Raises:
        MemoryError: The memory is too small. The message contains the required size.
    """
    tensor = tensor.detach()
    nbytes = tensor.numel() * dtype.itemsize
    size = max(1, budget.piece // max(dtype.itemsize, tensor.itemsize))
    if not _C.is_deferred(tensor):
        return Pieces(tensor, dtype, size, nbytes, IN_FLIGHT * budget.piece)
    if tensor.numel() == 0:
        return Pieces(tensor, dtype, 0, nbytes, 0)
    whole, work = _needs(tensor, dtype)
    if tensor.is_cuda and whole <= budget.for_computing:  # computed at once in the device's memory
        return Pieces(tensor, dtype, size, nbytes, whole + budget.piece, is_on_device=True)
    if tensor.numel() <= size and whole <= budget.for_computing:
        return Pieces(tensor, dtype, 0, nbytes, whole)
    while True:
        part = _middle(tensor, size)
        of_part, work_of_part = _needs(tensor[part], dtype)
        is_cheap = work_of_part * tensor.numel() <= 2 * work * tensor[part].numel()
        if is_cheap and of_part <= budget.for_computing:
            return Pieces(tensor, dtype, size, nbytes, of_part)
        if not is_cheap or size * tensor.itemsize <= SMALLEST_PIECE:
            break
        size //= 2
    if whole <= budget.for_computing:
        return Pieces(tensor, dtype, 0, nbytes, whole)
    if of_part <= budget.for_computing:
        return Pieces(tensor, dtype, size, nbytes, of_part)
    needed = min(whole, of_part) + budget.beside_computing
    raise MemoryError(
        f"Computing `{name}` of shape {tuple(tensor.shape)} takes {in_units(needed)}, because not all of its operators "
        f"can be computed in parts, but `max_memory` is {in_units(budget.max_memory)}. Increase it, or materialize "
        "this tensor first. explain() lists its operators."
    )


def _values(tensor: torch.Tensor, dtype: torch.dtype, memory: _C.RecycledMemory) -> torch.Tensor:
    if _C.is_deferred(tensor):
        return _C.evaluate_in(recorded_as(tensor, dtype), memory).to("cpu")
    with torch.no_grad():
        return tensor.to("cpu", dtype).resolve_conj().resolve_neg().contiguous()


def recorded_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a deferred tensor that shows all of its storage, in order."""
    with torch.no_grad():
        result = tensor.to(dtype).resolve_conj().resolve_neg().contiguous()
        return result if shows_all(result) else result.clone(memory_format=torch.contiguous_format)


def _needs(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    return _C.needs_of_evaluating(recorded_as(tensor, dtype))


Part = tuple[int | slice, ...]


def parts_of_shape(shape: torch.Size, elements: int) -> Iterator[Part]:
    """Divide a shape, in the order of its elements, into parts of at most `elements` elements."""
    cut_at = _dimension_to_cut(shape, elements)
    if cut_at == len(shape):
        for i in range(math.prod(shape)):
            yield _index_of(i, shape)
        return
    step = _step(shape, cut_at, elements)
    for i in range(math.prod(shape[:cut_at])):
        outer = _index_of(i, shape[:cut_at])
        for begin in range(0, shape[cut_at], step):
            yield (*outer, slice(begin, begin + step))


def _middle(tensor: torch.Tensor, elements: int) -> Part:
    """Return one of these parts, with others before and after it."""
    shape = tensor.shape
    cut_at = _dimension_to_cut(shape, elements)
    if cut_at == len(shape):
        return tuple(size // 2 for size in shape)
    step = _step(shape, cut_at, elements)
    begin = shape[cut_at] // 2 // step * step
    return (*(size // 2 for size in shape[:cut_at]), slice(begin, begin + step))


def _dimension_to_cut(shape: torch.Size, elements: int) -> int:
    """Return the first dimension whose entries have at most `elements` elements."""
    for dim in range(len(shape)):
        if math.prod(shape[dim + 1 :]) <= elements:
            return dim
    return len(shape)


def _step(shape: torch.Size, dim: int, elements: int) -> int:
    return max(1, elements // max(1, math.prod(shape[dim + 1 :])))


def _index_of(number: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.append(at)
    return tuple(reversed(index))


# ---- The writing thread


PATIENCE = 0.02
"""The time in seconds that the thread waits for a task before it checks whether more will come."""


class _Piece(NamedTuple):
    file: IncompleteFile
    tensor: torch.Tensor
    at: int


class Writer:
    """Write pieces, and complete files, in the order of the calls.

    One piece waits while another one is written. The next call raises the error of an earlier one.

    Args:
        on_written: Called with the number of bytes of each written piece.
    """

    def __init__(self, on_written: Callable[[int], object] | None) -> None:
        self._on_written = on_written
        self._tasks: queue.Queue[_Piece | IncompleteFile] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchext checkpoint writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the thread has ended, also if the wait is interrupted, because the files are closed after this."""
        if error is not None and self._error is None:
            self._error = error  # waiting pieces are dropped
        self._is_ending.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as interrupt:
                self._error = self._error or interrupt
        if error is None:
            self._check()

    def write(self, file: IncompleteFile, tensor: torch.Tensor, at: int) -> None:
        """Write the elements of `tensor`, which is contiguous and on the CPU, `at` bytes from the beginning."""
        self._check()
        if tensor.numel() > 0:
            self._tasks.put(_Piece(file, tensor, at))

    def complete(self, file: IncompleteFile) -> None:
        """Rename the file to its final name after all earlier pieces."""
        self._check()
        self._tasks.put(file)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=PATIENCE)
            except queue.Empty:
                if self._is_ending.is_set():
                    return
                continue
            if self._error is None:
                try:
                    self._do(task)
                except BaseException as error:
                    self._error = error
            del task  # frees the memory of the piece

    def _do(self, task: _Piece | IncompleteFile) -> None:
        if isinstance(task, IncompleteFile):
            task.complete()
            return
        nbytes = task.tensor.numel() * task.tensor.itemsize
        task.file.write(memoryview((ctypes.c_ubyte * nbytes).from_address(task.tensor.data_ptr())), task.at)
        if self._on_written is not None:
            self._on_written(nbytes)
