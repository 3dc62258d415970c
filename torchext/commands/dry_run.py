"""The command `torchext dry-run`: run ranks of a training job without its GPUs, and report whether they fit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ..descriptions import DEFAULT_VALUES, FakeGPU, PeakRates, as_fake_gpu
from ..dry_run.files import FILES, Overlay
from ..dry_run.files.guard import can_guard
from ..dry_run.ranks.launch_lines import Launch, launcher_of, without_python
from ..dry_run.ranks.processes import RankProcesses, child_command, environment_for, run_to_its_end
from ..internals import terminal
from ..internals.text import bytes_of
from ..reports.comparison import compare
from ..reports.model import FORWARD, STEP, USES_NO_GPU, Goal, RankReport, json_report, with_times_apart
from ..reports.text import Report, fits, html_report, text_report
from .flags import GREW, add_advice_flags, add_comparison_flags, print_comparison, require_comparable

__all__ = ["configure", "exit_code_of"]

FAILED = 1
DOES_NOT_FIT = 3
TOO_FEW = 4

DESCRIPTION = """\
Run a program as one rank of a job, without its GPUs and without the other ranks, for some steps of its optimizers or
some forward passes. Report whether it fits, where the memory goes, and which collectives move how many bytes.

examples:
  torchext dry-run --world-size 1024 --rank 0,511 --gpu H100-80GB -- train.py --batch-size 4
  torchext dry-run --world-size 64 --steps 2 --report report.html -- -m my_package.train --config 8b.toml
"""

EXIT_CODES = f"""\
exit codes:
  0    every rank fits
  1    the program failed: with an error, or with an exit code other than 0, which the report prints
  2    an argument is wrong
  3    a rank does not fit, or has used no GPU
  4    the program ended before it made the requested number of steps or forward passes
  {GREW}    with --compare, a peak grew by more than --fail-above
  130  interrupted; the finished ranks are reported
