"""The flags of `torchext dry-run --advise`."""

from __future__ import annotations

import argparse
import shlex
from functools import partial

from .. import terminal
from ..tools.sizes import bytes_of

__all__ = ["SECONDS", "add_advice_flags", "check_advice_flags"]

SECONDS = 600.0


def add_advice_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of the command."""
    add = parser.add_argument_group("advice").add_argument
    add(
        "--advise",
        action="store_true",
        help="run the first rank of --rank again with changes that may lower its peak, such as checkpointing of some "
        "blocks, and print the cheapest combination that fits",
    )
    add(
        "--target",
        type=terminal.argument(partial(bytes_of, name="--target")),
        metavar="SIZE",
        help="with --advise, the memory to fit in, such as 60GiB",
    )
    add(
        "--try",
        action="append",
        default=[],
        dest="tries",
        metavar="ARGS",
        help='with --advise, also try the program with further arguments, such as --try="--batch-size 4"; may be '
        "repeated",
    )
    add("--advise-numerics", action="store_true", help="with --advise, also try changes of the computed values")
    add(
        "--advise-seconds",
        type=float,
        metavar="S",
        help=f"with --advise, start no further run after S seconds (default: {SECONDS:.0f})",
    )
    add("--advise-runs", type=int, metavar="N", help="with --advise, make at most N runs")


def check_advice_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if a flag needs `--advise`, or a number is not positive."""
    needing = ("target", "tries", "advise_numerics", "advise_seconds", "advise_runs")
    for name in needing:
        flag = f"--{'try' if name == 'tries' else name.replace('_', '-')}"
        value = getattr(options, name)
        if value not in (None, False, []) and not options.advise:
            parser.error(f"{flag} needs --advise")
        if name.startswith("advise_") and value is not None and value is not False and value <= 0:
            parser.error(f"{flag}: expected a positive number, got {value:g}")
    try:
        list(map(shlex.split, options.tries))
    except ValueError as error:
        parser.error(f"--try: {str(error).lower()}")
