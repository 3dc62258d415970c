"""Random programs that change files: `python file_programs.py FOLDER SEED COUNT`, run with and without a dry run.

Each program works in a folder of its own, `FOLDER/NUMBER`, which is there before. It prints what each step has returned
or raised, and then all that it finds in its folder.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
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


def run(numbers: random.Random) -> None:
    for _ in range(numbers.randint(1, 12)):
        name = numbers.choice(list(STEPS))
        path, other = (Path(numbers.choice(NAMES)) for _ in range(2))
        try:
            result = STEPS[name](path, other)
        except OSError as error:
            names = (error.filename, error.filename2) if name != "utime" else ()  # which names none
            result = type(error).__name__, error.args[0], names
        except (UnicodeError, RuntimeError) as error:
            result = type(error).__name__
        print(name, path, other, result)


def contents() -> list[tuple[str, str]]:
    found = []
    for folder, folders, names in os.walk("."):
        for path in (Path(folder) / name for name in [*folders, *names]):
            found.append(
                (str(path), os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "")
            )
    return sorted(found)


if __name__ == "__main__":
    place, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(count):
        os.chdir(place / str(number))
        print("program", number)
        run(random.Random(f"{seed} {number}"))
        print(contents())
