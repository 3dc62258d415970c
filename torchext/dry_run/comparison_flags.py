"""The flags of commands that compare reports, and the output of the comparison."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from .. import terminal
from .comparing import Comparison, Limit
from .report import load_report

__all__ = ["GREW", "add_comparison_flags", "check_comparison_flags", "print_comparison"]

GREW = 5
"""The exit code if a peak grew by more than `--fail-above`."""


def add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of a command."""
    add = parser.add_argument_group("comparison").add_argument
    add(
        "--compare",
        type=terminal.argument(load_report),
        metavar="BASE.json",
        help="print the differences from an earlier report, which --json wrote: peaks, categories, modules, lines, "
        "bytes of collectives, and operations",
    )
    add(
        "--fail-above",
        type=terminal.argument(Limit.parse),
        metavar="LIMIT",
        help="with --compare, exit with 5 if a peak of a GPU grew by more than LIMIT, such as 1%% or 100MiB; for a "
        "rank without GPUs, a peak of the host",
    )
    add(
        "--markdown",
        type=terminal.output_file,
        metavar="FILE",
        help="with --compare, also write the differences as Markdown for a comment on a pull request; - writes them to "
        "stdout",
    )


def check_comparison_flags(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Exit with an error if a flag needs `--compare`, two outputs go to stdout, or no rank can be compared."""
    for flag in ("fail_above", "markdown"):
        if options.compare is None and getattr(options, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} needs --compare BASE.json")
    if options.json == options.markdown == terminal.STDOUT:
        parser.error("--json and --markdown cannot both write to stdout")
    if options.compare is not None and not set(options.compare.ranks) & set(ranks):
        parser.error(
            f"--compare: the base has none of these ranks; it has {', '.join(map(str, options.compare.ranks))}"
        )


def print_comparison(options: argparse.Namespace, comparison: Comparison, out: TextIO) -> int:
    """Print the differences and write them as Markdown, as the flags request.

    Returns:
        `GREW` if a peak grew by more than the limit, else 0.
    """
    has_grown = options.fail_above is not None and comparison.exceeds(options.fail_above)
    result = f"A peak grew by more than {options.fail_above}." if has_grown else ""
    print(comparison, end="\n\n", file=out)
    if result:
        print(terminal.colored(result, "red", out), file=out)
    out.flush()
    if options.markdown is not None:
        text = comparison.to_markdown() + (f"\n**{result}**\n" if result else "")
        if options.markdown == terminal.STDOUT:
            sys.stdout.write(text)
        else:
            options.markdown.write_text(text, encoding="utf-8")
    return GREW if has_grown else 0
