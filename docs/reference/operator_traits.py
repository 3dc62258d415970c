"""Write docs/reference/operator_traits.md, the tables of operator traits; `--check` only compares."""

from __future__ import annotations

from pathlib import Path

from generated_page import write_or_check

import torchext.fake.cuda.kernels  # noqa: F401  # has one of the tables
from torchext import _C

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """Return the text of the page."""
    lines = [
        "# Operator traits",
        "",
        "The behavior of most operators in torchext follows from their schemas, tags and kernels. The rest is in",
        "tables of operators, one for each property (`csrc/libraries/support/operator_table.h`). Operators that are in",
        "no table, such as custom ones, get the safe default. Names are those of `aten`. A name stands for all",
        "overloads of an operator, or for one overload if it ends in its name.",
        "`python docs/reference/operator_traits.py` generates this page.",
    ]
    for what, names in sorted(_C.operator_tables()):
        operators = ", ".join(f"`{name.removeprefix('aten::')}`" for name in sorted(names))
        lines += ["", f"**Operators that {what}.** {operators}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_or_check(PAGE, page())
