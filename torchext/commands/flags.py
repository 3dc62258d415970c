"""Flags of commands, and the functions of the user that arguments name.

The work of most of these commands imports PyTorch. `torchext --help` and completion need only the flags.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from ..descriptions import ENGINES, parse_mesh
from ..internals import terminal
from ..internals.text import bytes_of
from ..reports.comparison import Comparison, Limit
from ..reports.text import load_report

__all__ = [
    "DIFFERENT",
    "FAILED",
    "GREW",
    "MISUSED",
    "SECONDS",
    "UNKNOWN",
    "MisuseError",
    "ProgramError",
    "add_advice_flags",
    "add_comparison_flags",
    "configure_check_init",
    "configure_checkpoint",
    "configure_env",
    "configure_route",
    "find_function",
    "print_comparison",
    "report_error",
    "require_comparable",
]


# ---- Functions of the user that arguments name, `MODULE:FUNCTION`, and the errors about them


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


# ---- The flags of the commands whose work imports PyTorch


def _run_by(parser: argparse.ArgumentParser, module: str) -> None:
    """Make `run()` of a module of this package the work of the command of `parser`."""
    parser.set_defaults(run=lambda options: import_module(f".{module}", __package__).run(parser, options))


# ---- torchext checkpoint

CHECKPOINT = """\
Write the checkpoint that a model has after its construction, in bounded memory.

examples:
  torchext checkpoint my_models.llama:build --args 80 width=8192 --out initial --dtype bfloat16
  torchext checkpoint --hf folder_with_config --plan
"""
CHECKPOINT_CODES = """\
exit codes:
  0    the checkpoint is complete, or can be written (--plan)
  1    constructing the model, computing or writing the checkpoint failed
  2    an argument is wrong
  3    the disk has too little space, or --max-memory is too small
  130  interrupted; --resume continues
"""


def configure_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of `torchext checkpoint`."""
    parser.description, parser.epilog = CHECKPOINT, CHECKPOINT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _run_by(parser, "checkpoint")
    add = parser.add_argument
    add("function", nargs="?", metavar="MODULE:FUNCTION", help="a function that returns the model, or its class")
    add("--hf", metavar="FOLDER", help="construct a model of transformers from the config.json in FOLDER")
    add("--args", nargs="*", default=[], metavar="VALUE", help="arguments of the function: values, or NAME=VALUE")
    add("--out", type=Path, help="a folder, or a file that ends in .safetensors; optional with --plan")
    add("--seed", type=int, default=0, help="the seed for torch.manual_seed() before the construction (default: 0)")
    add("--dtype", metavar="DTYPE", help="convert floating-point tensors to this dtype, such as bfloat16")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="the largest size of a file (default: 5GB)")
    add("--max-memory", default="1GiB", metavar="SIZE", help="the memory for computing tensors (default: 1GiB)")
    add(
        "--workers",
        type=terminal.at_least_1,
        metavar="N",
        help="the number of threads that compute (default: all processors)",
    )
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--plan", action="store_true", help="print the files and the predicted memory and time, and write nothing")
    terminal.add_shared_flags(parser, quiet="show no progress bar")


# ---- torchext env


