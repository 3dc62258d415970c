"""The command `torchext report`: print a dry run's JSON report, write it as HTML, and compare it with another one."""

from __future__ import annotations

import argparse
import sys

from ..internals import terminal
from ..reports.comparison import compare
from ..reports.text import load_report
from .flags import GREW, add_comparison_flags, print_comparison, require_comparable

__all__ = ["configure"]

DESCRIPTION = """\
Print the report that `torchext dry-run --json` wrote, write it as HTML, or compare it with an earlier one.

examples:
  torchext report head.json --html report.html
  torchext report head.json --compare base.json --fail-above 1% --markdown comment.markdown
"""

EXIT_CODES = f"""\
exit codes:
  0    the report is printed
  2    an argument is wrong, or a file is not a report
  {GREW}    with --compare, a peak grew by more than --fail-above
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of this command."""
    parser.description, parser.epilog = DESCRIPTION.replace("%", "%%"), EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=lambda options: _run(parser, options))
    parser.add_argument("report", type=terminal.argument(load_report), metavar="FILE.json", help="the report")
    parser.add_argument("--html", type=terminal.output_file, metavar="FILE.html", help="also write an HTML report")
    add_comparison_flags(parser)
    terminal.add_shared_flags(parser, quiet="print no report, for example with --html")


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    require_comparable(parser, options, options.report.ranks)
    out = sys.stderr if terminal.STDOUT in (options.json, options.markdown) else sys.stdout
    if not options.quiet and options.compare is None:
        print(options.report, file=out)
    if options.html is not None:
        options.html.write_text(options.report.to_html(), encoding="utf-8")
    if options.compare is None:
        terminal.write_json(options.json, "report", options.report.to_dict())
        return 0
    comparison = compare(options.compare, options.report)
    code = print_comparison(options, comparison, out)
    terminal.write_json(options.json, "report", {"exit_code": code, "comparison": comparison.to_dict()})
    return code
