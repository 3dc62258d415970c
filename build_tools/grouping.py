"""Groups source files that are compiled together."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from .settings import ROOT

# Size of a group of C++ files. Larger groups leave processors idle at the end, and slow down builds after a change of
# one file. Each group costs 5 s of processor time for templates in PyTorch's headers.
BYTES_IN_A_GROUP = 120_000


def grouped(sources: list[str], folder: Path) -> list[str]:
    """Return files in `folder` that include the sources, each of them several sources of one component.

    A small file spends more than half of its time on templates in PyTorch's headers, which GCC instantiates again for
    each file, even with a precompiled header.
    """
    by_component: dict[str, list[str]] = {}
    made = []
    for source in sources:
        if is_for_some_processors(source):
            made.append(source)
        else:
            by_component.setdefault(component(source), []).append(source)
    folder.mkdir(parents=True, exist_ok=True)
    for name, files in by_component.items():
        for number, group in enumerate(in_equal_parts(files)):
            path = folder / f"{name}_{number}.cpp"
            text = "".join(f'#include "{ROOT.absolute() / source}"\n' for source in group)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            made.append(str(path))
    return made


def component(source: str) -> str:
    """Return the name of a folder of csrc, without the folders in it."""
    return "_".join(Path(source).parts[:-1][:3])


def is_for_some_processors(source: str) -> bool:
    """Return true for a file that enables other CPU instructions from some line on.

    Code that it includes there must not be compiled for other files. Headers are included only once per group.
    """
    return "#pragma GCC target" in (ROOT / source).read_text()


def in_equal_parts(files: list[str]) -> list[list[str]]:
    """Split a list of files into as few parts of about equal size as possible."""
    ends = list(accumulate((ROOT / name).stat().st_size for name in files))
    count = -(-ends[-1] // BYTES_IN_A_GROUP)
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, end in zip(files, ends, strict=True):
        parts[(end - 1) * count // ends[-1]].append(name)
    return [part for part in parts if part]
