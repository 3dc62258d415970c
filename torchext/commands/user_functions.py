"""Functions of the user that arguments of commands name, `MODULE:FUNCTION`, and the errors about them."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..internals import terminal

__all__ = ["FAILED", "MISUSED", "MisuseError", "ProgramError", "find_function", "report_error"]

FAILED, MISUSED = 1, 2  # exit codes

# The beginnings of the names of files whose frames call the function of the user: this package and the import system.
CALLERS = (f"{Path(__file__).parents[1]}{os.sep}", "<frozen importlib", str(Path(importlib.__file__).parent))


class MisuseError(Exception):
    """An error in the arguments."""


class ProgramError(Exception):
    """An error in the code of the user; its cause is the error."""


def find_function(name: str) -> Callable[..., Any]:
    """Return the function or class `MODULE:FUNCTION`.

    Raises:
        MisuseError: The name is wrong.
        ProgramError: Importing the module failed.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise MisuseError(f"expected MODULE:FUNCTION, as in my_models.llama:build, got {name!r}")
    if module_name.endswith(".py"):
        module = ".".join(Path(module_name).with_suffix("").parts)
        raise MisuseError(f"{name!r}: expected the name of a module, got a file. Did you mean {module}:{path}?")
    if not {"", str(Path.cwd())} & set(sys.path):  # as for `python -m`; a script has its own folder there instead
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        near = terminal.suggestion(str(error.name), (module.name for module in pkgutil.iter_modules()))
        raise MisuseError(f"{name!r}: the module {error.name!r} does not exist{near}") from error
    except SystemExit as error:
        raise ProgramError(
            f"importing {module_name} called sys.exit(): put the code that runs the program under "
            '`if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ProgramError(f"importing {module_name} failed") from error
    for part in path.split("."):
        if not hasattr(found, part):
            owner = getattr(found, "__name__", module_name)
            near = terminal.suggestion(part, dir(found))
            raise MisuseError(f"{name!r}: {owner!r} has no attribute {part!r}{near}")
        found = getattr(found, part)
    if not callable(found):
        raise MisuseError(f"{name!r}: expected a function or a class, got an object of type {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def report_error(parser: argparse.ArgumentParser, error: MisuseError | ProgramError) -> int:
    """Print an error of the command of `parser` to stderr, and return the exit code of the command."""
    if isinstance(error, MisuseError):
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return MISUSED
    print(_text_of(error, parser.prog), file=sys.stderr)
    return FAILED


def _text_of(error: ProgramError, command: str) -> str:
    """Return the message of `error`, after the traceback of its cause from the first frame of the user's code."""
    cause = error.__cause__ or error
    frame = cause.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(CALLERS):
        frame = frame.tb_next
    return f"{''.join(traceback.format_exception(type(cause), cause, frame))}{command}: {error}"
