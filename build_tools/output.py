"""The output while files are compiled."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def shortened(line: str) -> str:
    """Shorten the command of a compiler or a linker to the name of its file. Paths may have spaces."""
    line = re.sub(r"^(\[\d+/\d+\]) .* -c (?:.*/)?([^/]+?)[\"']? -o .*", r"\1 \2", line)
    line = re.sub(r"^\S+ .* -c (?:.*/)?([^/]+?)[\"']? -o .*", r"compiling \1", line)
    return re.sub(r"^\S+ (?:.* )?-shared .*? -o (.+?\.so)(?: .*)?$", r"linking \1", line)


@contextmanager
def shortened_lines() -> Iterator[None]:
    """Shorten the commands of compilers and linkers in the output to the names of their files."""
    sys.stdout.flush()
    lines, end = os.pipe()
    real = os.dup(1)
    os.dup2(end, 1)
    os.close(end)

    def pass_on() -> None:
        with open(lines, errors="replace") as source, open(real, "w", buffering=1, closefd=False) as target:  # noqa: PTH123
            for line in source:
                target.write(shortened(line))

    reader = threading.Thread(target=pass_on)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)  # closes the last end of the pipe, which ends the thread
        reader.join()
        os.close(real)
