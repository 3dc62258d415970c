"""Which files are compiled together."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from .settings import ROOT

# Of the C++. Larger groups leave processors idle at the end, and let those wait who change one file.
BYTES_IN_A_GROUP = 60_000


def grouped(sources: list[str], folder: Path) -> list[str]:
    """Returns files in `folder` that include the sources, some of a room each.

    Half of the time that a small file takes goes into templates of PyTorch's headers, which GCC instantiates again for
    each file, precompiled or not.
    """
    by_room: dict[Path, list[str]] = {}
    made = []
    for source in sources:
        if is_for_some_processors(source):
            made.append(source)
        else:
            by_room.setdefault(Path(source).parent, []).append(source)
    folder.mkdir(parents=True, exist_ok=True)
    for room, files in by_room.items():
        for number, group in enumerate(in_equal_parts(files)):
            path = folder / f"{'_'.join(room.parts)}_{number}.cpp"
            text = "".join(f'#include "{ROOT.absolute() / name}"\n' for name in group)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            made.append(str(path))
    return made


def is_for_some_processors(source: str) -> bool:
    """Returns true for a file that has the compiler use other instructions from some line on.

    What it includes there must not be compiled for others. Such headers are included once.
    """
    return "#pragma GCC target" in (ROOT / source).read_text()


def in_equal_parts(files: list[str]) -> list[list[str]]:
    """Cuts a list of files into as few parts as there may be, about equally long."""
    ends = list(accumulate((ROOT / name).stat().st_size for name in files))
    count = -(-ends[-1] // BYTES_IN_A_GROUP)
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, end in zip(files, ends, strict=True):
        parts[(end - 1) * count // ends[-1]].append(name)
    return [part for part in parts if part]
