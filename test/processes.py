"""Programs of several processes on gloo: `@program` registers one, tests run it by name, and so does `main()`."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch.distributed as dist
from torch.multiprocessing import set_forkserver_preload
from torch.multiprocessing.spawn import start_processes

__all__ = ["forkserver", "main", "program", "run_alone", "run_program"]

T = TypeVar("T")

Function: TypeAlias = Callable[[], None]


class Program(NamedTuple):
    function: Function
    processes: int


PROGRAMS: dict[str, Program] = {}

# Importing these takes longer than most programs. So the processes are forked from one that has done it. It leaves out
# `torch.distributed.fsdp`, and what imports that: one program is about the time when it is imported.
IMPORTED_ONCE = ["torch.distributed.tensor.parallel", "torch.testing"]


def forkserver() -> str:
    """Returns the name of the start method that forks processes from one that has imported these."""
    set_forkserver_preload(IMPORTED_ONCE)
    return "forkserver"


def program(processes: int = 2) -> Callable[[Function], Function]:
    """Registers a function under its name, to be run by so many processes at once."""

    def register(function: Function) -> Function:
        PROGRAMS[function.__name__] = Program(function, processes)
        return function

    return register


def run_program(module: str, name: str, timeout: float = 300) -> None:
    """Runs a program of `module`, and fails with what the first of its processes to fail raised.

    Its processes meet in a file of their own, so programs can run in parallel.
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
    """Returns what a function of an importable module returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context(forkserver())) as pool:
        return pool.submit(function, *args).result()


def main() -> None:
    """Runs the programs that the command line names, of the file that is run."""
    for name in sys.argv[1:]:
        run_program(Path(sys.argv[0]).stem, name)
