"""`python -m torchext.dry_run`."""

from __future__ import annotations

import sys

from ..commands.dry_run import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
