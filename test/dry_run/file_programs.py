"""Random programs that change files: `python file_programs.py FOLDER SEED COUNT`, run with and without a dry run.

Each program works in its own existing folder, `FOLDER/NUMBER`. It prints the result or error of each step, and then
everything in its folder.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NAMES = ("a", "b", "d", "d/a", "d/e", "d/e/a", "link", "link/a", "loop", "new", "new/a", "d/../b", "./a", "d/new")


def read(path: Path, other: Path) -> object:
    return path.read_text()


def write(path: Path, other: Path) -> object:
    with path.open("w") as file:
        file.write(f"written to {path.name}")
        return file.name


def append(path: Path, other: Path) -> object:
    with open(os.fspath(path), "a") as file:
        return file.write("more"), file.tell()


def update(path: Path, other: Path) -> object:
    with path.open("r+") as file:
        file.write("UP")
    return path.read_text()


def make_exclusively(path: Path, other: Path) -> object:
    with path.open("xb") as file:
        return file.write(b"exclusive")


def open_by_descriptor(path: Path, other: Path) -> object:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return os.write(descriptor, b"by descriptor"), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def look(path: Path, other: Path) -> object:
    status = path.stat()
    return oct(status.st_mode & 0o170777), status.st_size if path.is_file() else None, path.is_symlink()


def scan(path: Path, other: Path) -> object:
    with os.scandir(path) as entries:
        return sorted((e.name, e.path, e.is_dir(), e.is_file(follow_symlinks=False), e.is_symlink()) for e in entries)


def walk(path: Path, other: Path) -> object:
    return sorted((folder, sorted(folders), sorted(names)) for folder, folders, names in os.walk(path))


def enter(path: Path, other: Path) -> object:
    before = Path.cwd()
    os.chdir(path)
    try:
        return Path.cwd(), sorted(os.listdir()), Path("a").exists()
    finally:
        os.chdir(before)


def replace_by_temporary(path: Path, other: Path) -> object:
    other.write_text("temporary")
    os.replace(other, path)
    return path.read_text()


def within(path: Path, other: Path) -> object:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = sorted(os.listdir(descriptor))
        made = os.open("inner", os.O_WRONLY | os.O_CREAT, dir_fd=descriptor)
        os.close(made)
        os.rename("inner", "moved", src_dir_fd=descriptor, dst_dir_fd=descriptor)
        return names, os.stat("moved", dir_fd=descriptor).st_size
    finally:
        os.close(descriptor)


def by_descriptor(change: Callable[[int], object]) -> Callable[[Path, Path], object]:
    def step(path: Path, other: Path) -> object:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            change(descriptor)
            status = os.fstat(descriptor)
            return oct(status.st_mode), status.st_mtime == path.stat().st_mtime
        finally:
            os.close(descriptor)

    return step


def save_atomically(folder: Path | None, path: Path) -> object:
    descriptor, name = tempfile.mkstemp(dir=folder)
    try:
        os.write(descriptor, b"atomic")
        os.replace(name, path)
        return path.read_text()
    except OSError as error:
        os.unlink(name)
        return type(error).__name__, error.errno
    finally:
        os.close(descriptor)


def move_to_temporary_and_back(path: Path, other: Path) -> object:
    away = os.path.join(tempfile.mkdtemp(), "away")
    shutil.move(path, away)
    shutil.move(away, other)
    return sorted(os.listdir(os.path.dirname(away)))


def open_by_class(path: Path, other: Path) -> object:
    with io.FileIO(path, "a+") as file:
        return file.write(b"by class"), file.tell(), file.name


def open_by_name_of_descriptor(path: Path, other: Path) -> object:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        name = f"/proc/self/fd/{descriptor}"
        with open(name, "w") as file:
            file.write("by name")
        return os.readlink(name), path.read_text()
    finally:
        os.close(descriptor)


def open_truncating(path: Path, other: Path) -> object:
    os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))
    return path.stat().st_size


def read_while_it_is_written(path: Path, other: Path) -> object:
    with path.open() as reader, other.open("a") as writer:
        first = reader.read(1)
        writer.write("later" * 2000)
        writer.flush()
        return first, reader.read()[-5:]


def write_in_fork(path: Path, other: Path) -> object:
    child = os.fork()
    if child == 0:
        try:
            path.write_text("by a child")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return path.read_text()


def slashed(function: Callable[[str], object]) -> Callable[[Path, Path], object]:
    return lambda path, other: function(f"{path}/")


STEPS: dict[str, Callable[[Path, Path], object]] = {
    "read": read,
    "write": write,
    "append": append,
    "update": update,
    "make_exclusively": make_exclusively,
    "open_by_descriptor": open_by_descriptor,
    "look": look,
    "scan": scan,
    "walk": walk,
    "enter": enter,
    "replace_by_temporary": replace_by_temporary,
    "within": within,
    "chmod_by_descriptor": by_descriptor(lambda descriptor: os.fchmod(descriptor, 0o604)),
    "chmod_of_descriptor": by_descriptor(lambda descriptor: os.chmod(descriptor, 0o640)),
    "utime_of_descriptor": by_descriptor(lambda descriptor: os.utime(descriptor, (3, 4))),
    "save_atomically": lambda path, other: save_atomically(path.parent, path),
    "save_by_temporary_folder": lambda path, other: save_atomically(None, path),
    "move_to_temporary_and_back": move_to_temporary_and_back,
    "open_by_class": open_by_class,
    "open_by_name_of_descriptor": open_by_name_of_descriptor,
    "open_truncating": open_truncating,
    "read_while_it_is_written": read_while_it_is_written,
    "write_in_fork": write_in_fork,
    "stat_with_slash": slashed(lambda path: oct(os.stat(path).st_mode)),
    "lstat_with_slash": slashed(lambda path: oct(os.lstat(path).st_mode)),
    "list_with_slash": slashed(lambda path: sorted(os.listdir(path))),
    "read_link_with_slash": slashed(os.readlink),
    "unlink_with_slash": slashed(os.unlink),
    "rmdir_with_slash": slashed(os.rmdir),
    "mkdir_with_slash": slashed(os.mkdir),
    "write_with_slash": slashed(lambda path: open(path, "w").close()),
    "rename_with_slash": lambda path, other: os.rename(f"{path}/", other),
    "rename_to_slash": lambda path, other: os.rename(path, f"{other}/"),
    "mkdir": lambda path, other: path.mkdir(),
    "makedirs": lambda path, other: path.mkdir(parents=True, exist_ok=True),
    "unlink": lambda path, other: path.unlink(),
    "rmdir": lambda path, other: path.rmdir(),
    "rename": lambda path, other: path.rename(other),
    "symlink": lambda path, other: path.symlink_to(other.name),
    "symlink_to_path": lambda path, other: path.symlink_to(other.absolute()),
    "hardlink": lambda path, other: os.link(path, other),
    "readlink": lambda path, other: path.readlink(),
    "resolve": lambda path, other: path.resolve(),
    "chmod": lambda path, other: path.chmod(0o640),
    "utime": lambda path, other: os.utime(path, (1, 2)),
    "truncate": lambda path, other: os.truncate(path, 3),
    "touch": lambda path, other: path.touch(),
    "exists": lambda path, other: (path.exists(), path.is_dir(), path.is_file(), os.path.lexists(path)),
    "access": lambda path, other: os.access(path, os.R_OK),
    "glob": lambda path, other: sorted(path.glob("*")),
    "rmtree": lambda path, other: shutil.rmtree(path),
    "copy": lambda path, other: shutil.copy(path, other),
    "copytree": lambda path, other: shutil.copytree(path, other, symlinks=True),
    "move": lambda path, other: shutil.move(path, other),
}


# Operations whose errors name no file, or a temporary file.
NAMELESS = frozenset({"move_to_temporary_and_back", "save_atomically", "save_by_temporary_folder", "utime"})


def run(numbers: random.Random) -> None:
    for _ in range(numbers.randint(1, 12)):
        name = numbers.choice(list(STEPS))
        path, other = (Path(numbers.choice(NAMES)) for _ in range(2))
        try:
            result = STEPS[name](path, other)
        except OSError as error:
            names = () if name in NAMELESS else (error.filename, error.filename2)
            result = type(error).__name__, error.args[0], names
        except (UnicodeError, RuntimeError) as error:
            result = type(error).__name__
        print(name, path, other, result)


def contents() -> list[tuple[str, str, str]]:
    found = []
    for folder, folders, names in os.walk("."):
        for path in (Path(folder) / name for name in [*folders, *names]):
            content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
            found.append((str(path), oct(path.lstat().st_mode), content))
    return sorted(found)


if __name__ == "__main__":
    place, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(count):
        os.chdir(place / str(number))
        print("program", number)
        run(random.Random(f"{seed} {number}"))
        print(contents())
