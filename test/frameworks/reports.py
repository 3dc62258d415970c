"""Parses the text reports of `torchext dry-run` for each rank."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

__all__ = ["RankText", "ranks_in"]

RULE = re.compile(r"^-+(  -+)*$")
HEADING = re.compile(r"^rank (\d+) of (\d+): (.*)$")


@dataclass
class RankText:
    """The report of one rank.

    Attributes:
        rank: The rank.
        size: The number of ranks.
        verdict: The statement of the first line.
        tables: The rows of each table, by its title, as columns by their headings.
    """

    rank: int
    size: int
    verdict: str
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def category(self, name: str) -> str:
        """Return the bytes of a category at the peak of the GPU."""
        rows = next((rows for title, rows in self.tables.items() if title.startswith("At the peak of cuda")), [])
        return next((row["bytes"] for row in rows if row["category"] == name), "0 B")

    def given(self, operator: str, group_size: int) -> list[str]:
        """Return the bytes that the second step passes to collectives, for each group of a size."""
        return [
            row["sent"]
            for row in self.tables.get("Collectives", [])
            if row["operator"] == operator and row["ranks"] == str(group_size) and _has_second(row["phase"])
        ]

    @property
    def peak(self) -> str:
        """Return the allocated bytes at the peak."""
        return self.tables["Memory"][0]["allocated"] if self.tables.get("Memory") else ""


def _has_second(phase: str) -> bool:
    return phase == "step 2" or phase.startswith("step 1 to")


def ranks_in(text: str) -> list[RankText]:
    """Find the reports in the output of the command, after the output of the program."""
    found: list[RankText] = []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        heading = HEADING.match(line)
        if heading:
            found.append(RankText(int(heading[1]), int(heading[2]), heading[3]))
        elif found and RULE.match(line):
            spans = [slice(*one.span()) for one in re.finditer("-+", line)]
            names = [lines[i - 1][span].strip() for span in spans]
            rows = itertools.takewhile(bool, lines[i + 1 :])
            cells = ({name: row[span].strip() for name, span in zip(names, spans, strict=True)} for row in rows)
            found[-1].tables.setdefault(lines[i - 2], []).extend(cells)
    return found
