"""The runs of a rank with remedies for `torchext dry-run --advise`, each in its own process."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from ..advice.advice import Advice, Outcome, outcome_on
from ..advice.remedies import Arguments, Remedy, remedies_for
from ..advice.searching import LimitReachedError, Limits, search
from ..descriptions import FakeGPU
from ..dry_run.ranks.processes import RankProcesses
from ..memory.timeline import PINNED
from ..reports.model import HOST, RankReport
from .flags import SECONDS

__all__ = ["advise_rank"]


def advise_rank(processes: RankProcesses, report: RankReport) -> Advice | None:
    """Search for changes that lower the peak of a rank.

    Args:
        processes: The processes of the unchanged program.
        report: The report of the rank of the unchanged program.

    Returns:
        The advice, also if the search is interrupted; None, after a message, if the unchanged program fails, makes too
        few steps, or allocates nothing on a GPU.
    """
    options, gpu = processes.options, processes.gpu
    baseline = _outcome(report, ())
    problem = baseline.error or ("" if baseline.peak_reserved else "it allocates nothing on a GPU")
    if problem or report.findings is None:
        print(f"[dry run] no advice for this program: {problem}", file=sys.stderr)
        return None
    capacity = gpu.memory - gpu.context
    tries = [Arguments(tuple(words)) for words in options.tries]
    return search(
        _Simulation(processes, report.rank).run,
        baseline,
        [*tries, *remedies_for(report.findings, None, allow_numerics=options.advise_numerics)],
        report.findings.blocks,
        gpu=gpu.name,
        limit=capacity if options.target is None else min(options.target, capacity),
        limits=Limits(options.advise_seconds or SECONDS, options.advise_runs),
    )


class _Simulation:
    """Runs a rank with remedies, without its output."""

    def __init__(self, processes: RankProcesses, rank: int) -> None:
        self._processes = processes
        self._rank = rank
        self._count = 0
        settings = {**vars(processes.options), "quiet": True, "no_lines": True, "keep_files": None}
        self._options = argparse.Namespace(**settings)

    def run(self, remedies: tuple[Remedy, ...]) -> Outcome:
        """Run the rank and, as far as it waits for their messages, other ranks."""
        first, launch = self._processes, self._processes.launch
        added = [part for one in remedies if isinstance(one, Arguments) for part in one.arguments]
        launch = replace(launch, program=[*launch.program, *added])

        def run(gpu: FakeGPU) -> Outcome:
            with RankProcesses(self._options, launch, gpu, first.goal, remedies, is_shown=False) as processes:
                return _outcome(processes.report_of(self._rank), remedies)

        try:
            outcome = outcome_on(first.gpu, run)
        except KeyboardInterrupt:
            raise LimitReachedError from None
        self._count += 1
        if not first.options.quiet:
            result = outcome.error or repr(outcome)
            print(f"[dry run] advice {self._count}: {result}", file=sys.stderr, flush=True)
        return outcome


def _outcome(report: RankReport, remedies: tuple[Remedy, ...]) -> Outcome:
    gpus = [device for device in report.devices if device["device"] not in HOST]
    pinned = next((device["peak_allocated"] for device in report.devices if device["device"] == PINNED), 0)
    return Outcome(
        remedies,
        fits=not report.out_of_memory,
        peak_reserved=max((gpu["peak_reserved"] for gpu in gpus), default=0),
        peak_allocated=max((gpu["peak_allocated"] for gpu in gpus), default=0),
        flops=report.flops,
        pinned=pinned,
        bytes_sent=_bytes_sent(report),
        error=_problem(report),
    )


def _bytes_sent(report: RankReport) -> int:
    """Return the bytes that the last step sends."""
    phases = [row["phase"] for row in report.collectives if row["phase"].startswith(report.unit)]
    return sum(row["bytes_sent"] for row in report.collectives if phases and row["phase"] == phases[-1])


def _problem(report: RankReport) -> str:
    if report.outcome == "failed":
        fallback = f"the program exited with code {report.program_exit_code}"
        return report.error_summary or next(iter(report.mismatches), fallback)
    too_few = report.outcome == "too few"
    return f"the program made {report.completed} of {report.requested} {report.unit}s" if too_few else ""
