"""Write docs/reference/cuda_names.md, the functions of CUDA builds on fake devices; `--check` only compares."""

from __future__ import annotations

from pathlib import Path

from generated_page import write_or_check

from torchext.fake.cuda.builds import ADDED, REFUSED, REPLACED

PAGE = Path(__file__).with_suffix(".md")


def page() -> str:
    """Return the text of the page."""
    refused = {name for names in REFUSED.values() for name in names}
    lines = [
        "# Functions of CUDA builds",
        "",
        "A build of PyTorch for CPUs lacks the functions of `torch._C` that `torch.cuda` and other libraries call.",
        "While fake CUDA devices exist, torchext adds them, or raises an error that names another way.",
        "`python docs/reference/cuda_names.py` generates this page.",
    ]
    for what, names in (
        ("Replaced for fake devices, also in builds for CUDA.", REPLACED.keys()),
        ("Settings and constants, added to builds for CPUs.", ADDED.keys() - refused),
        *((f"Refused in builds for CPUs: *{message}*", names) for message, names in sorted(REFUSED.items())),
    ):
        lines += ["", f"**{what}** " + ", ".join(f"`{name}`" for name in sorted(names))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_or_check(PAGE, page())
