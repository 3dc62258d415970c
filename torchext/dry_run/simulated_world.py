"""A rank of a job whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import Self

from .. import _C
from ..descriptions import DEFAULT_VALUES, FakeGPU, as_fake_gpu
from ..fake import fake_mode
from ..fake.addresses import showing_addresses
from ..fake.values import AssumedValue, AssumedValues, ValuePolicy, as_policy, assuming_values
from ..internals.arguments import check_is_int
from ..internals.calls import Block
from ..internals.document import as_html
from . import ddp_reducer, engines, placeholders, saving  # noqa: F401  (declare replacements)
from .adapters import bitsandbytes, deepspeed, transformers  # noqa: F401  (declare replacements)
from .collectives import Collective, CollectiveSummary, summarize
from .current import Job, being_rank_of, current, while_world_is_open
from .process_groups import SingleRankStore, communicating, names_of_nccl
from .recorder import Recorder

__all__ = ["World", "job_of", "world"]

# Programs recognize a CUDA build of PyTorch by `torch.version.cuda`.
CUDA_VERSION = "12.8"

Error = TypeVar("Error", bound=BaseException)
Function = TypeVar("Function", bound=Callable[..., Any])


class World:
    """A block in which this process is a rank of a job, made by `world()`, and the records of what happened in it.

    Attributes:
        size: The number of ranks of the job.
        rank: The rank of this process.
        per_node: The number of ranks and GPUs of a machine.
        gpu: The GPUs of a machine; None for a job without GPUs.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        gpu: FakeGPU | None,
        per_node: int,
        backend: str | None,
        trace: bool,
        set_device: bool,
        values: ValuePolicy,
        is_launched: bool,
        compiles: bool,
    ) -> None:
        self.size = size
        self.rank = rank
        self.per_node = per_node
        self.gpu = gpu
        # PyTorch's C++ does not keep the Python object of a store alive.
        self._job = Job(size, rank, per_node, gpu, SingleRankStore(size, rank), Recorder(trace))
        self._backend = backend
        self._trace = trace
        self._set_device = set_device
        self._policy = values
        self._is_launched = is_launched
        self._job.compiles = compiles
        self._assumed = AssumedValues()
        self._block: ExitStack | None = None

    @property
    def local_rank(self) -> int:
        """The rank within its machine."""
        return self._job.local_rank

    @property
    def remarks(self) -> list[str]:
        """The differences between the dry run and the program, with the places where they occur."""
        return self._job.remarks

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of this rank so far, in the order of the calls."""
        return list(self._job.recorder.collectives)

    def summary(self) -> CollectiveSummary:
        """Return the collectives by group and operator, the most bytes first: a list that prints as a table."""
        return CollectiveSummary(tuple(summarize(self._job.recorder.collectives)))

    @property
    def values(self) -> list[AssumedValue]:
        """The places that read values that do not exist, and the answers, the most frequent first."""
        return self._assumed.sites

    @property
    def value_remarks(self) -> list[str]:
        """The assumptions about routing, and the policies for values that were not used."""
        return self._assumed.remarks

    @property
    def latest_value(self) -> AssumedValue | None:
        """The last of these reads."""
        return self._assumed.latest

    def to_dict(self) -> dict[str, Any]:
        """Return the job, its collectives and the assumed values as builtin types, for JSON."""
        return {
            "size": self.size,
            "rank": self.rank,
            "per_node": self.per_node,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "collectives": [one.to_dict() for one in self.collectives],
            "values": [asdict(value) for value in self.values],
            "remarks": self.remarks,
        }

    def __repr__(self) -> str:
        gpu = "no GPUs" if self.gpu is None else f"{self.gpu.count} x {self.gpu.name}"
        if self.gpu is not None and not self.gpu.has_limit:
            gpu += " (no memory limit)"
        counts = f"collectives: {len(self.collectives)}, assumed values: {sum(v.count for v in self.values)}"
        return f"<World: rank {self.rank} of {self.size}, {gpu}, {counts}>"

    def _repr_html_(self) -> str:
        return as_html([repr(self)[1:-1]]) + self.summary()._repr_html_()

    def __call__(self, function: Function) -> Function:
        """Decorate `function`. Each call has a new world."""
        return Block("world", self._again, is_resumable=False)(function)

    def _again(self) -> Self:
        job = self.size, self.rank, self.gpu, self.per_node, self._backend
        return type(self)(*job, self._trace, self._set_device, self._policy, self._is_launched, self._job.compiles)

    def __enter__(self) -> Self:
        if current() is None and dist.is_initialized():
            raise RuntimeError(
                "This process already has a default process group, but a dry run makes its own. Call "
                "torch.distributed.destroy_process_group() first."
            )
        with ExitStack() as block:
            block.enter_context(being_rank_of(self._job, is_launched=self._is_launched))
            block.enter_context(while_world_is_open.hold())
            block.enter_context(showing_addresses())
            block.enter_context(fake_mode(gpu=self.gpu or False))
            if self.gpu is not None and torch.version.cuda is None:
                torch.version.cuda = CUDA_VERSION
                block.callback(setattr, torch.version, "cuda", None)
            if self.gpu is not None:
                block.enter_context(names_of_nccl())
            if self.gpu is not None and self._set_device:
                # Metadata of "cuda" are cached for the device that was current.
                FakeTensorMode.cache_clear()
                block.callback(FakeTensorMode.cache_clear)
                torch.cuda.set_device(self.local_rank)
            block.enter_context(engines.observing_kernels(self._job))
            self._assumed = block.enter_context(assuming_values(self._policy))
            _C.materialize_as_fakes(True)
            block.callback(_C.materialize_as_fakes, False)
            block.enter_context(communicating(self._job, self._backend))
            self._block = block.pop_all()
        return self

    def __exit__(self, error_type: type[Error] | None, error: Error | None, traceback: TracebackType | None) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(error_type, error, traceback)


def job_of(world: World) -> Job:
    """Return the state of a world, for the modules of dry runs."""
    return world._job


def world(
    size: int,
    rank: int = 0,
    gpu: FakeGPU | str | int | None = "H100-80GB",
    per_node: int = 8,
    *,
    backend: str | None = "default",
    trace: bool = False,
    set_device: bool = True,
    values: str | ValuePolicy = DEFAULT_VALUES,
    is_launched: bool = True,
    compiles: bool = True,
) -> World:
    """Return a block in which this process is a rank of a distributed job, on fake GPUs.

    In the block

    - tensors are fake, as in `fake_mode(gpu=...)`;
    - environment variables are those that torchrun sets;
    - process groups of any size exist. Their collectives return at once, and are recorded. Results have shapes and
      dtypes, but no values;
    - collectives of Python objects return the objects of this rank, as if all ranks had the same ones. They raise an
      error where only another rank can have the object.

    Args:
        size: The number of ranks of the job.
        rank: The rank of this process.
        gpu: The GPUs: the name of a model, a `FakeGPU`, or a number of devices, which have no memory limit; None for a
            job on CPUs. If the job has several ranks, `per_node` replaces the count.
        per_node: The number of ranks and GPUs of a machine.
        backend: The backend of the default process group. Default: `cpu:gloo,cuda:nccl`, or `gloo` without GPUs.
            `init_process_group()` in the block replaces this group. With None the block has no default group until the
            program initializes it, as under torchrun.
        trace: Whether to record the source lines of collectives, which is slower.
        set_device: Whether the GPU of this rank is the current device. A real process begins with device 0.
        values: How to answer reads of values that do not exist: `raise` an error, or `assume` values, which are listed
            in `World.values`. Policies for masks and routing may follow, as in `assume,masks=half,routing=same`. A
            `ValuePolicy`, or its text:
            docs/how_to/dry_runs.md, "Choose values that do not exist".
        is_launched: Whether to set the environment variables of torchrun. Without them programs train alone, or start
            processes themselves.
        compiles: Whether `torch.compile()` compiles functions, up to the kernels of the GPU. If not, or if Triton is
            not installed, they run eagerly.

    Returns:
        A context manager, which is also a decorator. Only one can be open in a process.

    Raises:
        RuntimeError: GPUs are described, but there are real CUDA devices: hide them (`CUDA_VISIBLE_DEVICES=`).
        TypeError: A number is not an int, or `values` is not a policy.
        ValueError: The rank is out of range, or the GPU or the policy for values is unknown.

    Example:
        >>> with world(1024, rank=511) as job:
        ...     torch.distributed.all_reduce(torch.ones(4, device="cuda"))
        >>> job.collectives[0].operator, job.collectives[0].bytes_sent, job.collectives[0].group_size
        ('allreduce', 16, 1024)
    """
    for name, value in (("size", size), ("rank", rank), ("per_node", per_node)):
        check_is_int(value, name)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"A world of size {size} has no rank {rank}: ranks are from 0 to {size - 1}.")
    if per_node < 1:
        raise ValueError(f"`per_node`: expected at least 1, got {per_node}.")
    described = as_fake_gpu(gpu)
    if described is not None and size > 1:
        described = replace(described, count=min(per_node, size))
    if backend == "default":
        backend = "gloo" if described is None else "cpu:gloo,cuda:nccl"
    return World(size, rank, described, per_node, backend, trace, set_device, as_policy(values), is_launched, compiles)
