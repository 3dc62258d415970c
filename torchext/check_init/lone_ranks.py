"""Runs the ranks of a job one after the other, with real tensors on the CPU.

Each rank runs in a forked process with a process group whose other ranks do not run. A rank that broadcasts or scatters
posts the values, so ranks that run later receive them, as in the job. Other collectives depend on values that do not
exist. They behave as if all ranks had the values of this rank. A second run of the rank changes their results: tensors
that differ between the two runs depend on other ranks.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import inspect
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from ..descriptions import ENGINES
from ..errors import RankFailedError
from ..internals.source_lines import place_of, users_frame

__all__ = ["Job", "apply_engine", "check_engine", "initialize_meta", "run_rank"]

T = TypeVar("T")

BACKEND = "lone"
PATIENCE = timedelta(seconds=1)
"""The time after which a read of the store raises an error: no other rank runs."""
DEVICE_FOLDERS = tuple(f"{Path(torch.__file__).parent / one}{os.sep}" for one in ("cuda", "accelerator"))
ON_CPU = "\ncheck-init runs on the CPU: use the mesh that is passed, and guard set_device()."
PR_SET_PDEATHSIG = 1
FRESH_SEED = 67280421310721  # `c10::default_rng_seed_val`


@dataclass
class Job:
    """A rank to run, and the results of its collectives.

    Attributes:
        sizes: The names and sizes of the dimensions of the mesh.
        rank: The rank.
        folder: The directory for the values that ranks send.
        sends: Whether deferred tensors are sent instead of recomputed, because ranks have recorded different values.
        is_perturbed: Whether to change the results of collectives that need values of other ranks.
        is_reference: Whether it is the one process that ranks are compared with.
        unknown: The collectives that need values of other ranks, with their lines.
    """

    sizes: Mapping[str, int]
    rank: int
    folder: Path
    sends: bool = False
    is_perturbed: bool = False
    is_reference: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def name(self) -> str:
        """The name of this rank in errors."""
        return "the one process that ranks are compared with" if self.is_reference else f"rank {self.rank}"

    @property
    def disagreement(self) -> Path:
        """A file that exists once ranks have recorded different values, so that the job would send those of one."""
        return self.folder / "disagreement"


def run_rank(job: Job, function: Callable[[Job], T]) -> T:
    """Return the result of `function(job)` in a forked process that is a rank of a job.

    Raises:
        RankFailedError: It raised an error, or the process died.
    """
    parent = os.getpid()
    context = multiprocessing.get_context("fork")  # closures need no pickling, and the program is imported once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, function, sender, parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; the child does not use them
        process.start()
    sender.close()
    try:
        is_done, result = receiver.recv()
    except EOFError:
        process.join()
        raise RankFailedError(f"The process of {job.name} ended with exit code {process.exitcode}.") from None
    finally:
        receiver.close()
        if sys.exc_info()[0] is not None:
            process.kill()
        process.join()
    if not is_done:
        raise RankFailedError(f"The program failed in {job.name}:\n{result}")
    return result  # type: ignore[no-any-return]


def _run(job: Job, function: Callable[[Job], object], sender: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    gc.freeze()  # collections would copy the memory that is shared with the parent
    os.dup2(2, 1)  # the output of the program must not mix with the report
    result: tuple[bool, object]
    try:
        _become(job)
        result = True, function(job)
    except BaseException as error:  # also SystemExit, so that the parent can report it
        result = False, _text_of(error)
    sender.send(result)
    sender.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the program may have replaced or closed them
            stream.flush()
    os._exit(0)  # no destructors and exit handlers of the parent


def _text_of(error: BaseException) -> str:
    """Return the traceback from the first frame outside of this package, or only the message of our own errors."""
    files = [one.filename for one in traceback.extract_tb(error.__traceback__)]
    needs_device = "CUDA" in str(error) or any(one.startswith(DEVICE_FOLDERS) for one in files)
    return _traceback_of(error).rstrip() + (ON_CPU if needs_device else "")


def _traceback_of(error: BaseException) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parents[1])):
        frame = frame.tb_next
    if frame is None and isinstance(error, ValueError | TypeError):
        return "".join(traceback.format_exception_only(error))
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _become(job: Job) -> None:
    """Give this process the state that torchrun gives to a rank."""
    if job.rank > 0 or job.size == 1:
        warnings.simplefilter("ignore")  # rank 0 has shown them
    torch.set_num_threads(1)  # the OpenMP threads of the parent do not exist after fork
    names = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.size, "LOCAL_WORLD_SIZE": job.size}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.manual_seed(FRESH_SEED)
    random.seed(job.rank + 1 if job.size > 1 else 0)  # new processes have different seeds in Python and NumPy
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: _LoneGroup(job, rank, size), devices=["cpu"]
    )
    store = torch._C._distributed_c10d.HashStore()
    store.set_timeout(PATIENCE)
    dist.init_process_group(BACKEND, store=store, rank=job.rank, world_size=job.size)
    c10d = dist.distributed_c10d
    c10d._new_process_group_helper = _without_backend(c10d._new_process_group_helper)
    c10d._get_default_timeout = lambda backend: dist.default_pg_timeout  # it warns of nccl where PyTorch lacks it
    # It refuses backends other than gloo.
    dist.monitored_barrier = c10d.monitored_barrier = lambda *args, **kwargs: None
    # Programs call it, but a second default group is an error.
    dist.init_process_group = c10d.init_process_group = lambda *args, **kwargs: None
    # It gathers the shapes, which are the same in programs that run. The results would not exist.
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _without_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that constructs groups of `BACKEND` for every backend: real ones connect to other ranks."""
    signature = inspect.signature(original)

    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments |= {"backend": dist.Backend(BACKEND), "backend_options": None, "device_id": None}
        return original(*given.args, **given.kwargs)

    return _new_process_group_helper


