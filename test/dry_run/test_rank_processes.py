"""The process that runs ranks replies to waiting ranks, and ends them all."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from torchext.dry_run.protocol import CYCLE, FINISHED, OTHER, Awaited, Channel, Message, Missing
from torchext.dry_run.ranks.processes import ChildProcess, Patience, RankProcesses, _Rank, raising_on_signals
from torchext.reports.model import Goal, RankReport


class StubRank:
    """A rank without a process."""

    def __init__(self) -> None:
        self.report: RankReport | None = None
        self.awaits: Awaited | None = None
        self.closed_with: list[Patience | None] = []

    def terminate(self) -> None:
        """Do nothing: there is no process to end."""

    def close(self, patience: Patience | None) -> None:
        self.closed_with.append(patience)


def awaited(receiver: int, sender: int) -> Awaited:
    return Awaited(Channel((0, 1, 2, 3), 0, "cuda", sender, receiver, 0), 0, receiver, f"line {receiver}")


@pytest.fixture
def job() -> RankProcesses:
    unused: Any = None
    return RankProcesses(argparse.Namespace(json=None, markdown=None), unused, unused, Goal())


def add(job: RankProcesses, number: int, waits_for: int | None = None, report: RankReport | None = None) -> StubRank:
    rank = StubRank()
    rank.report = report
    rank.awaits = None if waits_for is None else awaited(number, waits_for)
    job._ranks[number] = rank  # type: ignore[assignment]
    return rank


def test_rank_that_waits_for_a_cycle_is_not_part_of_it(job: RankProcesses) -> None:
    for number, waits_for in ((0, 1), (1, 2), (2, 1)):
        add(job, number, waits_for)
    assert job._answer(awaited(0, 1)) is None
    for number, other in ((1, 2), (2, 1)):
        found = job._answer(awaited(number, other))
        assert isinstance(found, Missing)
        assert found.reason == CYCLE
        assert f"rank {number} waits at line {number} for a message from rank {other}" in found.text


@pytest.mark.parametrize(
    ("report", "reason", "text"),
    [
        (
            RankReport(
                1, error="Traceback\nValueError: no data\nand what may explain it", error_summary="ValueError: no data"
            ),
            OTHER,
            "failed in its dry run: ValueError: no data.",
        ),
        (
            RankReport(1, out_of_memory="CUDA out of memory. Tried to allocate 4 GiB.\nSee documentation"),
            OTHER,
            "ran out of memory in its dry run: CUDA out of memory. Tried to allocate 4 GiB.",
        ),
        (
            RankReport(1, completed=2, out_of_memory="CUDA out of memory"),
            FINISHED,
            "Rank 1, the sender, has already reached its goal.",
        ),
        (RankReport(1), OTHER, "Rank 1, the sender, ended without sending the message."),
    ],
    ids=["failed", "out_of_memory", "finished", "ended"],
)
def test_receiver_gets_the_reason_why_its_sender_has_ended(
    job: RankProcesses, report: RankReport, reason: str, text: str
) -> None:
    add(job, 0, waits_for=1)
    add(job, 1, report=report)
    found = job._answer(awaited(0, 1))
    assert isinstance(found, Missing)
    assert found.reason == reason
    assert found.text.endswith(text)


def test_rank_that_has_ended_before_its_answer_ends_no_other() -> None:
    rank = _Rank.__new__(_Rank)
    rank.connection, theirs = Pipe()
    rank.awaits = awaited(0, 1)
    theirs.close()
    rank.answer(Message())
    assert rank.awaits is None


def test_all_ranks_are_closed_with_one_deadline_even_if_one_raises(job: RankProcesses) -> None:
    def fail(patience: Patience | None) -> None:
        raise OSError("disk full")

    ranks = [add(job, number) for number in range(3)]
    ranks[1].close = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk full"), job:
        raise ValueError
    (first,), (last,) = ranks[0].closed_with, ranks[2].closed_with
    assert first is last is not None


MARK = "TORCHEXT_STUBBORN"
STUBBORN = 'trap "" TERM; echo started; while :; do sleep 0.1; done'


@pytest.fixture
def start() -> Callable[[], ChildProcess]:
    """Start a process that ignores requests to end."""

    def start_one() -> ChildProcess:
        reader, writer = os.pipe()
        environment = {**os.environ, MARK: f"{os.getpid()}-{reader}"}
        process = ChildProcess(["sh", "-c", STUBBORN], environment, MARK, stdout=writer)
        assert os.read(reader, 7) == b"started"
        os.close(reader)
        os.close(writer)
        return process

    return start_one


def test_second_signal_ends_all_processes_at_once(start: Callable[[], ChildProcess]) -> None:
    processes = [start(), start()]

    def end() -> None:
        with raising_on_signals(), Patience(600) as patience:
            os.kill(os.getpid(), signal.SIGTERM)
            for process in processes:
                process.stop(patience)

    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        end()
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2


def test_process_that_does_not_end_is_killed(start: Callable[[], ChildProcess]) -> None:
    process = start()
    with Patience(0.2) as patience:
        process.stop(patience)
    assert process.poll() == -signal.SIGKILL


def test_output_of_a_rank_is_decoded_across_reads(capfd: pytest.CaptureFixture[str]) -> None:
    rank = _Rank(RankProcesses(argparse.Namespace(json=None, markdown=None), *[None] * 3), 0, is_shown=False)  # type: ignore[arg-type]
    assert rank._output is not None
    for part in ("5 °C".encode()[:3], "5 °C".encode()[3:], b" \xe2"):
        os.write(rank._output[0].fileno(), part)
        rank.show_output()
    rank.report = RankReport(0)
    rank.show_output()
    rank.close()
    assert capfd.readouterr().out == "5 °C \N{REPLACEMENT CHARACTER}"
