"""The process of one rank: `python -m torchext.dry_run.child TASK ANSWER`, started by `rank_processes.py`."""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from .. import terminal
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
    leave(run_rank(arguments.pop("program"), **arguments, messages=messages, on_unstoppable=leave_and_exit))


if __name__ == "__main__":
    _run_child(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the interrupted program may wait forever
