"""A folder in which each file is either complete or absent.

A file is written under a hidden name, flushed to the disk, and renamed. A killed process leaves complete files and one
hidden file, which the next call removes. A hidden record describes the checkpoint, so that another call can resume it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from ..internals.text import in_units

__all__ = ["Folder", "IncompleteFile"]


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
