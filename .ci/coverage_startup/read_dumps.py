"""Write the counts that ranks of dry runs have dumped as files for `coverage combine`: `read_dumps.py DUMPS FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from coverage import CoverageData


def main() -> None:
    """Write a file `FILE.NAME` for each file in the folder, which is removed."""
    _, folder, file = sys.argv
    for dump in sorted(Path(folder).iterdir()):
        counts = CoverageData(file, suffix=dump.name)
        counts.loads(dump.read_bytes())
        counts.close()
        dump.unlink()


if __name__ == "__main__":
    main()
