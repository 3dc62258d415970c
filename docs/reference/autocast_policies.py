"""Write docs/reference/autocast_policies.md, the autocast policy of each operator; `--check` only compares."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from generated_page import write_or_check

from torchext import amp

PAGE = Path(__file__).with_suffix(".md")
ORDER = ("lower_precision", "float32", "promote", "banned")


def release() -> str:
    """Return PyTorch's version without the patch number: policies differ between releases."""
    return ".".join(torch.__version__.split(".")[:2])


def operators(device_type: str) -> list[str]:
    """Return PyTorch's operators with an autocast policy."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}")
    return sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def page() -> str:
    """Return the text of the page."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for device_type in ("cpu", "cuda"):
        for op in operators(device_type):
            overload = op if "." in op else f"{op}.default"
            found[op][device_type] = amp.policy(f"aten::{overload}", device_type)
    lines = [
        "# How autocast treats PyTorch's operators",
        "",
        f"For PyTorch {release()}. `docs/reference/autocast_policies.py` generates this table with `amp.policy()`.",
        "Operators that are not listed fall through: they run in the dtypes of their arguments, or as the operators",
        "that they call.",
        "",
        "| operator | cpu | cuda |",
        "| --- | --- | --- |",
    ]
    for op in sorted(found, key=lambda op: (ORDER.index(next(iter(found[op].values()))), op)):
        cells = " | ".join(found[op].get(device_type, "") for device_type in ("cpu", "cuda"))
        lines.append(f"| `{op}` | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write or check the page."""
    if "--check" in sys.argv and not re.search(
        rf"^For PyTorch {re.escape(release())}\.", PAGE.read_text(), re.MULTILINE
    ):
        print(f"{PAGE.name} was generated for another release of PyTorch than {release()}: nothing to compare")
    else:
        write_or_check(PAGE, page())


if __name__ == "__main__":
    main()
