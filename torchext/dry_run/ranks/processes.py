"""Run each rank in its own process, and deliver the messages between ranks.

A rank that waits for a message (`messages.py`) receives it when the sender has sent it. If the sender is not running,
its process is started. So a chain of ranks, such as the stages of a pipeline, runs together as far as the ranks need
each other, also those without a report. The messages of a rank stay here when it has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import shlex
import signal
import subprocess
import sys
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any, TextIO

from typing_extensions import Self

from ...descriptions import UNLIMITED, FakeGPU
from ...internals import terminal
from ...reports.model import HOST, NOTES, Goal, RankReport
from ...reports.text import verdict
from ..files import FILES, GUARD, Overlay, changes_in, child_environment, keep_files
from ..protocol import CYCLE, FINISHED, OTHER, Awaited, Channel, Message, Missing, Received, Sent, mismatch
from .launch_lines import Launch

if TYPE_CHECKING:
    from ...advice.remedies import Remedy

__all__ = [
    "PATIENCE",
    "TICK",
    "ChildProcess",
    "Patience",
    "RankProcesses",
    "child_command",
    "environment_for",
    "raising_on_signals",
    "run_to_its_end",
]


# ---- Run the process of a rank, and end it and its child processes, also after signals


ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE = 5.0  # seconds that programs have to end after a signal
TICK = 0.05  # seconds between checks whether a process has ended


class Patience:
    """A block that gives a group of processes some seconds to end, and less if a signal arrives.

    Signals do not interrupt the block. The last one is raised again after it.
    """

    def __init__(self, seconds: float = PATIENCE) -> None:
        self._deadline = time.monotonic() + seconds
        self._signal: int | None = None
        self._handlers = ExitStack()

    @property
    def is_left(self) -> bool:
        """Whether processes still have time to end."""
        return self._signal is None and time.monotonic() < self._deadline

    def __enter__(self) -> Self:
        self._handlers.enter_context(_handling(self._lose, (signal.SIGINT, *ENDING)))
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()
        if self._signal is not None:
            signal.raise_signal(self._signal)

    def _lose(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


class ChildProcess:
    """A running command.

    Args:
        command: The command.
        environment: Its environment.
        mark: The name of an environment variable. Only this command and its child processes have its value.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mark: str, **options: Any) -> None:
        self._entry = f"{mark}={environment[mark]}".encode()
        self._process = subprocess.Popen(command, env=environment, **options)
        self._is_terminating = False
        self._is_alone = False

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._kill_descendants()
        return code

    def wait(self) -> int:
        """Wait until the command ends, and return its exit code."""
        code = self._process.wait()
        self._kill_descendants()
        return code

    def terminate(self) -> None:
        """Send SIGTERM if the command runs, once."""
        if not self._is_terminating and self._process.poll() is None:
            self._is_terminating = True
            self._process.terminate()

    def stop(self, patience: Patience | None = None) -> None:
        """End the command if it runs: send SIGTERM if there is time, then SIGKILL."""
        if patience is not None:
            self.terminate()
            while self._process.poll() is None and patience.is_left:
                time.sleep(TICK)
        self._process.kill()
        self._process.wait()
        self._kill_descendants()

    def _kill_descendants(self) -> None:
        if self._is_alone:
            return
        self._is_alone = True
        for left in _processes_with(self._entry):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], mark: str, **options: Any) -> int:
    """Run a command, with the arguments of `ChildProcess`, and return its exit code.

    Raises:
        SystemExit: This process has received `SIGTERM` or `SIGHUP`.
    """
    with raising_on_signals():
        process = ChildProcess(command, environment, mark, **options)
        try:
            return process.wait()
        finally:
            with Patience() as patience:
                process.stop(patience)


def raising_on_signals() -> AbstractContextManager[None]:
    """Raise `SystemExit` for signals that would end this process at once, so that temporary files are removed."""
    return _handling(_exit, ENDING)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, original in before.items():
            signal.signal(number, original)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells report it


