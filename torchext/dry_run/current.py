"""The open world: its state, the environment of its rank, and the processes that the rank starts.

Process groups belong to the process, so only one world can be open. `world()` opens one with fake tensors, and
`check_init()` one with real tensors.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..descriptions import FakeGPU
from ..fake.cuda.compiler import BREAK, GRAPH, IGNORED, RECOMPILED
from ..internals.leases import Lease
from ..internals.patching import Function

__all__ = ["JOB", "Job", "announce", "being_rank_of", "current", "while_rank_is_alone", "while_world_is_open"]

MOST_PLACES = 4  # of a remark


class Job:
    """The state of an open world, for the replaced functions of PyTorch.

    Attributes:
        size: The number of ranks of the job.
        rank: The rank of this process.
        per_node: The number of ranks and GPUs of a machine.
        gpu: The GPUs of a machine; None for a job without GPUs.
        store: The store of the default process group.
        recorder: Records collectives.
        is_real: Whether tensors are real. Then they are on the CPU, which groups of all backends serve, and
            `init_process_group()` keeps the default group, which a mesh may already use.
        has_own_group: Whether the default process group was made by the world, not by the program.
        compiles: Whether `torch.compile()` has an effect on GPUs.
        ignores_compilers: Whether the program has called `torch.compile()`, without effect.
        has_compiled: Whether it has called a function that it compiles.
        when_left: Callbacks for the end of the block.
    """

    def __init__(self, size: int, rank: int, per_node: int, gpu: FakeGPU | None, store: Any, recorder: Any) -> None:
        self.size = size
        self.rank = rank
        self.per_node = per_node
        self.gpu = gpu
        self.store = store
        self.recorder = recorder
        self.is_real = False
        self.has_own_group = False
        self.compiles = True
        self.ignores_compilers = False
        self.has_compiled = False
        self._compilation: dict[str, Counter[str]] = {}
        self._remarks: dict[str, dict[str, None]] = {}
        self._launches: Counter[str] = Counter()
        self.when_left: ExitStack = ExitStack()
        self._messages: Any = None
        self._process = os.getpid()

    @property
    def messages(self) -> Any:
        """The messages between ranks; None if this rank runs alone, and in processes that it has forked."""
        return self._messages if self._process == os.getpid() else None

    @messages.setter
    def messages(self, messages: Any) -> None:
        self._messages = messages

    def remark(self, text: str, place: str) -> None:
        """Add a remark to the report, once for all places of the program."""
        self._remarks.setdefault(text, {})[place] = None

    def count_launch(self, kernel: str) -> None:
        """Count a launch of a kernel that Triton would have compiled."""
        self._launches[kernel] += 1

    def count_compilation(self, event: str, place: str) -> None:
        """Count a graph, a graph break or a recompilation of `torch.compile()`."""
        self._compilation.setdefault(event, Counter())[place] += 1

    @property
    def remarks(self) -> list[str]:
        """The differences between the dry run and the program, with the places where they occur."""
        remarks = [f"{text} ({_listed(places)})." for text, places in self._remarks.items()]
        if self._compilation:
            remarks.append(_compilation_text(self._compilation))
        if self._launches:
            counts = ", ".join(f"{count} x {kernel}" for kernel, count in self._launches.most_common())
            remarks.append(f"Triton kernels were launched but not run, so their results have no values: {counts}.")
        return remarks

    @property
    def local_rank(self) -> int:
        """The rank within its machine."""
        return self.rank % self.per_node

    @property
    def on_node(self) -> int:
        """The number of ranks of its machine. The last machine may have fewer than `per_node`."""
        return min(self.per_node, self.size - self.rank // self.per_node * self.per_node)


def _compilation_text(events: dict[str, Counter[str]]) -> str:
    graphs, breaks, again, ignored = (events.get(event, Counter()) for event in (GRAPH, BREAK, RECOMPILED, IGNORED))
    parts = [f"{graphs.total()} graph{'' if graphs.total() == 1 else 's'}"]
    parts += [f"breaks at {_listed(breaks)}"] * bool(breaks)
    parts += [f"compiled again for other arguments at {_listed(again)}"] * bool(again)
    parts += [f"without {' and '.join(ignored)}"] * bool(ignored)
    return (
        f"torch.compile() made {'; '.join(parts)}. Its kernels were not compiled or measured: choices that depend on "
        "measurements are those of unpadded matrix products and the first configuration."
    )


def _listed(places: Iterable[str]) -> str:
    """Return the first places, separated by commas. A library may have hundreds of them."""
    known = [place for place in places if place]
    more = [f"and {len(known) - MOST_PLACES} more"] if len(known) > MOST_PLACES else []
    return ", ".join([*known[:MOST_PLACES], *more])


while_world_is_open: Lease = Lease("a block of torchext.dry_run.world() is open")
# `check_init()` shares only patches that do not depend on fakes. For example, PyTorch's own collectives of objects send
# real tensors, whose values it has, and `torch.compile()` can run on the CPU.
while_rank_is_alone: Lease = Lease("a block of torchext.dry_run.world() is open, or check_init() runs a rank")

_open: list[Job] = []


def current() -> Job | None:
    """Return the open world, or None."""
    return _open[0] if _open else None


@contextmanager
def being_rank_of(world: Job, *, is_launched: bool = True) -> Iterator[None]:
    """Make this process the rank of `world` in the block, with the variables of torchrun, or without if not launched.

    Raises:
        RuntimeError: Another world is open.
    """
    if _open:
        raise RuntimeError(
            f"A world is already open in this process, as rank {_open[0].rank} of {_open[0].size}, and only one can be "
            "open. Leave its block first, or use another process."
        )
    _open.append(world)
    try:
        with world.when_left, _torchrun_environment(world, is_launched), while_rank_is_alone.hold():
            yield
    finally:
        _open.remove(world)


# ---- The environment that torchrun gives to each process of a job, and the job that a rank gives to its processes


JOB = "TORCHEXT_DRY_RUN_JOB"
ENTERS = "torchext.dry_run.ranks.child"  # the module whose `enter()` such processes call


@contextmanager
def _torchrun_environment(job: Job, is_launched: bool) -> Iterator[None]:
    """Set the variables that torchrun sets for the process of `job` in the block, or remove them if not launched."""
    saved = dict(os.environ)
    variables = _variables(job)
    if is_launched:
        os.environ.update(variables)
    else:
        for name in variables:
            os.environ.pop(name, None)
    # This variable of a real job selects its store.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


def _variables(job: Job) -> dict[str, str]:
    """Return the variables that `torch.distributed.elastic.agent.server.local_elastic_agent` sets for one role."""
    numbers = {
        "RANK": job.rank,
        "WORLD_SIZE": job.size,
        "LOCAL_RANK": job.local_rank,
        "LOCAL_WORLD_SIZE": job.on_node,
        "GROUP_RANK": job.rank // job.per_node,
        "GROUP_WORLD_SIZE": -(-job.size // job.per_node),
        "ROLE_RANK": job.rank,
        "ROLE_WORLD_SIZE": job.size,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    names = {"ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "torchext-dry-run"}
    return names | {name: str(number) for name, number in numbers.items()}


def announce(*arguments: Any, **keywords: Any) -> None:
    """Let Python processes that start from now on enter `world()` with these arguments."""
    os.environ[JOB] = f"{ENTERS} {base64.b64encode(pickle.dumps((arguments, keywords))).decode()}"


# ---- Programs that start their own processes, one for each GPU of a machine. A dry run runs the process of its rank
#
# `torch.multiprocessing.spawn(train, nprocs=torch.cuda.device_count())` calls `train(i)` in process `i` of the machine.


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
