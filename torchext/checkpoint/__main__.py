"""`python -m torchext.checkpoint`."""

from __future__ import annotations

import sys

from ..commands.checkpoint_flags import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
