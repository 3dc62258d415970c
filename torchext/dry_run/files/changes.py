"""The changes that a dry run would have made, for the report and for `--keep-files`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .copying import copy_file, exists_at
from .originals import real
from .tree import Tree, join

__all__ = ["PLACEHOLDER", "Change", "changes_in", "keep_files"]

# The first bytes of files of tensors without values. They identify such a file under any name.
PLACEHOLDER = b"torchext: tensors without values, of a dry run\n"


class Change(NamedTuple):
    """A change of a file.

    Attributes:
        path: The path of the file.
        what: `written`, `overwritten` or `removed`.
        nbytes: The size of the written file.
    """

    path: str
    what: str
    nbytes: int


def changes_in(tree: Tree) -> list[Change]:
    """Return the files that the program has written or removed, sorted by path."""
    changes = []
    for path in _written_files(tree):
        if not exists_at(path):
            changes.append(Change(path, "written", real.lstat(tree.own(path)).st_size))
        elif not _is_alike(real.lstat(path), real.lstat(tree.own(path))):
            changes.append(Change(path, "overwritten", real.lstat(tree.own(path)).st_size))
    for path in tree.gone_paths():
        if exists_at(path) and not exists_at(tree.own(path)):
            changes.append(Change(path, "removed", 0))
    return sorted(changes)


def keep_files(tree: Tree, folder: str) -> None:
    """Copy the written files to `folder`, except checkpoints without values."""
    os.makedirs(folder, exist_ok=True)
    for place, folders, names in os.walk(tree.written):
        target = folder + tree.program_path(place).rstrip("/")
        os.makedirs(target, exist_ok=True)
        for name in names + folders:
            source, kept = join(place, name), join(target, name)
            mode = os.lstat(source).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(source), kept)
            elif stat.S_ISREG(mode) and not _is_placeholder(source):
                copy_file(source, kept, content=True)


def _written_files(tree: Tree) -> Iterator[str]:
    for folder, _, names in os.walk(tree.written):
        for name in names:
            yield join(tree.program_path(folder), name)


def _is_alike(one: os.stat_result, other: os.stat_result) -> bool:
    """Return true if a copy still has the metadata of its original, such as that of a database that was only read."""
    return all(
        getattr(one, name) == getattr(other, name) for name in ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns")
    )


def _is_placeholder(place: str) -> bool:
    with open(place, "rb") as file:
        return file.read(len(PLACEHOLDER)) == PLACEHOLDER
