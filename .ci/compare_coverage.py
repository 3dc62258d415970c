"""Print the lines that the everyday tests and all tests cover, side by side, as the table in docs/reference/proof.md.

compare_coverage.py FOLDER     the folder of .ci/coverage
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TIERS = ("everyday", "all")
LEAST = 0.97  # of the lines that all tests cover, the everyday tests cover at least this part

Lines = set[tuple[str, int]]


def covered_lines(folder: Path, tier: str) -> tuple[Lines, Lines]:
    """Return all lines of code, and those that the tests of a tier cover."""
    lines: Lines = set()
    covered: Lines = set()
    python: dict[str, Any] = json.loads((folder / f"{tier}.python.json").read_text())
    for path, file in python["files"].items():
        covered |= {(path, line) for line in file["executed_lines"]}
        lines |= {(path, line) for line in (*file["executed_lines"], *file["missing_lines"])}
    cpp: dict[str, Any] = json.loads((folder / f"{tier}.cpp.json").read_text())
    for file in cpp["files"]:
        for line in file["lines"]:
            place = file["file"], line["line_number"]
            lines.add(place)
            if line["count"] > 0:
                covered.add(place)
    return lines, covered


def main() -> None:
    """Print the table. Exit with an error if the everyday tests cover too little."""
    folder = Path(sys.argv[1])
    lines, everything = covered_lines(folder, "all")
    _, everyday = covered_lines(folder, "everyday")
    everyday &= everything
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for column, places in enumerate((lines, everyday, everything)):
        for path, _ in places:
            for room in ("/".join(path.split("/")[:2]) if path.count("/") > 1 else path.split("/")[0], "**all**"):
                rooms[room][column] += 1
    print("| component | lines | `make test` | `make ci` | part |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for room, (total, daily, both) in sorted(rooms.items()):
        print(f"| {room} | {total:,} | {daily:,} | {both:,} | {daily / max(both, 1):.1%} |")
    if len(everyday) < LEAST * len(everything):
        sys.exit(f"the everyday tests cover less than {LEAST:.0%} of the lines that all tests cover")


if __name__ == "__main__":
    main()
