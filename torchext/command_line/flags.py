"""The flags of the commands whose work imports PyTorch: `torchext --help` and completion need only the flags."""

from __future__ import annotations

import argparse
from importlib import import_module

from .. import terminal
from ..descriptions.meshes import ENGINES, parse_mesh
from ..user_functions import FAILED, MISUSED

__all__ = ["DIFFERENT", "UNKNOWN", "configure_check_init", "configure_env", "configure_route"]


def _run_by(parser: argparse.ArgumentParser, module: str) -> None:
    """Make `run()` of a module of this package the work of the command of `parser`."""
    parser.set_defaults(run=lambda options: import_module(f".{module}", __package__).run(parser, options))


# ---- torchext env ----


def configure_env(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of `torchext env`."""
    parser.description = (
        "Print the versions, the build, the owners of the dispatch keys, the installed patches, and the self-tests. "
        "Add the output to a bug report."
    )
    _run_by(parser, "environment_report")
    terminal.add_shared_flags(parser, quiet="print no report, for example with --json")


# ---- torchext route ----

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
    _run_by(parser, "route_report")
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


# ---- torchext check-init ----

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
    _run_by(parser, "check_init_report")
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
    add(
        "--rank",
        type=terminal.argument(terminal.parse_ranks),
        metavar="N,N-N",
        help="the ranks to check (default: all, or a part of more than 64)",
    )
    terminal.add_shared_flags(parser, quiet="print no report, for example with --json")
