"""Programs of several processes on gloo: `@program` registers one, tests run it by name, and so does `main()`."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist
from torch.multiprocessing import set_forkserver_preload
from torch.multiprocessing.spawn import start_processes

__all__ = ["cpu_seconds", "forkserver", "main", "program", "run_alone", "run_program"]

T = TypeVar("T")

Function: TypeAlias = Callable[[], None]


class Program(NamedTuple):
    function: Function
    processes: int


PROGRAMS: dict[str, Program] = {}

# Importing these takes longer than most programs. So the processes are forked from one that has imported them.
# `torch.distributed.fsdp` and modules that import it are excluded, because one program tests its import.
IMPORTED_ONCE = ["torch.distributed.tensor.parallel", "torch.testing"]


def forkserver() -> str:
    """Return the name of the start method that forks processes from one with these imports."""
    set_forkserver_preload(IMPORTED_ONCE)
    return "forkserver"


def cpu_seconds() -> float:
    """Return the CPU time of all programs that have ended, which this process's own times do not include."""
    pid = _forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0
    try:
        children = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15]
    except OSError:  # it has ended
        return 0
    return sum(map(int, children)) / os.sysconf("SC_CLK_TCK")


def program(processes: int = 2) -> Callable[[Function], Function]:
    """Register a function under its name, to be run by `processes` processes at once."""

    def register(function: Function) -> Function:
        PROGRAMS[function.__name__] = Program(function, processes)
        return function

    return register


def run_program(module: str, name: str, timeout: float = 300) -> None:
    """Run a program of `module`, and fail with the error of the first process that failed.

    Its processes meet through their own file, so programs can run in parallel.
    """
    importlib.import_module(module)
    processes = PROGRAMS[name].processes
    with tempfile.TemporaryDirectory() as folder:
        arguments = module, name, str(Path(folder) / "meeting_point")
        context = start_processes(_run, arguments, nprocs=processes, join=False, start_method=forkserver())
        deadline = time.monotonic() + timeout
        while not context.join(max(deadline - time.monotonic(), 0)):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"`{name}` has not ended after {timeout} s.")


def _run(rank: int, module: str, name: str, meeting_point: str) -> None:
    importlib.import_module(module)
    function, processes = PROGRAMS[name]
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=processes)
    try:
        function()
    finally:
        dist.destroy_process_group()


def run_alone(function: Callable[..., T], *args: Any) -> T:
    """Return the result of a function of an importable module in a new process."""
    with ProcessPoolExecutor(1, get_context(forkserver())) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    """Run the named programs of the file that is run."""
    for name in sys.argv[1:]:
        run_program(Path(sys.argv[0]).stem, name)
