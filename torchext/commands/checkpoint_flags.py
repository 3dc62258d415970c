"""The flags of the command `torchext checkpoint`, and `python -m torchext.checkpoint`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..internals import terminal

__all__ = ["configure", "main"]

DESCRIPTION = """\
Write the checkpoint that a model has after its construction, in bounded memory.

examples:
  torchext checkpoint my_models.llama:build --args 80 width=8192 --out initial --dtype bfloat16
  torchext checkpoint --hf folder_with_config --plan
"""
EXIT_CODES = """\
exit codes:
  0    the checkpoint is complete, or can be written (--plan)
  1    constructing the model, computing or writing the checkpoint failed
  2    an argument is wrong
  3    the disk has too little space, or --max-memory is too small
  130  interrupted; --resume continues
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of this command."""
    parser.description, parser.epilog = DESCRIPTION, EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=lambda options: _run(parser, options))
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


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from .checkpoint import run  # imports PyTorch

    return run(parser, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m torchext.checkpoint`, and return its exit code."""
    parser = terminal.CommandLineParser("python -m torchext.checkpoint")
    configure(parser)
    return terminal.run_command(parser, arguments)
