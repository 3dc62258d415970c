"""Programs that start their own processes, one for each GPU of a machine. A dry run runs the process of its rank.

`torch.multiprocessing.spawn(train, nprocs=torch.cuda.device_count())` calls `train(i)` in process `i` of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .current import current, while_world_is_open

__all__: list[str] = []


class _Ended:
    """A stand-in for the context of processes that have ended."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _starting_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def start_processes(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *others: Any, **kwargs: Any
    ) -> Any:
        job = current()
        if job is None:
            return original(fn, args, nprocs, join, *others, **kwargs)
        if nprocs != job.on_node:
            raise RuntimeError(
                f"torch.multiprocessing.spawn() was called for {nprocs} processes, but this is a dry run of a job of "
                f"{job.size}, which has {job.on_node} on the machine of rank {job.rank}. Use the size of the job: "
                f"--world-size {nprocs} on one machine, and --per-node {nprocs} on several."
            )
        fn(job.local_rank, *args)
        return None if join else _Ended()

    return start_processes


def _install() -> None:
    while_world_is_open.patch(
        import_module("torch.multiprocessing.spawn"),
        "start_processes",
        _starting_one,
        "starts processes outside of the world",
    )


while_world_is_open.declare(_install)
