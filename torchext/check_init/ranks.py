"""Runs the ranks of a job one after the other, with real tensors on the CPU.

Each rank runs in a forked process, in the simulated world of dry runs (`dry_run/current.py`), whose other ranks do not
run. `messages.py` gives it the values of ranks that ran before.
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
from functools import partial
from itertools import chain
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..deferred_init import recording
from ..descriptions import ENGINES
from ..dry_run import ddp_reducer  # noqa: F401  (declares a replacement)
from ..dry_run.current import Job as World
from ..dry_run.current import being_rank_of
from ..dry_run.messages import Channels, agreed_values
from ..dry_run.process_groups import communicating
from ..dry_run.protocol import TO_ALL
from ..dry_run.recorder import RECEIVED, Recorder
from ..errors import RankFailedError
from ..internals.dispatch_keys import without_our_keys
from ..internals.events import place_of, users_frame
from ..internals.held_tensors import tensors_in

__all__ = ["FileMessages", "Job", "Plan", "apply_engine", "check_engine", "initialize_meta", "run_rank"]


# ---- The messages between ranks that run one after the other, with real tensors
#
# A rank that broadcasts or scatters writes the values to a file, so ranks that run later receive them, as in the job.
# Other collectives depend on values that do not exist: NOTE [Assumed values], dry_run/messages.py. A second run of the
# rank changes their results: tensors that differ between the two runs depend on other ranks.


SENT = {"broadcast_": "tensors", "scatter_": "input_tensors"}
"""The arguments that the root of a collective sends to the other ranks."""


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


class FileMessages(Channels):
    """The messages of a rank, in place of `dry_run.messages.Messages`."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def agrees_on(self, group: Any, digest: str) -> bool:
        """Return True unless the job sends deferred tensors. Compare the digest with that of the first rank."""
        if self._job.sends:
            return False
        file = self._next_file(group, "digest", 0)
        if not file.exists():
            file.write_text(digest)
        elif file.read_text() != digest:
            self._job.disagreement.touch()
        return True

    def observe(self, operator: str, arguments: dict[str, Any], group: Any) -> Callable[[], None] | None:
        """Send the values of a collective before it runs. Return a function that writes its results, or None."""
        outputs = [one for name in (*RECEIVED, "tensors") for one in tensors_in(arguments.get(name))]
        if not outputs or operator == "send":
            return None
        sent = self._send(operator, arguments, group) if operator in SENT else None
        if sent is not None:
            return partial(_write, zip(outputs, sent[group.rank() :] if operator == "scatter_" else sent, strict=False))
        if group.size() > 1:
            self._job.unknown.append(f"{operator.strip('_')} at {place_of(users_frame()) or 'unknown'}")
        agreed = agreed_values(operator, arguments, group.size(), group.rank())
        changes = outputs if self._job.is_perturbed and group.size() > 1 else ()
        return partial(_write, chain(agreed, ((one, _perturbed(one)) for one in changes)))

    def _send(self, operator: str, arguments: dict[str, Any], group: Any) -> list[Tensor] | None:
        """Return the values of the root of a collective, or None if it did not run before this rank."""
        root, sent = arguments["root_rank"], list(tensors_in(arguments[SENT[operator]]))
        file = self._next_file(group, operator, root)
        perturbed = file.with_suffix(".perturbed")
        if group.rank() == root:
            if group.size() > 1:
                torch.save(sent, perturbed if self._job.is_perturbed else file)
            return sent
        if not file.exists():
            return None
        found: list[Tensor] = torch.load(perturbed if self._job.is_perturbed and perturbed.exists() else file)
        return found

    def _next_file(self, group: Any, kind: str, root: int) -> Path:
        channel = self._channel(group, kind, root, TO_ALL)
        return self._job.folder / hashlib.sha256(repr((channel, self._next(channel))).encode()).hexdigest()


def _write(results: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad(), without_our_keys():
        for output, value in results:
            output.copy_(value.view_as(output))


def _perturbed(values: Tensor) -> Tensor:
    """Return values that all differ from `values`, also where adding 1 gives the same number."""
    if values.dtype is torch.bool:
        return ~values
    changed = values + 1
    return changed.where(changed.isfinite() & (changed != values), values.eq(0).to(values.dtype))


# ---- Runs the ranks of a job one after the other, with real tensors on the CPU


T = TypeVar("T")

PATIENCE = timedelta(seconds=1)
"""The time after which a read of the store raises an error: no other rank runs."""
DEVICE_FOLDERS = tuple(f"{Path(torch.__file__).parent / one}{os.sep}" for one in ("cuda", "accelerator"))
ON_CPU = "\ncheck-init runs on the CPU: use the mesh that is passed, and guard set_device()."
PR_SET_PDEATHSIG = 1
FRESH_SEED = 67280421310721  # `c10::default_rng_seed_val`


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
        world = _become(job)
        with being_rank_of(world), communicating(world, "gloo"):
            world.store.set_timeout(PATIENCE)  # `init_process_group()` has set another one
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


def _become(job: Job) -> World:
    """Give this process the state of a new one. Return its world."""
    if job.rank > 0 or job.size == 1:
        warnings.simplefilter("ignore")  # rank 0 has shown them
    torch.set_num_threads(1)  # the OpenMP threads of the parent do not exist after fork
    torch.manual_seed(FRESH_SEED)
    random.seed(job.rank + 1 if job.size > 1 else 0)  # new processes have different seeds in Python and NumPy
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    world = World(job.size, job.rank, job.size, None, torch._C._distributed_c10d.HashStore(), Recorder(False))
    world.is_real = True
    world.messages = messages = FileMessages(job)
    recording.agrees_on = messages.agrees_on
    return world


# ---- PyTorch's engines of parallelism, applied to a module as a training program does, and its initialization


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
            f"Tensor parallelism of {type(module).__name__} needs a plan: pass `tp_plan`, a dict for "
            "parallelize_module()."
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
