"""Reverts of old commits in today's sources.

Code moves between files, and comments are reworded, so few old commits revert as patches. Therefore, blocks are
reverted. A block is a run of changed lines. Its new lines are searched for in all files, regardless of comments and
spaces, and replaced by its old lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".cpp", ".h", ".py", ".pyi")

# The numbers of lines of code before and after a block that must match. The first pair that matches a place is used.
CONTEXTS = ((2, 2), (2, 1), (1, 2), (1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))
LEAST_CHARACTERS = 30  # of the lines that must match: `} else {` identifies no place


class Block(NamedTuple):
    """A run of changed lines of a file, and the lines around it after the change."""

    path: str
    before: list[str]
    old: list[str]
    new: list[str]
    after: list[str]


class Mutant(NamedTuple):
    """The text of the changed files, and the share of the changed lines of code that is reverted."""

    files: dict[str, str]
    share: float


def normalized(line: str) -> str:
    """Return a line without spaces and comments."""
    is_comment = line.lstrip().startswith(("//", "# "))
    return "" if is_comment else re.sub(r"\s(//|# ).*|\s", "", line)


def code(lines: Sequence[str]) -> list[str]:
    """Return the normalized lines of code."""
    return [text for text in map(normalized, lines) if text]


def blocks(diff: str) -> Iterator[Block]:
    """Yield the blocks of a diff that change code."""
    for part in re.split(r"^diff --git ", diff, flags=re.M)[1:]:
        header, *hunks = re.split(r"^@@ .*\n", part, flags=re.M)
        path = header.partition("\n")[0].rpartition(" b/")[2]
        for hunk in hunks if path.endswith(SUFFIXES) else ():
            lines = [line for line in hunk.split("\n") if line[:1] in (" ", "-", "+")]
            for run in re.finditer("[-+]+", "".join(line[:1] or " " for line in lines)):
                changed = lines[run.start() : run.end()]
                old, new = ([line[1:] for line in changed if line[0] == sign] for sign in "-+")
                before, after = lines[: run.start()], lines[run.end() :]
                around = [[line[1:] for line in side if line[:1] != "-"] for side in (before, after)]
                if code(old) != code(new):
                    yield Block(path, around[0], old, new, around[1])


class Sources:
    """The files in csrc and torchext, indexed by their lines of code."""

    def __init__(self, root: Path) -> None:
        paths = [path for folder in ("csrc", "torchext") for path in sorted(root.glob(f"{folder}/**/*"))]
        texts = {str(path.relative_to(root)): path.read_text() for path in paths if path.suffix in SUFFIXES}
        self.lines = {name: text.split("\n") for name, text in texts.items()}
        self._code = {name: code(lines) for name, lines in self.lines.items()}
        self._numbers = {
            name: [i for i, line in enumerate(lines) if code([line])] for name, lines in self.lines.items()
        }
        self._files_with: dict[str, set[str]] = {}
        for name, own in self._code.items():
            for text in own:
                self._files_with.setdefault(text, set()).add(name)

    def find(self, block: Block) -> tuple[str, int, int] | None:
        """Return the file and the range of the new lines of a block, or None if they are not in exactly one place."""
        new, before, after = code(block.new), code(block.before), code(block.after)
        for above, below in CONTEXTS:
            preceding, following = before[len(before) - above :], after[:below]
            if not new and not (preceding and following):  # lines were deleted between these
                continue
            places = self._places([*preceding, *new, *following])
            places = [place for place in places if place[0] == block.path] or places
            if len(places) == 1:
                name, first = places[0][0], places[0][1] + len(preceding)
                numbers = self._numbers[name]
                return name, numbers[first] if new else numbers[first - 1] + 1, numbers[first + len(new) - 1] + 1
            if places:
                break
        return None

    def _places(self, texts: Sequence[str]) -> list[tuple[str, int]]:
        if len("".join(texts)) < LEAST_CHARACTERS:
            return []
        files = set.intersection(*(self._files_with.get(text, set()) for text in texts))
        starts = ((name, i) for name in sorted(files) for i, text in enumerate(self._code[name]) if text == texts[0])
        return [(name, i) for name, i in starts if self._code[name][i : i + len(texts)] == texts]


def revert(sources: Sources, diff: str) -> Mutant:
    """Replace the new lines of a diff by its old ones, where they are found."""
    every = list(blocks(diff))
    found = {place: block for block in every if (place := sources.find(block))}
    lines = {name: list(sources.lines[name]) for name, _, _ in found}
    for name, start, end in sorted(found, reverse=True):  # from the end, so that line numbers stay valid
        lines[name][start:end] = found[name, start, end].old
    reverted, total = (sum(len(code(block.old + block.new)) for block in part) for part in (found.values(), every))
    return Mutant({name: "\n".join(text) for name, text in lines.items()}, reverted / total if total else 0.0)
