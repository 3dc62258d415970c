"""`python -m torchext.dry_run`: will this job fit, and what does it send?"""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..fake.assumed_values import POLICIES
from ..fake.gpus import FakeGPU
from .files import GUARD, STARTUP, Tree, can_guard
from .pages import page_of, text_of
from .progress import FORWARD, STEP, Goal
from .running import RankReport, run_rank

__all__ = ["main"]

FAILED = 1
DOES_NOT_FIT = 3
TOO_FEW = 4
UNLIMITED = 1 << 50  # bytes: more than a device has, so that what would be needed can be told

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


def _ranks(text: str) -> list[int]:
    return [int(rank) for rank in text.split(",")]


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
        "--rank", type=_ranks, default=[0], metavar="R,R", help="which of them to run, one after the other (default: 0)"
    )
    add("--gpu", default="H100-80GB", metavar="MODEL", help="what the GPUs are, such as A100-40GB (default: H100-80GB)")
    add("--gpu-memory", type=float, metavar="GIB", help="the memory of each GPU, where the model is unknown or another")
    add("--per-node", type=int, default=8, metavar="N", help="how many GPUs and processes a machine has (default: 8)")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--steps", type=int, metavar="N", help="how many steps to run: each optimizer is called in each (default: 2)"
    )
    goal.add_argument("--forwards", type=int, metavar="N", help="run N forward passes instead, such as for inference")
    goal.add_argument("--to-end", action="store_true", help="run the program to its own end, whatever it does")
    add("--values", choices=POLICIES, default="assume", help="what becomes of reading values that do not exist")
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
    add("--report", type=Path, metavar="FILE.html", help="also write a page")
    add("--no-lines", action="store_true", help="do not look for the lines that made tensors: faster")
    add("--no-flops", action="store_true", help="do not run one more step to count floating-point operations")
    add("program", nargs=argparse.REMAINDER, help="-- script.py ARGS, or -- -m module ARGS")
    return parser


def _goal(options: argparse.Namespace) -> Goal:
    if options.forwards is not None:
        return Goal(FORWARD, options.forwards)
    return Goal(STEP, None if options.to_end else 2 if options.steps is None else options.steps)


def _gpu(options: argparse.Namespace) -> FakeGPU:
    if options.gpu_memory is None:
        return FakeGPU(options.gpu)
    return FakeGPU(options.gpu, memory=int(options.gpu_memory * 2**30))


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
    size = options.world_size or 1
    if any(not 0 <= rank < size for rank in options.rank):
        parser.error(f"--rank {options.rank}: a job of {size} has the ranks 0 to {size - 1}")
    if options.world_size is not None and options.world_size < 1:
        parser.error("--world-size: at least 1")
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
        gpu = _gpu(options)
    except ValueError as error:
        parser.error(str(error))
    reports = [_run_in_process(options, program, gpu, rank) for rank in options.rank]
    for report in reports:
        print(text_of(report, size), end="\n\n")
        if report.error:
            print(report.error, file=sys.stderr)
    if options.report is not None:
        options.report.write_text(page_of(reports, size, shlex.join(program)))
        print(f"The report is in {options.report}.")
    return _exit_code(reports)


def _exit_code(reports: Sequence[RankReport]) -> int:
    """The code of the rank with the worst outcome: failed, does not fit, too few steps, fits."""
    if any(report.error for report in reports):
        return FAILED
    for report in reports:
        if report.exit_code:
            return report.exit_code if report.exit_code % 256 else FAILED  # of which a process has the last eight bits
    if any(report.out_of_memory for report in reports):
        return DOES_NOT_FIT
    return 0 if all(report.has_enough for report in reports) else TOO_FEW


def _run_in_process(options: argparse.Namespace, program: list[str], gpu: FakeGPU, rank: int) -> RankReport:
    """Runs one rank in a fresh process, and again with as much memory as it likes if it does not fit."""
    report = _start(options, program, gpu, rank)
    if report.out_of_memory:
        needed = _start(options, program, replace(gpu, memory=UNLIMITED), rank)
        if needed.error:  # after the point that it does not reach
            return report
        for peak in needed.peaks:
            peak.total = gpu.memory - gpu.context
        needed.out_of_memory = report.out_of_memory
        return needed
    return report


def _start(options: argparse.Namespace, program: list[str], gpu: FakeGPU, rank: int) -> RankReport:
    with TemporaryDirectory(prefix="torchext-") as folder:
        task, answer = Path(folder) / "task", Path(folder) / "answer"
        is_module = program[0] == "-m"
        arguments = {
            "program": program[1:] if is_module else program,
            "is_module": is_module,
            "size": options.world_size or 1,
            "is_launched": options.world_size is not None,
            "rank": rank,
            "gpu": gpu,
            "per_node": options.per_node,
            "goal": _goal(options),
            "values": options.values,
            "traces_lines": not options.no_lines,
            "counts_flops": not options.no_flops,
        }
        task.write_bytes(pickle.dumps(arguments))
        guard = [] if options.unguarded else [sys.executable, GUARD, folder]
        command = [sys.executable, "-m", "torchext.dry_run.child", str(task), str(answer)]
        ended = subprocess.run([*guard, *command], env=_environment(folder), check=False)
        if answer.exists():
            report: RankReport = pickle.loads(answer.read_bytes())
        else:
            report = RankReport(rank, error=f"The process of rank {rank} has ended with code {ended.returncode}.")
        files = Tree(folder)
        report.files = files.changes()
        if options.keep_files is not None:
            _keep(files, options.keep_files / f"rank-{rank}")
        return report


def _environment(folder: str) -> dict[str, str]:
    """The environment of a process whose files are in `folder`, and of those that it starts."""
    path = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))
    apart = {"TORCHEXT_DRY_RUN_FILES": folder, "PYTHONPATH": path, "TMPDIR": folder}
    return {**os.environ, **apart, "CUDA_VISIBLE_DEVICES": ""}  # real GPUs would be found instead of those described


def _keep(files: Tree, folder: Path) -> None:
    """Copies what has been written, except what looks like a checkpoint and has no values."""
    without_values = set(files.without_values())

    def ignored(place: str, names: list[str]) -> list[str]:
        return [name for name in names if files.program_path(f"{place}/{name}") in without_values]

    shutil.copytree(files.written, folder, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def run_child(task: Path, answer: Path) -> None:
    """Runs the rank that is described in the file `task`, and leaves the report in the file `answer`."""
    arguments = pickle.loads(task.read_bytes())
    report = run_rank(arguments.pop("program"), **arguments)
    answer.write_bytes(pickle.dumps(report))
