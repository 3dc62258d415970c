"""Programs that start their own processes, one for each GPU of a machine. A dry run runs the process of its rank.

`torch.multiprocessing.spawn(train, nprocs=torch.cuda.device_count())` calls `train(i)` in process `i` of the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..internals.patching import Function
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


@while_world_is_open.replaces(
    "torch.multiprocessing.spawn", "start_processes", reason="starts processes outside of the world"
)
def _start_processes(
    original: Function,
    /,
    fn: Callable[..., Any],
    args: Any = (),
    nprocs: int = 1,
    join: bool = True,
    *others: Any,
    **kwargs: Any,
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
