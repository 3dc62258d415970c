"""The process of one rank: `python -m torchext.dry_run.ranks.child TASK ANSWER`, started by `processes.py`."""

from __future__ import annotations

import atexit
import base64
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from ...fake.fake_tensor_mode import threads_inherit_blocks
from ...internals import terminal
from ...reports.model import NOTES, RankReport
from ..current import JOB
from ..messages import Messages
from ..saving import files_apart
from ..simulated_world import world
from .processes import PATIENCE
from .running import run_rank

__all__ = ["enter"]


def _run_child(task: Path, answer: Path) -> None:
    """Run the rank that the file `task` describes, and write the report to the file `answer`."""

    def leave(report: RankReport) -> None:
        answer.write_bytes(pickle.dumps(report))

    def leave_and_exit(report: RankReport) -> None:
        leave(report)
        _flush()
        os._exit(0)

    arguments = pickle.loads(task.read_bytes())
    descriptor = arguments.pop("messages")
    waits_for_threads = arguments.pop("waits_for_threads")
    if arguments.pop("is_verbose"):
        terminal.log_to_stderr()
    messages = None
    if descriptor is not None:
        os.set_inheritable(descriptor, False)  # processes that the program starts do not communicate
        messages = Messages(Connection(descriptor), arguments["rank"])

    def end(report: RankReport, is_stopped: bool) -> None:
        leave(report)  # handlers of the program may end the process
        _flush()
        if is_stopped or report.error or report.out_of_memory or not waits_for_threads:
            _limit_the_end()
        if not is_stopped:
            _join_threads()
        atexit._run_exitfuncs()  # they also unregister operators of PyTorch

    arguments |= {"messages": messages, "on_unstoppable": leave_and_exit, "on_end": end}
    run_rank(arguments.pop("program"), **arguments)


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # the program may have closed or removed it
            file.flush()


def _join_threads() -> None:
    """Wait for threads as Python does at its end, and print which ones if they take long."""
    timer = _timer(lambda: _print(f"waits for threads, as Python does at its end: {[one.name for one in _threads()]}"))
    for function in reversed(getattr(threading, "_threading_atexits", ())):  # ends the threads of executors
        function()
    for thread in _threads():
        thread.join()
    timer.cancel()


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]


def _limit_the_end() -> None:
    """End the process after some seconds: threads and handlers of a stopped or failed program may never end."""

    def leave() -> None:
        _print(f"ended the program's threads and `atexit` handlers after {PATIENCE:.0f} s")
        os._exit(0)

    _timer(leave)


def _timer(function: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(PATIENCE, function)
    timer.daemon = True
    timer.start()
    return timer


def _print(text: str) -> None:
    print(f"[dry run] {text}", file=sys.stderr, flush=True)


# ---- Python processes that the program of a dry run starts: they have the same job and fake GPUs as the rank
#
# They begin without PyTorch. `files/startup/sitecustomize.py` calls `enter()` when one has imported it. The rank does
# not count their memory, but reports the peaks of those that end by themselves.


# A process of PyTorch's compiler, which gets source code only.
COMPILER = "torch/_inductor/compile_worker/__main__.py"


def enter() -> None:
    """Enter the announced job for the rest of this process, and note the peaks of its GPUs at the end.

    A process that was started as another rank stays that rank. Its environment does not change.
    """
    if any(word.endswith(COMPILER) for word in sys.orig_argv):
        return
    (size, rank, *arguments), keywords = pickle.loads(base64.b64decode(os.environ[JOB].partition(" ")[2]))
    environment = dict(os.environ)
    with suppress(KeyError, ValueError):
        named = int(environment["WORLD_SIZE"]), int(environment["RANK"])
        size, rank = named if 0 <= named[1] < named[0] else (size, rank)
    blocks = ExitStack()
    blocks.enter_context(world(size, rank, *arguments, backend=None, set_device=False, **keywords))
    blocks.enter_context(threads_inherit_blocks())
    os.environ.clear()
    os.environ.update(environment)
    Finalize(None, _leave, (blocks,), exitpriority=0)


def _leave(blocks: ExitStack) -> None:
    peaks = {i: torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    if any(peaks.values()):
        real = sys.modules["torchext_dry_run_files.tree"].real
        path = f"{files_apart().folder}/{NOTES}{os.getpid()}"
        note = real.open(f"{path}.part", os.O_CREAT | os.O_WRONLY, 0o600)
        real.write(note, pickle.dumps((sys.orig_argv, peaks)))
        real.close(note)
        real.rename(f"{path}.part", path)
    with suppress(RuntimeError):  # entered on another thread
        blocks.close()


if __name__ == "__main__":
    _run_child(Path(sys.argv[1]), Path(sys.argv[2]))
    _flush()
    os._exit(0)  # threads of the interrupted program may wait forever
