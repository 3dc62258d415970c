"""`python -m torchext`: the command `torchext`."""

from __future__ import annotations

import sys

from .commands import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
