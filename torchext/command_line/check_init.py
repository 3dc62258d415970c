"""The command `torchext check-init`: compare the initial weights on a mesh with those of one process."""

from __future__ import annotations

import argparse
import sys

from .. import terminal
from ..deferred_init import check_init
from ..deferred_init.engines import ENGINES
from ..deferred_init.initial_weights import parse_mesh
from ..errors import RankFailedError
from ..user_functions import FAILED, MISUSED, MisuseError, ProgramError, find_function, report_error

__all__ = ["configure"]

DIFFERENT, UNKNOWN = 3, 4

DESCRIPTION = """\
Compare the initial weights of each rank of a job with those of one process, bit for bit. Each rank runs alone on the
CPU, without GPUs and without the other ranks. The report names the tensors that differ, the ranks and the source line.

examples:
  torchext check-init my_models.llama:build --mesh fsdp=8 --mesh replicate=2,fsdp=4,tp=2
  torchext check-init train:build_on --mesh dp=2,tp=4 --engine none
"""
EXIT_CODES = f"""\
exit codes:
  0    all initial weights are the same as in one process
  {FAILED}    the program failed in a rank
  {MISUSED}    an argument is wrong
  {DIFFERENT}    a tensor differs
  {UNKNOWN}    no tensor differs, but some are not comparable, because they depend on values of ranks that do not run
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of this command."""
    parser.description, parser.epilog = DESCRIPTION, EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=lambda options: _run(parser, options))
    add = parser.add_argument
    add("function", metavar="MODULE:FUNCTION", help="a function that returns the model; it may take the device mesh")
    add(
        "--mesh",
        type=_mesh,
        action="append",
        required=True,
        metavar="NAME=SIZE,...",
        help="the sizes of the dimensions of a mesh, such as fsdp=8,tp=2; can be repeated",
    )
    add(
        "--engine",
        choices=ENGINES,
        default="fsdp2",
        help="how to shard the model, with tensor parallelism on a dimension named tp; none: the function does it "
        "(default: fsdp2)",
    )
    add(
        "--plan",
        metavar="MODULE:FUNCTION",
        help="a function that returns the plan of tensor parallelism for the model (default: model.tp_plan)",
    )
    add(
        "--initialize",
        metavar="MODULE:FUNCTION",
        help="a function that initializes the sharded model (default for models on meta: init_weights(), or "
        "reset_parameters() of each submodule)",
    )
    add("--deferred", action="store_true", help="call the function under deferred_init()")
    add("--rank", type=_ranks, metavar="N,N-N", help="the ranks to check (default: all, or a part of more than 64)")
    terminal.add_shared_flags(parser, quiet="print no report, for example with --json")


def _mesh(text: str) -> dict[str, int]:
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ranks(text: str) -> list[int]:
    try:
        return terminal.parse_ranks(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        found = check_init(
            find_function(options.function),
            options.mesh,
            engine=options.engine,
            plan=options.plan and find_function(options.plan),
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