def configure_env(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of `torchext env`."""
    parser.description = (
        "Print the versions, the build, the owners of the dispatch keys, the installed patches, and the self-tests. "
        "Add the output to a bug report."
    )
    _run_by(parser, "env")
    terminal.add_shared_flags(parser, quiet="print no report, for example with --json")


# ---- torchext route

ROUTE = """\
Print the dispatch keys that a call of an operator visits, the kernel at each, and its effect. Runs no operator.

examples:
  torchext route aten::add.Tensor
  torchext route aten::add.Tensor "torch.ones(2, requires_grad=True)" 1
  torchext route aten::linear --shape 2,4 --device cuda --fake
  torchext route aten::sum "torch.ones(2, 3)" dim=[0] keepdim=True

Arguments are Python expressions with `torch` in scope, or NAME=EXPRESSION. They are evaluated: do not pass text from a
source that you do not trust. Missing tensors are filled in with torch.ones(SHAPE).
"""


def configure_route(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of `torchext route`."""
    parser.description = ROUTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _run_by(parser, "route")
    add = parser.add_argument
    add("operator", metavar="NAMESPACE::NAME[.OVERLOAD]", help="the operator, such as aten::add.Tensor")
    add("arguments", nargs="*", metavar="EXPRESSION", help="the arguments of the call, or NAME=EXPRESSION")
    add(
        "--shape",
        type=_shape,
        default="2,2",
        metavar="N,N",
        help="the shape of tensors that are filled in (default: 2,2)",
    )
    add("--device", default="cpu", help="the device on which the expressions create tensors (default: cpu)")
    add("--fake", action="store_true", help="make the tensors fake, with fake CUDA devices")
    add("--requires-grad", action="store_true", help="make tensors that are filled in require gradients")
    add("--inference-mode", action="store_true", help="make the tensors, and the call, in inference mode")
    terminal.add_shared_flags(parser, quiet="print no table, for example with --json")


def _shape(text: str) -> list[int]:
    sizes = [size.strip() for size in text.split(",") if size.strip()]
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2,4, got {text!r}")
    return [int(size) for size in sizes]


# ---- torchext check-init

DIFFERENT, UNKNOWN = 3, 4

CHECK_INIT = """\
Compare the initial weights of each rank of a job with those of one process, bit for bit. Each rank runs alone on the
CPU, without GPUs and without the other ranks. The report names the tensors that differ, the ranks and the source line.

examples:
  torchext check-init my_models.llama:build --mesh fsdp=8 --mesh replicate=2,fsdp=4,tp=2
  torchext check-init train:build_on --mesh dp=2,tp=4 --engine none
"""
CHECK_INIT_CODES = f"""\
exit codes:
  0    all initial weights are the same as in one process
  {FAILED}    the program failed in a rank
  {MISUSED}    an argument is wrong
  {DIFFERENT}    a tensor differs
  {UNKNOWN}    no tensor differs, but some are not comparable, because they depend on values of ranks that do not run
"""


def configure_check_init(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of `torchext check-init`."""
    parser.description, parser.epilog = CHECK_INIT, CHECK_INIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _run_by(parser, "check_init")
    add = parser.add_argument
    add("function", metavar="MODULE:FUNCTION", help="a function that returns the model; it may take the device mesh")
    add(
        "--mesh",
        type=terminal.argument(parse_mesh),
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
        "--tp-plan",
        metavar="MODULE:FUNCTION",
        help="a function that returns the plan of tensor parallelism for the model (default: model.tp_plan)",
    )
    add("--plan", dest="tp_plan", help=argparse.SUPPRESS)  # its old name
    add(
        "--initialize",
        metavar="MODULE:FUNCTION",
        help="a function that initializes the sharded model (default for models on meta: init_weights(), or "
        "reset_parameters() of each submodule)",
    )
    add("--deferred", action="store_true", help="call the function under deferred_init()")
    add(
        "--rank",
        type=terminal.argument(terminal.parse_ranks),
        metavar="N,N-N",
        help="the ranks to check (default: all, or a part of more than 64)",
    )
    terminal.add_shared_flags(parser, quiet="print no report, for example with --json")


# ---- The flags of `torchext dry-run --advise`


SECONDS = 600.0


def add_advice_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of the command."""
    add = parser.add_argument_group("advice").add_argument
    advise = add(
        "--advise",
        action="store_true",
        help="run the first rank of --rank again with changes that may lower its peak, such as checkpointing of some "
        "blocks, and print the cheapest combination that fits",
    )
    target = add(
        "--target",
        type=terminal.argument(partial(bytes_of, name="--target")),
        metavar="SIZE",
        help="with --advise, the memory to fit in, such as 60GiB",
    )
    tries = add(
        "--try",
        type=terminal.argument(shlex.split),
        action="append",
        default=[],
        dest="tries",
        metavar="ARGS",
        help='with --advise, also try the program with further arguments, such as --try="--batch-size 4"; may be '
        "repeated",
    )
    numerics = add(
        "--advise-numerics", action="store_true", help="with --advise, also try changes of the computed values"
    )
    seconds = add(
        "--advise-seconds",
        type=terminal.positive,
        metavar="S",
        help=f"with --advise, start no further run after S seconds (default: {SECONDS:.0f})",
    )
    runs = add("--advise-runs", type=terminal.at_least_1, metavar="N", help="with --advise, make at most N runs")
    terminal.needs(advise, target, tries, numerics, seconds, runs)


# ---- The flags of commands that compare reports, and the output of the comparison


GREW = 5
"""The exit code if a peak grew by more than `--fail-above`."""


def add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of a command."""
    add = parser.add_argument_group("comparison").add_argument
    base = add(
        "--compare",
        type=terminal.argument(load_report),
        metavar="BASE.json",
        help="print the differences from an earlier report, which --json wrote: peaks, categories, modules, lines, "
        "bytes of collectives, and operations",
    )
    limit = add(
        "--fail-above",
        type=terminal.argument(Limit.parse),
        metavar="LIMIT",
        help="with --compare, exit with 5 if a peak of a GPU grew by more than LIMIT, such as 1%% or 100MiB; for a "
        "rank without GPUs, a peak of the host",
    )
    markdown = add(
        "--markdown",
        type=terminal.output_file,
        metavar="FILE",
        help="with --compare, also write the differences as Markdown for a comment on a pull request; - writes them to "
        "stdout",
    )
    terminal.needs(base, limit, markdown)


def require_comparable(parser: argparse.ArgumentParser, options: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Exit with an error if the base of `--compare` has none of the ranks."""
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
