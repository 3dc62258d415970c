"""The places of the files of a dry run: written files are in a separate folder, all others are the originals.

The folder has these parts. All processes of a dry run share them.

- `written` contains each written file under its whole path. It is created with the first file.
- `gone` contains a mark for each removed path, which hides the original. It is created with the first mark, because
  programs look up many more files than they remove.
- `copies` contains the copies of originals, by inode. Copies of originals with several names are in `links`, which is
  created with the first copy.
- `parts` contains incomplete copies.
- `tmp` is the temporary folder of the program (`TMPDIR`). Its files are real: code in C and shells write there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

__all__ = [
    "Tree",
    "about_refusal",
    "can_write",
    "copy_alike",
    "copy_file",
    "copy_range",
    "exists_at",
    "is_folder_at",
    "join",
    "make_folder",
    "os_error",
    "parent_of",
    "path_of",
    "real",
    "reopen",
    "reopen_readers",
    "send",
    "when_imported",
]


# ---- The original functions of `os`, and tools that the replacements share
#
# The overlay must reach the real files, so its code calls `real.stat()` and not `os.stat()`.


# `os` takes its functions from a C module with the name of the system: `posix` or `nt`.
real: Any = SimpleNamespace(**vars(importlib.import_module(os.name)))


def os_error(code: int, path: str, target: str | None = None) -> OSError:
    """Return the error for a system error code, of Python's class for it."""
    return OSError(code, os.strerror(code), path, None, target)


# ---- Call a function with a module when it is imported


_actions: dict[str, Callable[[Any], None]] = {}


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module `name`: now if it has been imported, otherwise at the end of its import."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Finds modules with the other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _act_after(spec.loader, _actions[name])
                return spec
        return None


