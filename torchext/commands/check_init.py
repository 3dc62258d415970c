"""The work of the command `torchext check-init`: compare the initial weights on a mesh with those of one process."""

from __future__ import annotations

import argparse
import sys

from ..deferred_init import check_init
from ..errors import RankFailedError
from ..internals import terminal
from .flags import DIFFERENT, FAILED, UNKNOWN, MisuseError, ProgramError, find_function, report_error

__all__ = ["run"]


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compare the initial weights, print the report, and return the exit code."""
    try:
        found = check_init(
            find_function(options.function),
            options.mesh,
            engine=options.engine,
            tp_plan=options.tp_plan and find_function(options.tp_plan),
            initialize=options.initialize and find_function(options.initialize),
            deferred=options.deferred,
            ranks=options.rank,
        )
    except (MisuseError, ProgramError) as error:
        return report_error(parser, error)
    except ValueError as error:
        return report_error(parser, MisuseError(error))
    except RankFailedError as error:
        print(f"{str(error).rstrip()}\n{parser.prog}: {options.function} failed", file=sys.stderr)
        return FAILED
    code = DIFFERENT if found.is_different else 0 if found.is_same else UNKNOWN
    if not options.quiet and options.json != terminal.STDOUT:
        print(found)
    terminal.write_json(options.json, "check-init", {"exit_code": code, **found.to_dict()})
    return code
