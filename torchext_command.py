"""The entry point of the command `torchext`.

Not part of the package, which imports PyTorch at once, unless a process has imported this module before.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run the command with the arguments of the process, and return its exit code."""
    from torchext.commands import main

    return main()