def _act_after(loader: Any, action: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        action(module)

    loader.exec_module = exec_module


_finder: Any = _Finder()


# ---- Advice about writes that the system has rejected: `guard.py`


# The messages of C, Rust, SQLite and HDF5.
REFUSED = re.compile(
    r"permission denied|os error 13|errno(?: =)? 13|unable to open database|readonly database", re.IGNORECASE
)

ADVICE = """
A dry run rejects writes of code in C, C++ or Rust that opens files by name, because they would change real files. Let
the program write below `tempfile.gettempdir()`, or give the library a file that Python has opened. See "Files" in
docs/how_to/dry_runs.md.
"""


def about_refusal(error: BaseException | None) -> str:
    """Return advice if an error, or one of its causes, is that of a rejected write; otherwise an empty string."""
    while error is not None:
        if REFUSED.search(str(error)):
            return ADVICE
        error = error.__cause__ or error.__context__
    return ""


# ---- Descriptors of open files, as Linux lists them in `/proc`


DESCRIPTORS = "/proc/self/fd"


def path_of(descriptor: int) -> str:
    """Return the real path of an open file, or a name without a leading slash, such as `pipe:[7]`."""
    path: str = real.readlink(f"{DESCRIPTORS}/{descriptor}")
    return path


def reopen_readers(status: os.stat_result, copy: str) -> None:
    """Make the descriptors of this process that read an original read its copy from now on, at the same position."""
    with contextlib.suppress(FileNotFoundError):  # systems without /proc
        for descriptor in map(int, real.listdir(DESCRIPTORS)):
            with contextlib.suppress(OSError):
                if os.path.samestat(real.fstat(descriptor), status) and not can_write(descriptor):
                    reopen(descriptor, copy)


def can_write(descriptor: int) -> bool:
    """Return true if a descriptor is open for writing."""
    return bool(_flags(descriptor) & (os.O_WRONLY | os.O_RDWR))


def _flags(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def reopen(descriptor: int, copy: str) -> None:
    """Make a descriptor refer to another file from now on, at the same position."""
    flags = _flags(descriptor) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
    opened = real.open(copy, flags | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some folders have no position
            real.lseek(opened, real.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        real.dup2(opened, descriptor, real.get_inheritable(descriptor))
    finally:
        real.close(opened)


# ---- The places of the files of a dry run: written files are in a separate folder, all others are the originals


# ---- Copy files, links and folders with their metadata. An overlay changes copies instead of the originals


CHUNK = 1 << 24


def exists_at(place: str) -> bool:
    """Return true if a file, folder or link exists at a real path."""
    try:
        real.lstat(place)
    except (OSError, ValueError):
        return False
    return True


def is_folder_at(place: str) -> bool:
    """Return true if a folder exists at a real path."""
    try:
        return stat.S_ISDIR(real.lstat(place).st_mode)
    except (OSError, ValueError):
        return False


def copy_file(place: str, copy: str, *, content: bool) -> None:
    """Copy a regular file to `copy`, which must not exist; without its bytes unless `content`."""
    source = real.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = real.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            status = real.fstat(source)
            if content:
                copy_range(source, target, status.st_size)
            _copy_metadata(source, target, status)
        finally:
            real.close(target)
    finally:
        real.close(source)


def copy_range(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes of a file to an empty file. Holes, such as those of placeholders, stay holes."""
    begin = 0
    while begin < size:
        begin = _seek(source, begin, os.SEEK_DATA)
        end = _seek(source, begin, os.SEEK_HOLE)
        real.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            sent = real.sendfile(target, source, begin, min(end - begin, CHUNK))
            if not sent:
                break
            begin += sent
    real.ftruncate(target, size)


def send(target: int, source: int, offset: int | None, count: int, **options: Any) -> int:
    """Call `os.sendfile()`, but copy a hole as a hole: placeholders of checkpoints are large and nearly empty."""
    if offset is None or not all(stat.S_ISREG(real.fstat(file).st_mode) for file in (target, source)):
        return int(real.sendfile(target, source, offset, count, **options))
    before = real.lseek(source, 0, os.SEEK_CUR)
    data, hole = (_seek(source, offset, kind) for kind in (os.SEEK_DATA, os.SEEK_HOLE))
    real.lseek(source, before, os.SEEK_SET)
    if data <= offset:
        return int(real.sendfile(target, source, offset, min(count, hole - offset) or count, **options))
    length = min(data - offset, count)
    end = real.lseek(target, length, os.SEEK_CUR)
    if end > real.fstat(target).st_size:
        real.ftruncate(target, end)
    return length


def _seek(file: int, offset: int, kind: int) -> int:
    """Return the offset of the next data or hole, or the end of the file."""
    try:
        return int(real.lseek(file, offset, kind))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(offset, int(real.fstat(file).st_size))


def copy_alike(place: str, own: str) -> None:
    """Copy a link, an empty folder, a FIFO or a socket, unless another process has just done so."""
    status = real.lstat(place)
    with contextlib.suppress(FileExistsError):
        if stat.S_ISLNK(status.st_mode):
            real.symlink(real.readlink(place), own)
        elif stat.S_ISDIR(status.st_mode):
            real.mkdir(own, 0o700)
            _copy_metadata(place, own, status)
            real.chmod(own, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
            raise os_error(errno.EPERM, place)
        else:
            real.mknod(own, status.st_mode)


def _copy_metadata(source: Any, target: Any, status: os.stat_result) -> None:
    with contextlib.suppress(OSError):  # only root may change owners
        real.chown(target, status.st_uid, status.st_gid)
    real.chmod(target, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):  # some file systems have no extended attributes
        for name in real.listxattr(source):
            real.setxattr(target, name, real.getxattr(source, name))
    real.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


# ---- Places, and the marks of removed files


MAX_LINKS = 40  # as Linux


class Tree:
    """The files from the view of the program.

    Paths are those of the program: absolute, and without links and dots unless a function documents otherwise. A place
    is the real path of a file.

    Args:
        folder: The folder of the dry run, which must exist.
    """

    def __init__(self, folder: str) -> None:
        self.folder: str = os.path.realpath(folder)
        self.written: str = f"{self.folder}/written"
        self.gone: str = f"{self.folder}/gone"
        self.copies: str = f"{self.folder}/copies"
        self.links: str = f"{self.folder}/links"
        self.parts: str = f"{self.folder}/parts"
        self.temporary: str = f"{self.folder}/tmp"
        for part in (self.copies, self.parts, self.temporary):
            make_folder(part)
        self._is_marked = False
        self._folders: set[str] = set()  # originals, which remain folders

    # ---- Places of files ----

    def program_path(self, place: str) -> str:
        """Return the program's path for a place."""
        if place == self.written or place.startswith(self.written + "/"):
            return place[len(self.written) :] or "/"
        return place

    def working_directory(self) -> str:
        """Return the working directory that the program has entered."""
        return self.program_path(real.getcwd())

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Return the absolute path without links and dots. Without `follow`, the last part may be a link."""
        found = "" if path.startswith("/") else self.working_directory().rstrip("/")
        parts = _parts(path)
        links = 0
        is_own = True  # whether the program may have written files in `found`
        while parts:
            part = parts.pop()
            if part == "..":
                self._check_folder(found or "/")
                found, is_own = found.rpartition("/")[0], True
                continue
            candidate = f"{found}/{part}"
            is_own = is_own and exists_at(self.own(candidate))
            if not is_own and candidate in self._folders and not self._has_marks():
                found = candidate
                continue
            target = self._link_at(candidate, is_folder=bool(parts)) if parts or follow else None
            if target is None:
                found = candidate
                continue
            links += 1
            if links > MAX_LINKS:
                raise os_error(errno.ELOOP, path)
            found, is_own = "" if target.startswith("/") else found, True
            parts += _parts(target)
        return found or "/"

    def own(self, path: str) -> str:
        """Return the place where the program may write `path`."""
        return path if self.is_real(path) else self.written + path

    def place(self, path: str) -> str:
        """Return the place of the file at `path`, which may not exist."""
        if self.has_own(path):
            return self.own(path)
        return self._copy_of_links(path) if exists_at(self.links) and not self.is_real(path) else path

    def exists(self, path: str) -> bool:
        """Return true if a file, folder or link exists at `path`."""
        return exists_at(self.place(path))

    def is_folder(self, path: str) -> bool:
        """Return true if a folder exists at `path`, and not a link to one."""
        return is_folder_at(self.place(path))

    def has_own(self, path: str) -> bool:
        """Return true if the program has replaced or removed the original at `path`."""
        return not self.is_real(path) and (exists_at(self.written + path) or self.is_gone(path))

    def is_real(self, path: str) -> bool:
        """Return true if the program writes to `path` directly: temporary files, and settings of processes."""
        return self.is_inside(path) or (_is_in(path, "/proc") and not _is_in(path, "/proc/sys"))

    def is_inside(self, place: str) -> bool:
        """Return true if a place is in the folder of the dry run."""
        return _is_in(place, self.folder)

    def is_gone(self, path: str) -> bool:
        """Return true if the original at `path` has been removed, possibly with a folder around it."""
        if not self._has_marks():
            return False
        while path:
            if exists_at(self._mark(path)):
                return True
            path = path.rpartition("/")[0]
        return False

    def copy_place(self, status: os.stat_result) -> str:
        """Return the place of the copy of an original. The copy may not exist."""
        folder = self.links if status.st_nlink > 1 and stat.S_ISREG(status.st_mode) else self.copies
        return f"{folder}/{status.st_dev}-{status.st_ino}"

    def _copy_of_links(self, path: str) -> str:
        """Return the copy of the original at `path` if it was made under another name of the file."""
        try:
            copy = self.copy_place(real.lstat(path))
        except OSError:
            return path
        return copy if exists_at(copy) else path

    # ---- Folders ----

    def names_in(self, path: str) -> list[str]:
        """Return the names in the folder at `path`.

        Raises:
            OSError: `os.listdir()` would fail.
        """
        if self.is_real(path):
            return list(real.listdir(path)) if path != self.folder else [os.path.basename(self.temporary)]
        if not self.has_own(path):
            return self._names_left_in(path)
        names: list[str] = real.listdir(self.written + path)
        if not self.is_gone(path) and is_folder_at(path):
            names += [name for name in self._names_left_in(path) if not exists_at(join(self.written + path, name))]
        return names

    def is_untouched(self) -> bool:
        """Return true if the program has changed no file."""
        return not exists_at(self.written) and not self._has_marks()

    def _names_left_in(self, path: str) -> list[str]:
        """Return the names of the originals in a folder that are not gone."""
        names = real.listdir(path)
        if path == parent_of(self.folder):
            names = [name for name in names if name != os.path.basename(self.folder)]
        return [name for name in names if not exists_at(self._mark(join(path, name)))] if self._has_marks() else names

    # ---- Removed files ----

    def mark_gone(self, path: str) -> None:
        """Hide the original at `path`, if it exists."""
        if not self.is_real(path) and exists_at(path):
            make_folder(self.gone)
            with contextlib.suppress(FileExistsError):
                real.symlink(path, self._mark(path))  # creating a link is atomic

    def gone_paths(self) -> Iterator[str]:
        """Yield the paths of the originals that have been hidden."""
        for mark in real.listdir(self.gone) if self._has_marks() else ():
            yield real.readlink(f"{self.gone}/{mark}")

    def _mark(self, path: str) -> str:
        name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
        return f"{self.gone}/{name}"

    def _has_marks(self) -> bool:
        self._is_marked = self._is_marked or exists_at(self.gone)
        return self._is_marked

    # ---- Links ----

    def _link_at(self, path: str, *, is_folder: bool) -> str | None:
        """Return the target of the link at `path`, or None. With `is_folder`, raise for other files than folders."""
        place = self.place(path)
        try:
            mode = real.lstat(place).st_mode
        except OSError:
            return None
        if stat.S_ISLNK(mode):
            target: str = real.readlink(place)
            return self._magic_target(place, target) if _is_in(place, "/proc") else target
        is_one = stat.S_ISDIR(mode)
        if is_folder and not is_one:
            raise os_error(errno.ENOTDIR, path)
        if is_one and place == path and not self.is_real(path):
            self._folders.add(path)
        return None

    def _magic_target(self, link: str, target: str) -> str | None:
        """Return the program's path for a link in `/proc`, or None for files without a path, such as pipes."""
        try:
            if os.path.samestat(real.stat(link), real.stat(join(parent_of(link), target))):
                return self.program_path(target)
        except OSError:
            pass
        return None

    def _check_folder(self, path: str) -> None:
        if not stat.S_ISDIR(real.lstat(self.place(path)).st_mode):
            raise os_error(errno.ENOTDIR, path)


def make_folder(place: str) -> None:
    """Create a folder, unless it exists: another process may have created it."""
    with contextlib.suppress(FileExistsError):
        real.mkdir(place)


def parent_of(path: str) -> str:
    """Return the path of the folder around `path`."""
    return path.rpartition("/")[0] or "/"


def join(folder: str, name: str) -> str:
    """Return the path of `name` in `folder`, or `name` itself if it is absolute."""
    return name if name.startswith("/") else f"{folder.rstrip('/')}/{name}"


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