def _processes_with(entry: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


# ---- The processes of a job, and the messages between them


MOST_PROCESSES = 64  # at a time: each takes about half a GiB

Key = tuple[Channel, int]

logger: logging.Logger = logging.getLogger(__name__)


class RankProcesses:
    """The processes of the ranks of a job.

    Args:
        options: The options of the command line.
        launch: The program and the size of the job.
        gpu: The GPUs of a machine.
        goal: The number of steps or forward passes of a rank.
        remedies: The changes of the program; None for a run without advice.
        is_shown: Whether to show the output of the ranks for which reports are requested.

    Attributes:
        out: The stream for reports and for the output of programs: stderr if the JSON report goes to stdout.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        launch: Launch,
        gpu: FakeGPU,
        goal: Goal,
        remedies: Sequence[Remedy] | None = None,
        *,
        is_shown: bool = True,
    ) -> None:
        self.options = options
        self.launch = launch
        self.gpu = gpu
        self.goal = goal
        self.remedies = remedies
        self._is_shown = is_shown
        self.out: TextIO = sys.stderr if terminal.STDOUT in (options.json, options.markdown) else sys.stdout
        self._ranks: dict[int, _Rank] = {}
        self._sent: dict[Key, Message] = {}
        self._received: dict[Key, Received] = {}
        self._mismatches: dict[Key, str] = {}
        self._signals = raising_on_signals()

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as block:
            block.push(self._signals)
            patience = block.enter_context(Patience())
            for rank in self._ranks.values():  # all of them, also after an error
                block.callback(rank.close, None if kind is None else patience)
            if kind is not None:
                for rank in self._running():
                    rank.terminate()

    @property
    def mismatches(self) -> list[str]:
        """Errors about messages whose sizes differ between sender and receiver, as far as both ranks have run."""
        return list(self._mismatches.values())

    def mismatches_of(self, number: int) -> list[str]:
        """Return the errors about messages that rank `number` sends or receives."""
        return [
            text for (channel, _), text in self._mismatches.items() if number in (channel.source, channel.destination)
        ]

    def finished_reports(self) -> list[RankReport]:
        """Return the reports of the ranks that have ended, also of those that ran because another rank waited."""
        return [rank.report for rank in self._ranks.values() if rank.report is not None]

    def report_of(self, number: int, following: Sequence[int] = ()) -> RankReport:
        """Run a rank, if it has not run yet, and return its report. As `--jobs` allows, also run `following` ranks."""
        rank = self._ranks.get(number) or self._start(number, is_shown=self._is_shown)
        ahead = [other for other in following if other not in self._ranks]
        while rank.report is None:
            while ahead and len(self._running()) < self.options.jobs:
                self._start(ahead.pop(0), is_shown=False)
            self._turn()
            self._show_output(rank)
        self._show_output(rank)
        if self.options.keep_files is not None:
            rank.keep_files(self.options.keep_files / f"rank-{number}")
        rank.close()
        return rank.report

    def _show_output(self, rank: _Rank) -> None:
        if self._is_shown:
            rank.show_output()

    def _start(self, number: int, *, is_shown: bool) -> _Rank:
        stdin = subprocess.DEVNULL if self.options.jobs > 1 and self._ranks else None  # processes cannot share it
        self._ranks[number] = rank = _Rank(self, number, is_shown, stdin)  # closed even if starting it fails
        rank.run(self.gpu)
        return rank

    def _print_progress(self, text: str) -> None:
        if not self.options.quiet:
            print(f"[dry run] {text}", file=sys.stderr, flush=True)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if rank.report is None]

    def _turn(self) -> None:
        """Wait briefly for messages from the processes, and answer ranks that wait."""
        running = self._running()
        connections = {rank.connection: rank for rank in running if not rank.has_hung_up}
        if not connections:
            time.sleep(TICK)
        for connection in wait(list(connections), TICK):
            assert isinstance(connection, Connection)
            self._read(connections[connection])
        for rank in running:
            if rank.has_ended():
                while self._read(rank):
                    pass
                rank.go_on_after_end()
                if rank.report is not None:
                    self._print_progress(f"rank {rank.report.rank}: done, {verdict(rank.report.to_dict())}")
        for rank in self._running():
            if rank.awaits is not None:
                answer = self._answer(rank.awaits)
                if answer is not None:
                    rank.answer(answer)

    def _read(self, rank: _Rank) -> bool:
        """Handle a `Sent`, `Received` or `Awaited` from the process of a rank. Return true if there was one."""
        try:
            notice = rank.connection.recv() if rank.connection.poll() else None
        except (EOFError, OSError):
            rank.has_hung_up = True
            return False
        if isinstance(notice, Sent):
            self._sent[notice.channel, notice.number] = notice.message
            self._compare((notice.channel, notice.number))
        elif isinstance(notice, Received):
            self._received[notice.channel, notice.number] = notice
            self._compare((notice.channel, notice.number))
        elif isinstance(notice, Awaited):
            rank.awaits = notice
            logger.debug("rank %d waits for rank %d at %s", notice.receiver, notice.channel.source, notice.place)
        return notice is not None

    def _compare(self, key: Key) -> None:
        sent, received = self._sent.get(key), self._received.get(key)
        if sent is not None and received is not None and sent.nbytes != received.message.nbytes:
            self._mismatches[key] = mismatch(key[0], sent, received.message, received.place)

    def _answer(self, awaited: Awaited) -> Message | Missing | None:
        """Return the answer to a rank that waits; None if it must wait longer."""
        found = self._sent.get((awaited.channel, awaited.number))
        if found is not None:
            return found
        source = awaited.channel.source
        sender = self._ranks.get(source)
        if sender is None:
            if len(self._running()) >= MOST_PROCESSES:
                return Missing(
                    OTHER, f"Rank {source}, the sender, was not started: {MOST_PROCESSES} ranks run already."
                )
            self._print_progress(f"rank {source}: started, because rank {awaited.receiver} waits for its message")
            self._start(source, is_shown=False)
            return None
        if sender.report is not None:
            return Missing(*_about_sender(sender.report))
        cycle = self._cycle(self._ranks[awaited.receiver])
        return None if cycle is None else Missing(CYCLE, _about_cycle(cycle))

    def _cycle(self, first: _Rank) -> list[Awaited] | None:
        """Return the receives of ranks that wait for each other, from `first`; None if it is not among them."""
        chain: list[Awaited] = []
        rank: _Rank | None = first
        while rank is not None and rank.awaits is not None:
            key = rank.awaits.channel, rank.awaits.number
            if rank.report is not None or key in self._sent:
                return None
            chain.append(rank.awaits)
            rank = self._ranks.get(rank.awaits.channel.source)
            if rank is first:
                return chain
            if len(chain) > len(self._ranks):
                return None  # `first` waits for ranks that wait for each other, which are answered themselves
        return None


class _Rank:
    """A rank in its own process, which runs again with unlimited memory if the rank does not fit.

    Attributes:
        report: The report of the rank, when it has ended.
        awaits: The message that the rank waits for.
        connection: The connection to the process.
        has_hung_up: Whether the process has closed its end.
    """

    def __init__(self, job: RankProcesses, number: int, is_shown: bool, stdin: int | None = None) -> None:
        self.report: RankReport | None = None
        self.awaits: Awaited | None = None
        self._job = job
        self._number = number
        self._stdin = stdin
        self._block = ExitStack()
        self._output = None if is_shown else self._files_for_output()
        self._shown = [0, 0]
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in self._shown]
        self._did_not_fit: RankReport | None = None
        self._process: ChildProcess | None = None

    def _files_for_output(self) -> tuple[IO[bytes], IO[bytes]]:
        enter = self._block.enter_context
        return enter(TemporaryFile(prefix="torchext-")), enter(TemporaryFile(prefix="torchext-"))

    def run(self, gpu: FakeGPU) -> None:
        """Start the process, with the memory of `gpu`."""
        folder = self._block.enter_context(TemporaryDirectory(prefix="torchext-", ignore_cleanup_errors=True))
        self._files = Overlay(folder)
        task, self._answer = Path(folder) / "task", Path(folder) / "answer"
        self.connection, theirs = Pipe()
        self.has_hung_up = False
        task.write_bytes(pickle.dumps(self._arguments(gpu, theirs.fileno())))
        command = child_command(self._job.options, folder, "child", task, self._answer)
        logger.debug("rank %d: %s", self._number, shlex.join(command))
        out, err = self._output or (terminal.STDERR if self._job.out is sys.stderr else None, None)
        self._process = ChildProcess(
            command,
            environment_for(self._files, self._job.launch.environment),
            FILES,
            pass_fds=[theirs.fileno()],
            stdin=self._stdin,
            stdout=out,
            stderr=err,
        )
        theirs.close()

    def _arguments(self, gpu: FakeGPU, messages: int) -> dict[str, Any]:
        options, launch = self._job.options, self._job.launch
        per_node, size = launch.per_node or 8, launch.size or 1
        program = _filled_in(launch.program, self._number, self._number % per_node, size)
        is_module = program[0] == "-m"
        return {
            "program": program[1:] if is_module else program,
            "is_module": is_module,
            "size": size,
            "is_launched": launch.size is not None,
            "compiles": not options.no_compile and self._job.remedies is None,  # remedies are for eager programs
            "rank": self._number,
            "gpu": gpu,
            "per_node": per_node,
            "goal": self._job.goal,
            "values": options.values,
            "traces_lines": not options.no_lines,
            "counts_flops": not options.no_flops,
            "is_quiet": options.quiet,
            "is_verbose": options.verbose,
            "remedies": self._job.remedies,
            "messages": None if options.alone or size == 1 else messages,
            "waits_for_threads": self._did_not_fit is None,  # otherwise the real program does not get that far
        }

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process is not None and self._process.poll() is not None

    def go_on_after_end(self) -> None:
        """Read the report, or start the process again with unlimited memory."""
        self.awaits = None
        self.connection.close()
        assert self._process is not None
        report = self._report(self._process.wait())
        if self._did_not_fit is None and report.out_of_memory:
            self._did_not_fit = report
            self.run(replace(self._job.gpu, memory=UNLIMITED))
            return
        if self._did_not_fit is not None:
            report = _with_needs(self._did_not_fit, report, self._job.gpu)
        self.report = report

    def _report(self, code: int) -> RankReport:
        if self._answer.exists():
            report: RankReport = pickle.loads(self._answer.read_bytes())
        else:
            text = _about_end(self._number, code)
            goal = self._job.goal
            report = RankReport(self._number, goal.unit, goal.count, error=text, error_summary=text)
        notes = [pickle.loads(note.read_bytes()) for note in sorted(Path(self._files.folder).glob(f"{NOTES}*[0-9]"))]
        report.has_started_gpu_work = any(any(peaks.values()) for _, peaks in notes)
        report.remarks += dict.fromkeys(_remark_on(command, peaks) for command, peaks in notes)
        report.files = [{"path": one.path, "change": one.what, "bytes": one.nbytes} for one in changes_in(self._files)]
        return report

    def answer(self, answer: Message | Missing) -> None:
        """Answer the process, which waits."""
        self.awaits = None
        with suppress(OSError):  # the process has ended since, which the next turn finds
            self.connection.send(answer)

    def show_output(self) -> None:
        """Copy new output of the process to the terminal, unless the process writes there."""
        for i, (file, stream) in enumerate(zip(self._output or (), (self._job.out, sys.stderr), strict=False)):
            new = os.pread(file.fileno(), os.fstat(file.fileno()).st_size - self._shown[i], self._shown[i])
            self._shown[i] += len(new)
            text = self._decoders[i].decode(new, final=self.report is not None)
            if text:
                stream.write(text)
                stream.flush()

    def keep_files(self, folder: Path) -> None:
        """Copy the files that the program has written to `folder`."""
        keep_files(self._files, str(folder))

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self._process is not None:
            self._process.terminate()

    def close(self, patience: Patience | None = None) -> None:
        """End the process, at once if `patience` is None, and remove its files."""
        with self._block:
            if self.report is None and self._process is not None:
                self._process.stop(patience)
                self.connection.close()


def _with_needs(limited: RankReport, needed: RankReport, gpu: FakeGPU) -> RankReport:
    """Return the report of a rank that does not fit, with the memory that it needs if the second run measured it."""
    if needed.error:
        return limited
    for device in needed.devices:
        if device["device"] not in HOST:
            device["total"] = gpu.memory - gpu.context
            device["headroom"] = device["total"] - device["peak_reserved"]
    needed.out_of_memory = limited.out_of_memory
    return needed


def _about_sender(report: RankReport) -> tuple[str, str]:
    """Return the reason why a rank that has ended sends no more messages."""
    name = f"Rank {report.rank}"
    if report.error:
        return OTHER, f"{name}, the sender, failed in its dry run: {_sentence(report.error_summary)}"
    if report.has_enough and report.requested is not None:
        return FINISHED, f"{name}, the sender, has already reached its goal."
    if report.out_of_memory:
        return OTHER, f"{name}, the sender, ran out of memory in its dry run: {_sentence(report.out_of_memory)}"
    return OTHER, f"{name}, the sender, ended without sending the message."


def _sentence(text: str) -> str:
    """Return the first line, with a period."""
    return text.partition("\n")[0].rstrip(".") + "."


def _about_cycle(chain: Sequence[Awaited]) -> str:
    waits = [
        f"rank {one.receiver} waits{f' at {one.place}' if one.place else ''} for a message from rank "
        f"{one.channel.source}"
        for one in chain
    ]
    return (
        f"Ranks wait for each other, as they would in a job: {', and '.join(waits)}. Change one of them to send before "
        "it receives, or use --alone to assume the values of all messages."
    )


def _filled_in(program: Sequence[str], rank: int, local_rank: int, size: int) -> list[str]:
    """Replace placeholders that are an argument or follow its equals sign."""
    values = {"{rank}": rank, "{local_rank}": local_rank, "{world_size}": size}

    def fill(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return f"{name}{equals}{values.get(value, value)}"

    return [fill(argument) for argument in program]


def _about_end(rank: int, code: int) -> str:
    """Describe the end of a process that has left no report."""
    text = f"The process of rank {rank} ended with code {code}."
    if code in (-signal.SIGSEGV, -signal.SIGBUS):
        text += (
            " The address of a fake tensor has no memory: code in C that reads its data_ptr(), for example with "
            "ctypes, ends the process. Skip that part of the program in a dry run."
        )
    return text


def child_command(options: argparse.Namespace, folder: str, module: str, task: Path, answer: Path) -> list[str]:
    """Return the command that runs a module of this package in a process that changes no files outside of `folder`."""
    guard = [] if options.unguarded else [sys.executable, GUARD, folder]
    return [*guard, sys.executable, "-m", f"torchext.dry_run.ranks.{module}", str(task), str(answer)]


def _remark_on(command: Sequence[str], peaks: Mapping[int, int]) -> str:
    """Return the remark on the memory of a process that the program has started."""
    used = ", ".join(f"{peak / 2**20:,.1f} MiB of cuda:{i}" for i, peak in peaks.items() if peak)
    line = " ".join(shlex.join(command[1:]).split())
    return f"A process that the program started needed {used}, which is not counted: {line[:80]}"


def environment_for(files: Overlay, variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process whose files are kept in `files`, and of the processes that it starts."""
    environment = child_environment(files, {**os.environ, **variables, "TMPDIR": files.temporary})
    return {**environment, "CUDA_VISIBLE_DEVICES": ""}  # real GPUs would hide the fake ones
