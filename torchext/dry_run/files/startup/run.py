"""Run code as Python does, with files in the overlay: `python run.py SCRIPT ARGS`, or with `-m` or `-c`."""

from __future__ import annotations

import importlib
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _main() -> None:
    first, *rest = sys.argv[1:]
    has_path = bool(sys.path) and sys.path[0] == HERE  # false with the option -I
    folder = os.getcwd() if first in ("-c", "-m") else os.path.dirname(os.path.realpath(first))
    if has_path:
        sys.path[0] = folder
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if "torchext_dry_run_files" not in sys.modules:
        sys.dont_write_bytecode = True  # files are not kept apart yet
        sys.path.insert(0, HERE)
        importlib.import_module("sitecustomize")

        if sys.path[0] == HERE:
            del sys.path[0]
    _main()
