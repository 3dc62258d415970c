"""Write docs/reference/operator_traits.md, the tables of operator traits; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from torchext import _C

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """The text of the page."""
    lines = [
        "# What torchext knows of operators",
        "",
        "Most of what torchext does with an operator follows from its schema, its tags and its kernels. What does",
        "not follow is in tables of operators, one for each concern (`csrc/support/operator_table.h`). An operator",
        "that is in no table, such as a custom one of any name, has the safe default. Names are those of `aten`. A",
        "name stands for all overloads of an operator, or for the one that it ends in. `python",
        "docs/reference/operator_traits.py` prints this page from the tables.",
    ]
    for what, names in sorted(_C.operator_tables()):
        operators = ", ".join(f"`{name.removeprefix('aten::')}`" for name in sorted(names))
        lines += ["", f"**Operators that {what}.** {operators}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes or checks."""
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is not up to date: run `python docs/reference/operator_traits.py`")


if __name__ == "__main__":
    main()
