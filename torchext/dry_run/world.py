"""One process of a job of many, the others of which do not exist."""

from __future__ import annotations

from contextlib import ContextDecorator, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from .. import _C
from ..fake import fake_mode
from ..fake.addresses import showing_addresses
from ..fake.assumed_values import AssumedValue, AssumedValues, assuming_values
from ..fake.gpus import FakeGPU
from . import compiling, data, ddp_reducer, launchers, process_groups  # noqa: F401  (declares what is replaced)
from .checked_agreement import agreeing_with_rank_0
from .collectives import Collective, GroupSummary, summarize
from .current import Job, enter, leave, while_world_is_open
from .environment import torchrun_environment
from .late_imports import teach_what_is_imported
from .meshes import meshes_of_its_own
from .nccl import names_of_nccl
from .paged_memory import refusing_paged_memory
from .pretrained import models_without_weights
from .recorder import Recorder
from .saving import not_writing_fakes
from .store import LonelyStore
from .triton_driver import triton_in_a_world

__all__ = ["World", "world"]

# Programs ask whether this PyTorch has been built for CUDA by this number.
CUDA_VERSION = "12.8"

Error = TypeVar("Error", bound=BaseException)


class World(Job, ContextDecorator):
    """What `world()` returns: a block, and what has happened in it.

    Attributes:
        size: How many processes the job has.
        rank: The rank of the one that is there.
        per_node: How many share a machine.
        gpus: What the GPUs of its machine are like; None if it has none.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        gpus: FakeGPU | None,
        per_node: int,
        backend: str | None,
        trace: bool,
        set_device: bool,
        values: str,
        is_launched: bool,
    ) -> None:
        # PyTorch's C++ does not keep alive what Python knows of the store.
        super().__init__(size, rank, per_node, gpus, LonelyStore(size, rank), Recorder(trace))
        self._backend = backend
        self._trace = trace
        self._set_device = set_device
        self._policy = values
        self._is_launched = is_launched
        self._assumed = AssumedValues()
        self._block: ExitStack | None = None

    @property
    def collectives(self) -> list[Collective]:
        """What this process has sent and received so far, in the order of the calls."""
        return list(self.recorder.collectives)

    def summary(self) -> list[GroupSummary]:
        """The collectives by group and operator, the most bytes first."""
        return summarize(self.recorder.collectives)

    @property
    def values(self) -> list[AssumedValue]:
        """Where the program has read values that do not exist, if the policy is to answer."""
        return self._assumed.sites

    @property
    def latest_value(self) -> AssumedValue | None:
        """What the program has read last of these."""
        return self._assumed.latest

    def _recreate_cm(self) -> Self:
        """A decorated function has a world of its own for each call."""
        return type(self)(
            self.size,
            self.rank,
            self.gpus,
            self.per_node,
            self._backend,
            self._trace,
            self._set_device,
            self._policy,
            self._is_launched,
        )

    def __enter__(self) -> Self:
        if dist.is_initialized():
            raise RuntimeError(
                "The default process group of this process is initialized, and a dry run makes its own. Call "
                "torch.distributed.destroy_process_group() before it."
            )
        with ExitStack() as block:
            teach_what_is_imported()
            enter(self)
            block.callback(leave, self)
            block.callback(self.when_left.close)
            block.enter_context(torchrun_environment(self, self._is_launched))
            block.enter_context(while_world_is_open.hold())
            block.enter_context(showing_addresses())
            block.enter_context(fake_mode(gpu=self.gpus or False))
            if self.gpus is not None and torch.version.cuda is None:
                torch.version.cuda = CUDA_VERSION
                block.callback(setattr, torch.version, "cuda", None)
            if self.gpus is not None:
                block.enter_context(names_of_nccl())
            if self.gpus is not None and self._set_device:
                torch.cuda.set_device(self.local_rank)
            block.enter_context(compiling.noting_graphs(self))
            block.enter_context(triton_in_a_world(self))
            block.enter_context(refusing_paged_memory())
            block.enter_context(agreeing_with_rank_0())
            block.enter_context(models_without_weights())
            block.enter_context(meshes_of_its_own())
            self._assumed = block.enter_context(assuming_values(self._policy))
            block.enter_context(not_writing_fakes())
            block.callback(_destroy_groups)
            block.callback(self.recorder.close)
            _C.observe_collectives(self.recorder.observe)
            block.callback(_C.observe_collectives, None)
            if self._backend is not None:
                process_groups.initialize(self._backend)
                self.has_own_group = True
            self._block = block.pop_all()
        return self

    def __exit__(self, error_type: type[Error] | None, error: Error | None, traceback: TracebackType | None) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(error_type, error, traceback)


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def world(
    size: int,
    rank: int = 0,
    gpus: FakeGPU | str | None = "H100-80GB",
    per_node: int = 8,
    *,
    backend: str | None = "default",
    trace: bool = False,
    set_device: bool = True,
    values: str = "raise",
    is_launched: bool = True,
) -> World:
    """Makes this process one of many, on machines with GPUs, none of which need to be there.

    In the block tensors are fake, as in `fake_mode(gpu=...)`; the environment is that of torchrun; and process
    groups are there, of any size, in which collectives return at once and are recorded. What other processes would
    send has shapes and dtypes, but no values. Collectives of Python objects return what this process says, as if all
    said the same; what only another process can know raises an error.

    Args:
        size: How many processes the job has.
        rank: The rank of this one.
        gpus: What the GPUs are like, or the name of a model; None for a job on CPUs. For a job of several processes
            `count` is replaced by `per_node`.
        per_node: How many processes, and GPUs, a machine has.
        backend: The backend of the default process group; by default `cpu:gloo,cuda:nccl`, or `gloo` without GPUs.
            `init_process_group()` in the block replaces this group by the one that it is asked for. With None there is
            no group until the program initializes it, as under torchrun.
        trace: Whether the lines of the program that led to collectives are recorded, which takes longer.
        set_device: Whether the GPU of this process is the current device. A real process begins with device 0.
        values: What becomes of a program that reads values that are not known: `raise` an error, or `assume` some,
            which are counted in `World.values`. Policies for masks and for routing may follow, as in
            `assume,masks=half,routing=same`: docs/how_to/dry_runs.md, "Values".
        is_launched: Whether the environment says that torchrun has started the process. If not, programs find what they
            find without a launcher: they train alone, or start processes themselves.

    Returns:
        A block, which is also a decorator. Only one can be open in a process.

    Raises:
        RuntimeError: GPUs are described, but there are real CUDA devices: hide them (`CUDA_VISIBLE_DEVICES=`).
        ValueError: There is no such rank, GPU, or policy for values.

    Example:
        >>> with world(1024, rank=511) as job:
        ...     torch.distributed.all_reduce(torch.ones(4, device="cuda"))
        >>> job.collectives[0].operator, job.collectives[0].bytes_in, job.collectives[0].group_size
        ('allreduce', 16, 1024)
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"A world of size {size} has no rank {rank}: ranks are from 0 to {size - 1}.")
    if per_node < 1:
        raise ValueError(f"`per_node` was expected to be at least 1, but is {per_node}.")
    if isinstance(gpus, str):
        gpus = FakeGPU(gpus)
    if gpus is not None and size > 1:
        gpus = replace(gpus, count=min(per_node, size))
    if backend == "default":
        backend = "gloo" if gpus is None else "cpu:gloo,cuda:nccl"
    return World(size, rank, gpus, per_node, backend, trace, set_device, values, is_launched)