The rank with the worst outcome decides, in the order 1, 3, 4, {GREW}, 0.
"""

STAGES = "stages"


def configure(parser: argparse.ArgumentParser) -> None:
    """Make `parser` the parser of this command."""
    parser.description, parser.epilog = DESCRIPTION, EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=lambda options: _run(parser, options))
    add = parser.add_argument_group("job").add_argument
    add(
        "--world-size",
        type=terminal.at_least_1,
        metavar="N",
        help="the number of ranks of a job that torchrun starts (default: none)",
    )
    add(
        "--rank",
        default="0",
        metavar="R,R-R",
        help="the ranks to run: ranks and ranges, `all`, or `stages` (default: 0). `stages` is "
        "rank 0 and each rank that exchanges messages with one of these, as the stages of a pipeline do",
    )
    add(
        "--jobs",
        type=terminal.at_least_1,
        default=1,
        metavar="N",
        help="the number of ranks that run at a time, each on half a GiB; with more than one, only the first reads "
        "stdin (default: 1)",
    )
    add("--gpu", default="H100-80GB", metavar="MODEL", help="the model of the GPUs, such as A100 (default: H100-80GB)")
    add(
        "--rates",
        metavar="NAME=N,...",
        help="rates of each GPU that differ from those of its model, for the bound of the time of a step: memory, link "
        "and network in GB/s, dtypes in TFLOP/s, as in network=25,bfloat16=989",
    )
    add(
        "--gpu-memory",
        type=_gpu_memory,
        metavar="GIB",
        help="the memory of each GPU, in GiB or with a unit, such as 24GB; required for an unlisted model",
    )
    add(
        "--per-node",
        type=terminal.at_least_1,
        metavar="N",
        help="the number of GPUs and ranks of a machine (default: 8); without --world-size, the number of GPUs of the "
        "program (default: 1)",
    )
    run = parser.add_argument_group("run")
    add, goal = run.add_argument, run.add_mutually_exclusive_group()
    add_number = partial(goal.add_argument, type=terminal.at_least_1, metavar="N")
    add_number("--steps", help="run N steps; each step calls each optimizer (default: 2)")
    add_number("--forwards", help="run N forward passes instead, for example for inference")
    goal.add_argument("--to-end", action="store_true", help="run the program until it ends")
    add(
        "--values",
        type=_values,
        default=DEFAULT_VALUES,
        metavar="POLICY",
        help="how to answer reads of values that do not exist, a list such as assume,routing=worst of "
        "assume|zero|raise, masks=all|half|none, routing=balanced|same|worst|histogram:FILE and FILE:LINE=POLICY "
        f"(default: {DEFAULT_VALUES})",
    )
    add("--keep-files", type=_new_folder, metavar="DIR", help="keep the files that the program writes in a new folder")
    add("--unguarded", action="store_true", help="run even if the system cannot keep code in C from writing files")
    add("--alone", action="store_true", help="do not run other ranks to find out the values that they send")
    add("--no-lines", action="store_true", help="do not record the lines that allocate memory: faster")
    add(
        "--no-flops",
        action="store_true",
        help="do not run an additional step to count floating-point operations and to bound its time",
    )
    add(
        "--no-compile",
        action="store_true",
        help="run compiled functions eagerly, as without Triton and with --advise",
    )
    add("--report", type=_html_file, metavar="FILE.html", help="also write an HTML report")
    add_advice_flags(parser)
    add_comparison_flags(parser)
    terminal.add_shared_flags(parser, quiet="print no progress of ranks")
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="-- script.py ARGS, or -- -m module ARGS, or a command line of torchrun, accelerate launch or deepspeed; "
        "{rank}, {local_rank} and {world_size} are replaced where they are an argument or follow its equals sign",
    )


def exit_code_of(reports: Sequence[RankReport]) -> int:
    """Return the exit code for the rank with the worst outcome: failed, does not fit or uses no GPU, too few."""
    codes = {"failed": FAILED, "does not fit": DOES_NOT_FIT, USES_NO_GPU: DOES_NOT_FIT, "too few": TOO_FEW, "fits": 0}
    outcomes = {report.outcome for report in reports}
    return next((code for outcome, code in codes.items() if outcome in outcomes), 0)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    _check(parser, options, program)
    try:
        goal, gpu = _goal(options), _gpu(options)
        launch = _launch(options, program)
        ranks = _ranks(options.rank, launch.size)
        _check_program(launch.program)
    except ValueError as error:
        parser.error(str(error))
    is_tuning = os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and os.environ.get("PYTORCH_TUNABLEOP_TUNING") != "0"
    if gpu is not None and is_tuning:
        parser.error(
            "PYTORCH_TUNABLEOP_ENABLED=1 makes PyTorch measure kernels, which a dry run does not run: unset it, or set "
            "PYTORCH_TUNABLEOP_TUNING=0"
        )
    require_comparable(parser, options, ranks)
    run = _Run(options, launch, ranks, RankProcesses(options, launch, gpu, goal, () if options.advise else None))
    run.run()
    return run.write_reports(program, gpu)


class _Run:
    """The ranks of one call of the command, and their reports."""

    def __init__(self, options: argparse.Namespace, launch: Launch, ranks: list[int], processes: RankProcesses) -> None:
        self._options = options
        self._launch = launch
        self._size = launch.size or 1
        self._ranks = ranks
        self._processes = processes
        self._reports: dict[int, RankReport] = {}
        self._printed: dict[str, int] = {}  # the first rank with these tables
        self._is_interrupted = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self._is_interrupted:
            return terminal.INTERRUPTED
        if self._processes.mismatches:
            return FAILED
        reports = list(self._reports.values())
        if self._options.compare is not None:  # is also about the peaks of the host
            reports = [report for report in reports if report.outcome != USES_NO_GPU]
        return exit_code_of(reports)

    def run(self) -> None:
        """Run the ranks, and print the report of each when it is finished."""
        try:
            with self._processes:
                while self._ranks:
                    number = self._ranks.pop(0)
                    self._print(self._processes.report_of(number, self._ranks))
        except KeyboardInterrupt:
            self._is_interrupted = True
            for report in self._processes.finished_reports():
                if report.rank not in self._reports:
                    self._print(report)
            finished = ", ".join(map(str, sorted(self._reports))) or "none"
            print(f"\ninterrupted; finished ranks: {finished}", file=sys.stderr)
        printed = {mismatch for report in self._reports.values() for mismatch in report.mismatches}
        for mismatch in self._processes.mismatches:
            if mismatch not in printed:
                print(mismatch, file=self._processes.out)
        for report in self._reports.values():
            report.mismatches = self._processes.mismatches_of(report.rank)

    def _print(self, report: RankReport) -> None:
        self._reports[report.rank] = report
        report.mismatches = self._processes.mismatches_of(report.rank)
        content = report.to_dict()
        summary, newline, tables = text_report(content, self._size).partition("\n")
        out = self._processes.out
        summary = terminal.colored(summary, "green" if fits(content) else "red", out)
        first = self._printed.setdefault(tables, report.rank)
        if tables and first != report.rank:
            tables = f"The rest is equal to the report of rank {first}."
        print(f"{summary}{newline}{tables}", end="\n\n", file=out, flush=True)
        if report.error:
            print(report.error, file=sys.stderr)
        if self._options.rank == STAGES:
            self._ranks += sorted(set(report.peers) - self._reports.keys() - set(self._ranks))

    def write_reports(self, program: Sequence[str], gpu: FakeGPU) -> int:
        """Write the HTML report, the comparison and the JSON report, if they are requested. Return the exit code."""
        reports = list(self._reports.values())
        reported = {mismatch for report in reports for mismatch in report.mismatches}
        others = [mismatch for mismatch in self._processes.mismatches if mismatch not in reported]
        per_node = gpu.count if self._launch.size is None else self._launch.per_node or 8
        if self._size > 1:
            gpu = replace(gpu, count=min(per_node, self._size))  # as in `world()`
        job = {
            "program": list(program),
            "folder": str(Path.cwd()),
            "world_size": self._size,
            "per_node": per_node,
            "values": self._options.values,
            "exit_code": self.exit_code,
            "interrupted": self._is_interrupted,
            "other_mismatches": others,
        }
        content, options, out = json_report(job, gpu, reports), self._options, self._processes.out
        if options.report is not None:
            options.report.write_text(html_report(content), encoding="utf-8", errors="backslashreplace")
            print(f"The report is in {options.report}.", file=out)
        if options.compare is not None and set(options.compare.ranks) & self._reports.keys():
            comparison = compare(options.compare, Report(terminal.with_header("dry-run", content)))
            code = print_comparison(options, comparison, out)
            content["exit_code"] = content["exit_code"] or code
            content["comparison"] = comparison.to_dict()
        if options.advise and reports and not self._is_interrupted:
            from .advise import advise_rank  # imports PyTorch

            advice = advise_rank(self._processes, reports[0])
            if advice is not None:
                print(advice, file=out, flush=True)
            content["advice"] = None if advice is None else advice.to_dict()
        terminal.write_json(options.json, "dry-run", with_times_apart(content))
        return int(content["exit_code"])


# ---- Arguments


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, program: list[str]) -> None:
    """Exit with an error if an argument is wrong."""
    if not program or program == ["-m"]:
        parser.error("the program is missing: give it after --, as in -- train.py --batch-size 4")
    if not options.unguarded and not can_guard():
        parser.error(
            "this system has no Landlock (Linux 5.19 or later), so a dry run cannot keep code in C, and programs that "
            "are started, from changing files; --unguarded runs without it, and guards only Python's own functions"
        )


def _html_file(text: str) -> Path:
    if not text.endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"expected a file that ends in .html or .htm, got {text!r}")
    return terminal.output_file(text)


@terminal.argument
def _new_folder(text: str) -> Path:
    if Path(text).exists():
        raise ValueError(f"{text} exists")
    return Path(text)


def _values(text: str) -> str:
    if text == DEFAULT_VALUES:
        return text
    from ..fake.values import PARTS, ValuePolicy  # imports PyTorch

    try:
        ValuePolicy.parse(text)
    except ValueError as error:
        wrong = next((part for part in text.split(",") if part not in PARTS and ":" not in part), "")
        message = str(error).rstrip(".")
        message = message[:1].lower() + message[1:] + terminal.suggestion(wrong, PARTS, most=1)
        raise argparse.ArgumentTypeError(message) from error
    return text


def _ranks(text: str, size: int | None) -> list[int]:
    """Return the ranks that `--rank` names, in that order; for `stages` the first.

    Args:
        text: The value of the flag.
        size: The number of ranks; None for a program that runs alone.

    Raises:
        ValueError: `text` does not name ranks, or the job does not have them.
    """
    if text == STAGES:
        return [0]
    if text == "all":
        return list(range(size or 1))
    try:
        ranks = terminal.parse_ranks(text, ["all", STAGES])
    except ValueError as error:
        raise ValueError(f"--rank: {error}") from None
    if size is None and max(ranks) > 0:
        raise ValueError(f"--rank: a program without --world-size has rank 0 only, got {text!r}; give --world-size")
    size = size or 1
    if max(ranks) >= size:
        raise ValueError(f"--rank: a job of {size} has the ranks 0 to {size - 1}; got {text!r}")
    return ranks


@terminal.argument
def _gpu_memory(text: str) -> int:
    size = 0.0
    for read in (lambda: float(text) * 2**30, lambda: bytes_of(text, "--gpu-memory")):
        with suppress(ValueError):
            size = read()
            break
    if not 0 < size < 2**50:
        raise ValueError(f"expected a positive number of GiB, or a size such as 24GB, got {text!r}")
    return int(size)


def _goal(options: argparse.Namespace) -> Goal:
    if options.forwards is not None:
        return Goal(FORWARD, options.forwards)
    return Goal(STEP, None if options.to_end else 2 if options.steps is None else options.steps)


def _gpu(options: argparse.Namespace) -> FakeGPU:
    count = options.per_node or 1
    if options.gpu_memory is not None:
        described = FakeGPU(options.gpu, count=count, memory=options.gpu_memory)
        return _with_rates(described, options.rates)
    try:
        gpu = as_fake_gpu(options.gpu)
    except ValueError as error:
        known, about_python, _ = str(error).partition(" For another one")
        remedy = " For another model, pass its memory with --gpu-memory GIB." if about_python else ""
        raise ValueError(f"--gpu: {known}{remedy}") from error
    assert gpu is not None
    return _with_rates(replace(gpu, count=count), options.rates)


def _with_rates(gpu: FakeGPU, text: str | None) -> FakeGPU:
    if text is None:
        return gpu
    try:
        return replace(gpu, rates=(gpu.rates or PeakRates()).with_text(text))
    except ValueError as error:
        raise ValueError(f"--rates: {error}") from error


def _check_program(program: Sequence[str]) -> None:
    """Raise ValueError if the script or the module does not exist."""
    if program[0] != "-m":
        if "{" not in program[0] and not Path(program[0]).exists():
            near = terminal.suggestion(program[0], map(str, Path(program[0]).parent.glob("*.py")))
            raise ValueError(f"the script {program[0]!r} does not exist{near}")
        if Path(program[0]).is_dir() and not (Path(program[0]) / "__main__.py").exists():
            raise ValueError(f"the folder {program[0]!r} has no __main__.py: give a script, or -m and a module")
        return
    top = program[1].partition(".")[0]
    if not (Path(top).is_dir() or Path(f"{top}.py").exists() or importlib.util.find_spec(top)):
        raise ValueError(f"the module {program[1]!r} does not exist")


# ---- Launchers


def _launch(options: argparse.Namespace, line: list[str]) -> Launch:
    """Return what the command line after the options starts; the options take precedence."""
    line = without_python(line)
    called = launcher_of(line)
    launch = Launch(line) if called is None else _ask_launcher(options, called)
    size = launch.size if options.world_size is None else options.world_size
    return replace(launch, size=size, per_node=options.per_node or launch.per_node or 8)


def _ask_launcher(options: argparse.Namespace, called: list[str]) -> Launch:
    with TemporaryDirectory(prefix="torchext-", ignore_cleanup_errors=True) as folder:
        task, answer = Path(folder) / "task", Path(folder) / "answer"
        task.write_text(json.dumps({"module": called[0], "arguments": called[1:], "gpus": options.per_node or 8}))
        command = child_command(options, folder, "launch_lines", task, answer)
        out = terminal.STDERR if terminal.STDOUT in (options.json, options.markdown) else None
        code = run_to_its_end(command, environment_for(Overlay(folder), {}), FILES, stdout=out)
        if not answer.exists():
            raise ValueError(f"{called[0]} ended with code {code} before it started a process")
        found = json.loads(answer.read_text())
    if "error" in found:
        raise ValueError(f"{called[0]}: {found['error']}; give --world-size and the program itself")
    return Launch(**found)
