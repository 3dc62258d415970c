"""`python -m torchext.dry_run`: will this job fit, and what does it send?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..fake.assumed_values import ValuePolicy
from ..fake.gpus import FakeGPU
from .ending import run_to_its_end
from .files import FILES, Overlay
from .files.guard import can_guard
from .launch_lines import Launch, launcher_of, without_python
from .pages import page_of, text_of
from .progress import FORWARD, STEP, Goal
from .rank_processes import RankProcesses, child_command, environment_for
from .running import RankReport

__all__ = ["exit_code_of", "main"]

FAILED = 1
DOES_NOT_FIT = 3
TOO_FEW = 4

DESCRIPTION = """\
Runs a program as one rank of a job, without its GPUs and without the other processes, for some steps of its optimizers
or some forward passes. Reports whether it fits, where the memory goes, and which collectives move how many bytes.

  python -m torchext.dry_run --world-size 1024 --rank 0,511 --gpu H100-80GB -- train.py --batch-size 4
  python -m torchext.dry_run --world-size 64 --steps 2 --report report.html -- -m my_package.train --config 8b.toml

The exit code is that of the rank with the worst outcome, in this order:
  1 or the program's own code: the program has failed
  3: it does not fit
  4: it ended by itself before it made as many steps, or forward passes, as were asked for
  0: it fits
