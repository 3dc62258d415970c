"""The process of one rank: `python -m torchext.dry_run.child TASK ANSWER`, started by `rank_processes.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .rank_processes import run_child

__all__: list[str] = []

if __name__ == "__main__":
    run_child(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the interrupted program may wait forever