ProcessGroup: Any = dist.ProcessGroup


class _LoneGroup(ProcessGroup):  # type: ignore[misc]
    """A process group whose other ranks do not run.

    PyTorch's C++ calls the methods through its trampoline `PyProcessGroup`, which fixes their names.
    """

    def __init__(self, job: Job, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._job = job
        self._calls = 0

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def agrees_on(self, digest: str) -> bool:
        """Return True unless the job sends deferred tensors. Compare the digest with that of the first rank."""
        if self._job.sends:
            return False
        file = self._next_file()
        if not file.exists():
            file.write_text(digest)
        elif file.read_text() != digest:
            self._job.disagreement.touch()
        return True

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._send(opts.rootRank, tensors, tensors, lambda sent: sent)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        return self._send(opts.rootRank, outputs, inputs, lambda sent: [sent[self.rank()]])

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        return self._assume(_flat(tensors), tensors)

    allreduce_coalesced = reduce = recv = recv_anysource = allreduce

    def allgather(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        """Fill each output with the inputs, as often as they fit."""
        outs, ins = _flat(outputs), _flat(inputs)
        sources = ins if len(ins) == len(outs) else [torch.cat([one.reshape(-1) for one in ins])] * len(outs)
        counts = [-(-out.numel() // max(1, source.numel())) for out, source in zip(outs, sources, strict=True)]
        values = [source.reshape(-1).repeat(count) for source, count in zip(sources, counts, strict=True)]
        return self._assume(outs, [value[: out.numel()] for out, value in zip(outs, values, strict=True)])

    gather = reduce_scatter = alltoall = all_gather_single = all_gather_single_coalesced = all_to_all_single = allgather
    reduce_scatter_single = reduce_scatter_single_coalesced = allgather
    # The names before PyTorch 2.13.
    _allgather_base = allgather_into_tensor_coalesced = alltoall_base = allgather
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = allgather

    def barrier(self, *_: Any, **__: Any) -> Any:  # `dist.barrier` names `opts`
        return _finished([])

    send = barrier

    def _next_file(self) -> Path:
        """Return the file of this call. All ranks of the group make the same calls."""
        self._calls += 1
        key = dist.get_process_group_ranks(self), self.group_name, self._calls
        return self._job.folder / hashlib.sha256(repr(key).encode()).hexdigest()

    def _send(self, root: int, outputs: list[Tensor], inputs: Any, own: Callable[[list[Tensor]], Any]) -> Any:
        file = self._next_file()
        perturbed = file.with_suffix(".perturbed")
        if self.rank() == root:
            sent = _flat(inputs)
            if self.size() > 1:
                torch.save(sent, perturbed if self._job.is_perturbed else file)
        elif file.exists():
            sent = torch.load(perturbed if self._job.is_perturbed and perturbed.exists() else file)
        else:
            return self._assume(_flat(outputs), outputs)
        _copy(_flat(outputs), own(sent))
        return _finished(outputs)

    def _assume(self, outputs: list[Tensor], values: Sequence[Tensor]) -> Any:
        _copy(outputs, values)
        if self.size() > 1:
            self._job.unknown.append(f"{sys._getframe(1).f_code.co_name} at {place_of(users_frame()) or 'unknown'}")
            if self._job.is_perturbed:
                _copy(outputs, map(_perturbed, outputs))
        return _finished(outputs)


def _perturbed(values: Tensor) -> Tensor:
    """Return values that all differ from `values`, also where adding 1 gives the same number."""
    if values.dtype is torch.bool:
        return ~values
    changed = values + 1
    return changed.where(changed.isfinite() & (changed != values), values.eq(0).to(values.dtype))


def _flat(tensors: Any) -> list[Tensor]:
    """Return the tensors in nested lists. Deferred ones become real, as by the operators of c10d, which are not called.

    Methods of a process group in Python are called directly.
    """
    if not isinstance(tensors, Tensor):
        return [one for part in tensors for one in _flat(part)]
    if _C.is_deferred(tensors):
        _C.materialize([tensors])
    return [tensors]


def _copy(outputs: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for output, value in zip(outputs, values, strict=True):
            if output is not value:
                output.copy_(value.view_as(output))


def _finished(result: object) -> Any:
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


# ---- PyTorch's engines of parallelism, applied to a module as a training program does


TENSOR_PARALLEL = "tp"
"""The name of the mesh dimension of tensor parallelism."""

Plan = Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]] | None


def check_engine(engine: str, names: Sequence[str]) -> None:
    """Check that an engine exists and can use a mesh with dimensions of these names.

    Raises:
        ValueError: It cannot.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    counts, needs = ENGINES[engine]
    if counts and len(_split(engine, names)[1]) not in counts:
        raise ValueError(f"the engine {engine} needs {needs} besides `tp`, but the mesh has {', '.join(names)}")


def _split(engine: str, names: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the mesh dimension of tensor parallelism, and the others."""
    tensor_dim = names[0] if engine == "tp" and len(names) == 1 else TENSOR_PARALLEL
    return tensor_dim if tensor_dim in names else None, [name for name in names if name != tensor_dim]


def apply_engine(module: nn.Module, mesh: DeviceMesh, engine: str, plan: Plan) -> nn.Module:
    """Return `module` sharded or replicated on `mesh`.

    Args:
        module: A module: real, deferred or on the device `meta`.
        mesh: A mesh for which `check_engine` raises no error.
        engine: One of `ENGINES`.
        plan: The plan of tensor parallelism: a dict for `parallelize_module()`, or a function that returns it for the
            module. Default: `module.tp_plan`, as models of transformers have it.

    Raises:
        ValueError: There is no plan, or it has a style of transformers without an equal in PyTorch.
    """
    if engine == "none":
        return module
    tensor_dim, others = _split(engine, mesh.mesh_dim_names or ())
    if tensor_dim is not None:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh[tensor_dim], _styles(plan(module) if callable(plan) else plan, module))
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(module, process_group=mesh[others[0]].get_group())
    if others:
        _shard(module, mesh[others[0]] if len(others) == 1 else mesh[tuple(others)])
    return module


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `fully_shard` to the entries of the outermost module lists, then to the root."""
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _blocks(parent: nn.Module) -> Iterator[nn.Module]:
    lists = (nn.ModuleList, nn.ModuleDict)
    for child in parent.children():
        if isinstance(parent, lists) and not isinstance(child, lists):
            yield child
        else:
            yield from _blocks(child)


def _styles(plan: Mapping[str, Any] | None, module: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    found = plan if plan is not None else getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not found:
        raise ValueError(
            f"Tensor parallelism of {type(module).__name__} needs a plan: pass `plan`, a dict for parallelize_module()."
        )
    known: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    for name, style in found.items():
        if isinstance(style, str) and style not in known:
            raise ValueError(
                f"The plan of {type(module).__name__} has the style {style!r} for `{name}`, which has no equal in "
                "torch.distributed.tensor.parallel: pass `plan`, or shard the module in the function."
            )
    return {name: known[style]() if isinstance(style, str) else style for name, style in found.items()}


def initialize_meta(module: nn.Module, initialize: Callable[[nn.Module], object] | None, *, filler: int = 0) -> None:
    """Give the tensors of `module` that are on the device `meta` memory on the CPU, and initialize them.

    Args:
        module: The sharded module. If it has no such tensors, only a given `initialize` is called.
        initialize: A function for the module. Default: its method `init_weights()`, or the method
            `reset_parameters()` of each of its submodules.
        filler: The value that they have before they are initialized.

    Raises:
        ValueError: A submodule with parameters or buffers has no such method.
    """
    method: Any = getattr(module, "init_weights", None)
    has_meta = any(one.is_meta for one in chain(module.parameters(), module.buffers()))
    if has_meta:
        module.to_empty(device="cpu")
    with torch.no_grad():
        for one in chain(module.parameters(), module.buffers()) if has_meta else ():
            one.fill_(filler)
        if initialize is not None:
            initialize(module)
        elif has_meta and _takes_nothing(method):
            method()
        elif has_meta:
            for name, part in module.named_modules():
                reset: Any = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False))):
                    raise ValueError(
                        f"`{name}` ({type(part).__name__}) is on the meta device and has no reset_parameters(): pass "
                        "`initialize`, a function that initializes the sharded module."
                    )


def _takes_nothing(method: Any) -> bool:
    if not callable(method):
        return False
    return all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        for one in inspect.signature(method).parameters.values()
    )