"""


STAGES = "stages"


def _ranks(text: str, size: int) -> list[int]:
    """The ranks that `--rank` names, in that order; for `stages` the first."""
    if text == STAGES:
        return [0]
    if text == "all":
        return list(range(size))
    ranks: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"expected ranks such as 0,8-15, or all, or {STAGES}; got {text!r}")
        ranks.update(dict.fromkeys(range(int(first), int(last or first) + 1)))
    if not ranks or max(ranks) >= size:
        raise ValueError(f"a job of {size} has the ranks 0 to {size - 1}; got {text!r}")
    return list(ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m torchext.dry_run", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="how many processes torchrun starts (by default it starts none, and the program runs alone)",
    )
    add(
        "--rank",
        default="0",
        metavar="R,R-R",
        help="which of them to run, one after the other: ranks and ranges, all, or stages, which are rank 0 and each "
        "rank that exchanges messages with one of these, as the stages of a pipeline do (default: 0)",
    )
    add("--gpu", default="H100-80GB", metavar="MODEL", help="what the GPUs are, such as A100-40GB (default: H100-80GB)")
    add("--gpu-memory", type=float, metavar="GIB", help="the memory of each GPU, where the model is unknown or another")
    add(
        "--per-node",
        type=int,
        metavar="N",
        help="how many GPUs and processes a machine has (default: 8); without --world-size, the GPUs of the program "
        "(default: 1)",
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--steps", type=int, metavar="N", help="how many steps to run: each optimizer is called in each (default: 2)"
    )
    goal.add_argument("--forwards", type=int, metavar="N", help="run N forward passes instead, such as for inference")
    goal.add_argument("--to-end", action="store_true", help="run the program to its own end, whatever it does")
    add(
        "--values",
        default="assume",
        metavar="POLICY",
        help="what becomes of reading values that do not exist: raise, or assume, which ,masks=all|half|none and "
        ",routing=balanced|same can follow (default: assume,masks=all,routing=balanced)",
    )
    add(
        "--keep-files",
        type=Path,
        metavar="DIR",
        help="keep what the program writes in a folder that does not exist yet",
    )
    add(
        "--unguarded",
        action="store_true",
        help="run also where the system cannot keep other code than Python's from writing files",
    )
    add(
        "--alone",
        action="store_true",
        help="run each rank by itself: no other ranks are run to find out what they send to it",
    )
    add("--report", type=Path, metavar="FILE.html", help="also write a page")
    add("--no-lines", action="store_true", help="do not look for the lines that made tensors: faster")
    add("--no-flops", action="store_true", help="do not run one more step to count floating-point operations")
    add(
        "program",
        nargs=argparse.REMAINDER,
        help="-- script.py ARGS, or -- -m module ARGS, or a command line of torchrun, accelerate launch or deepspeed; "
        "the arguments {rank}, {local_rank} and {world_size}, also behind =, are replaced",
    )
    return parser


def _goal(options: argparse.Namespace) -> Goal:
    if options.forwards is not None:
        return Goal(FORWARD, options.forwards)
    return Goal(STEP, None if options.to_end else 2 if options.steps is None else options.steps)


def _gpu(options: argparse.Namespace) -> FakeGPU:
    memory = 0 if options.gpu_memory is None else int(options.gpu_memory * 2**30)
    return FakeGPU(options.gpu, count=options.per_node or 1, memory=memory)


def _launch(options: argparse.Namespace, line: list[str]) -> Launch:
    """What to run, by the command line that follows the options, and the options, which come first."""
    line = without_python(line)
    called = launcher_of(line)
    launch = Launch(line) if called is None else _ask_launcher(options, called)
    size = launch.size if options.world_size is None else options.world_size
    return replace(launch, size=size, per_node=options.per_node or launch.per_node or 8)


def _ask_launcher(options: argparse.Namespace, called: list[str]) -> Launch:
    with TemporaryDirectory(prefix="torchext-", ignore_cleanup_errors=True) as folder:
        task, answer = Path(folder) / "task", Path(folder) / "answer"
        task.write_text(json.dumps({"module": called[0], "arguments": called[1:], "gpus": options.per_node or 8}))
        code = _run_child(options, folder, "launch_lines", task, answer, {})
        if not answer.exists():
            raise ValueError(f"{called[0]} has ended with code {code}, and has started nothing")
        found = json.loads(answer.read_text())
    if "error" in found:
        raise ValueError(f"{called[0]}: {found['error']}; give --world-size and the program itself")
    return Launch(**found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Those after the name of the module; by default those of the process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program or program == ["-m"]:
        parser.error("which program? Give it after --, as in: -- train.py --batch-size 4")
    if options.world_size is not None and options.world_size < 1:
        parser.error("--world-size: at least 1")
    if options.per_node is not None and options.per_node < 1:
        parser.error("--per-node: at least 1")
    goal = _goal(options)
    if goal.count is not None and goal.count < 1:
        parser.error("--steps and --forwards: at least 1")
    if options.keep_files is not None and options.keep_files.exists():
        parser.error(f"--keep-files: {options.keep_files} exists")
    if not options.unguarded and not can_guard():
        parser.error(
            "this system has no Landlock (Linux 5.19 or later), so a dry run cannot keep code in C, and programs that "
            "are started, from changing files; --unguarded runs all the same, and keeps Python's own functions only"
        )
    try:
        launch = _launch(options, program)
        size = launch.size or 1
        ranks = _ranks(options.rank, size)
        ValuePolicy.parse(options.values)
        gpu = _gpu(options)
    except ValueError as error:
        parser.error(str(error))
    reports: list[RankReport] = []
    with RankProcesses(options, launch, gpu, goal) as processes:
        while ranks:
            report = processes.report_of(ranks.pop(0))
            reports.append(report)
            report.mismatches = processes.mismatches_of(report.rank)
            print(text_of(report, size), end="\n\n", flush=True)
            if report.error:
                print(report.error, file=sys.stderr)
            if options.rank == STAGES:
                ranks += sorted(set(report.peers) - {one.rank for one in reports} - set(ranks))
    printed = {mismatch for report in reports for mismatch in report.mismatches}
    for mismatch in processes.mismatches:
        if mismatch not in printed:
            print(mismatch)
    for report in reports:
        report.mismatches = processes.mismatches_of(report.rank)
    if options.report is not None:
        reported = {mismatch for report in reports for mismatch in report.mismatches}
        notes = [mismatch for mismatch in processes.mismatches if mismatch not in reported]
        options.report.write_text(page_of(reports, size, shlex.join(program), notes))
        print(f"The report is in {options.report}.")
    return FAILED if processes.mismatches else exit_code_of(reports)


def exit_code_of(reports: Sequence[RankReport]) -> int:
    """The code of the rank with the worst outcome: failed, does not fit, too few steps, fits."""
    if any(report.error or report.mismatches for report in reports):
        return FAILED
    for report in reports:
        if report.exit_code:
            return report.exit_code if report.exit_code % 256 else FAILED  # of which a process has the last eight bits
    if any(report.out_of_memory for report in reports):
        return DOES_NOT_FIT
    return 0 if all(report.has_enough for report in reports) else TOO_FEW


def _run_child(
    options: argparse.Namespace, folder: str, module: str, task: Path, answer: Path, variables: dict[str, str]
) -> int:
    """Runs one of the modules here in a process of its own, which changes no files outside of `folder`."""
    command = child_command(options, folder, module, task, answer)
    return run_to_its_end(command, environment_for(Overlay(folder), variables), FILES)
