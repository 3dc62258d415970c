"""A folder that files are written into, so that each of them is there as a whole or not at all.

A file is written under a hidden name, flushed to the disk, and then renamed. Who is killed leaves a hidden file behind,
which the next call removes, and files that are complete. What was being written is told by a hidden record, so that
another call can go on with it, if it is about the same.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..tools.sizes import readable

__all__ = ["Folder", "IncompleteFile"]


class IncompleteFile:
    """A file under a hidden name."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._hidden = path.with_name(f".{path.name}.incomplete")
        self.descriptor = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._reserve(size)
        except BaseException:
            self.discard()
            raise

    def _reserve(self, size: int) -> None:
        """So that a full disk is noticed before anything is computed."""
        if size > 0 and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.descriptor, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise OSError(
                        error.errno, f"{os.strerror(error.errno or 0)}: {readable(size)} for {self.path.name}"
                    ) from error

    def write(self, content: memoryview, at: int) -> None:
        """Writes all of `content` at a place in the file."""
        while content:
            written = os.pwrite(self.descriptor, content, at)
            content = content[written:]
            at += written

    def complete(self) -> None:
        """Flushes the file to the disk, and gives it its name."""
        os.fsync(self.descriptor)
        self._close()
        self._hidden.rename(self.path)
        _flush_names(self.path.parent)

    def discard(self) -> None:
        """Removes the file, if it is not complete."""
        self._close()
        self._hidden.unlink(missing_ok=True)

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Folder:
    """A folder, or the place of one file in it, which nobody else writes into meanwhile.

    Args:
        path: The folder. It is made if there is none.
        name: What the files are about: the lock and the record are called so.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._lock = path / f".{name}.lock"
        self._record = path / f".{name}.record"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps others out while the block runs.

        Raises:
            NotADirectoryError: A file is in the way.
            OSError: The folder cannot be made or written into.
            RuntimeError: Another call is writing into the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock_file():
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    @contextmanager
    def _lock_file(self) -> Iterator[None]:
        """The kernel gives the lock back when a process ends, however it does."""
        import fcntl

        while True:
            with self._lock.open("a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.seek(0)
                    owner = lock.read().strip() or "another process"
                    raise RuntimeError(
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
        """Whether the last owner has not removed the lock meanwhile."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._lock.stat())
        return False

    def begin(
        self, files: Mapping[str, int], last: str | None, others: Iterable[str], content: str, resume: bool
    ) -> set[str]:
        """Begins to write files, or goes on.

        Args:
            files: The files by name, with their sizes.
            last: The file that comes after all of them, if there is one.
            others: Files that would be taken for a part of them.
            content: Tells what will be in them.
            resume: Whether to go on where a call that was interrupted has stopped.

        Returns:
            Those of `files` that are complete already.

        Raises:
            FileExistsError: A file is there that is not to be gone on with.
            OSError: There is not enough space.
        """
        present = {name for name in files if (self.path / name).exists()}
        if others := sorted(others):
            raise FileExistsError(
                errno.EEXIST,
                f"There are files of another checkpoint. Remove them, or choose another place: {', '.join(others)}",
                os.fspath(self.path),
            )
        is_ended = (self.path / last).exists() if last else present == set(files)
        record = self._read_record()
        if present or is_ended:
            names = ", ".join(sorted(present | ({last} if last and is_ended else set())))
            if not resume:
                raise FileExistsError(
                    errno.EEXIST,
                    "There are such files already. Remove them, choose another place, or go on with what an "
                    f"interrupted call has left by `resume=True`: {names}",
                    os.fspath(self.path),
                )
            if record is None or record["content"] != content:
                why = "was not interrupted" if record is None else "was about other tensors, values or options"
                raise FileExistsError(
                    errno.EEXIST,
                    f"`resume=True` cannot go on, because the call that wrote these {why}. Remove them, or choose "
                    f"another place: {names}",
                    os.fspath(self.path),
                )
            damaged = sorted(name for name in present if (self.path / name).stat().st_size != files[name])
            if damaged:
                raise FileExistsError(
                    errno.EEXIST,
                    f"`resume=True` cannot go on: these were changed since. Remove them: {', '.join(damaged)}",
                    os.fspath(self.path),
                )
        self._remove_hidden(record)
        missing = {name: size for name, size in files.items() if name not in present}
        self._check_space(sum(missing.values()))
        self._write_record({"content": content, "files": [*files, *([last] if last else [])]})
        return present

    def end(self) -> None:
        """Forgets what was being written, because all of it is there."""
        self._record.unlink(missing_ok=True)

    def forget_unless_begun(self, files: Mapping[str, int]) -> None:
        """Forgets it, if none of `files` is there."""
        if not any((self.path / name).exists() for name in files):
            self.end()

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: {readable(needed)} are to be written, {readable(free)} are free",
                os.fspath(self.path),
            )

    def _read_record(self) -> dict[str, object] | None:
        try:
            record = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):  # or it was being written when the process was killed
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
        """Removes what a process that was killed has left."""
        names = record["files"] if record is not None else []
        for name in [*(names if isinstance(names, list) else []), self._record.name]:
            (self.path / f".{Path(str(name)).name}.incomplete").unlink(missing_ok=True)


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
