"""The process of one rank: `python -m torchext.dry_run.child TASK ANSWER`, started by `rank_processes.py`."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from .. import terminal
from .ending import PATIENCE
from .messages import Messages
from .rank_report import RankReport
from .running import run_rank

__all__: list[str] = []


def _run_child(task: Path, answer: Path) -> None:
    """Run the rank that the file `task` describes, and write the report to the file `answer`."""

    def leave(report: RankReport) -> None:
        answer.write_bytes(pickle.dumps(report))

    def leave_and_exit(report: RankReport) -> None:
        leave(report)
        sys.stdout.flush()
        os._exit(0)

    arguments = pickle.loads(task.read_bytes())
    descriptor = arguments.pop("messages")
    if arguments.pop("is_verbose"):
        terminal.log_to_stderr()
    messages = None
    if descriptor is not None:
        os.set_inheritable(descriptor, False)  # processes that the program starts do not communicate
        messages = Messages(Connection(descriptor), arguments["rank"])

    def end(report: RankReport, is_stopped: bool) -> None:
        leave(report)  # handlers of the program may end the process
        _end_as_python_does(is_stopped)

    arguments |= {"messages": messages, "on_unstoppable": leave_and_exit, "on_end": end}
    run_rank(arguments.pop("program"), **arguments)


def _end_as_python_does(is_stopped: bool) -> None:
    """Wait for threads, and call `atexit` handlers, which also unregister operators of PyTorch.

    A stopped program has threads, processes and queues that may never end, so it has a limited time.
    """
    sys.stdout.flush()
    if is_stopped:
        limit = threading.Timer(PATIENCE, os._exit, (0,))
        limit.daemon = True
        limit.start()
        for process in multiprocessing.active_children():
            process.kill()
    else:
        for function in reversed(getattr(threading, "_threading_atexits", ())):  # ends the threads of executors
            function()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    atexit._run_exitfuncs()


if __name__ == "__main__":
    _run_child(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the interrupted program may wait forever
