"""The check of initial weights: the ranks of a mesh against one process, bit for bit."""

from __future__ import annotations

import inspect
import multiprocessing.process
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from .. import _C
from ..deferred_init.recording import Recording
from ..descriptions import parse_mesh
from ..dry_run.current import while_rank_is_alone
from ..errors import RankFailedError
from ..internals.arguments import renamed_keywords
from ..internals.document import Items
from ..internals.held_tensors import parts_of
from .ranks import Job, Plan, apply_engine, check_engine, initialize_meta, run_rank

__all__ = ["InitCheck", "MeshCheck", "TensorCheck", "check_init"]


# ---- Compares the initial weights of each rank of a job with those of one process


# ---- The results, which print as a report
#
# The content of `torchext check-init --json`, besides the header that all commands write:
#
#     is_same: whether all tensors are the same as in one process
#     meshes: a list:
#         mesh: the sizes of its dimensions, by name
#         engine
#         ranks: the ranks that ran
#         tensors: the number of parameters and buffers
#         checks: a list of the tensors that differ or are not comparable, with the attributes of `TensorCheck`


MOST_LINES = 8


@dataclass(frozen=True)
class TensorCheck:
    """A tensor whose shards differ from one process, or cannot be compared.

    Attributes:
        name: The name in the module.
        is_different: True if it differs; false if it is not comparable.
        ranks: The ranks in which it does so, for the same reason.
        reason: The reason.
        source: For the first tensor that differs, the operator and the source line that gave the values in the first of
            these ranks, as far as they can be recorded.
        source_in_one_process: The same in one process.
        elements: The number of elements of the shard that differ.
        first_element: The index of the first one in the whole tensor. None if it is not known.
        value: Its value.
        value_in_one_process: Its value in one process.
    """

    name: str
    is_different: bool
    ranks: tuple[int, ...]
    reason: str
    source: str = ""
    source_in_one_process: str = ""
    elements: int = 0
    first_element: tuple[int, ...] | None = None
    value: complex | None = None
    value_in_one_process: complex | None = None

    def __str__(self) -> str:
        lines = [f"`{self.name}` {self.reason} (rank{'s' if len(self.ranks) > 1 else ''} {_ranges(self.ranks)})"]
        if self.first_element is not None:
            lines.append(
                f"  first element {list(self.first_element)}: {self.value} in rank {self.ranks[0]}, "
                f"{self.value_in_one_process} in one process; {self.elements} elements of the shard differ"
            )
        if self.source and self.source == self.source_in_one_process:
            lines.append(f"  from {self.source}, with other arguments or random numbers")
        elif self.source:
            lines.append(f"  rank {self.ranks[0]}: {self.source}")
            lines.append(f"  one process: {self.source_in_one_process}")
        return "\n".join(lines)


@dataclass(frozen=True)
class MeshCheck:
    """The initial weights on a mesh, compared with those of one process.

    Attributes:
        mesh: The sizes of the dimensions, by name.
        engine: The engine that sharded the module.
        ranks: The ranks that ran.
        tensors: The number of parameters and buffers, tied ones included.
        checks: The tensors that differ, then those that are not comparable, in the order of the module.
    """

    mesh: Mapping[str, int]
    engine: str
    ranks: tuple[int, ...]
    tensors: int
    checks: tuple[TensorCheck, ...]

    def __str__(self) -> str:
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        differ, unknown = (
            len({check.name for check in self.checks if check.is_different is is_different})
            for is_different in (True, False)
        )
        verb = "differs" if differ == 1 else "differ"
        counts = [f"{differ} {verb} from one process"] * bool(differ) + [f"{unknown} not comparable"] * bool(unknown)
        verdict = ", ".join(counts) or "the same as in one process"
        ranks = f"{len(self.ranks)} of {prod(self.mesh.values())} ranks"
        lines = [f"{mesh}, engine {self.engine}: {ranks}, {self.tensors} tensors: {verdict}"]
        lines += [str(check) for check in self.checks[:MOST_LINES]]
        if len(self.checks) > MOST_LINES:
            lines.append(f"... and {len(self.checks) - MOST_LINES} more")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class InitCheck(Items[MeshCheck]):
    """The results of `check_init()` for each mesh, which print as a report."""

    meshes: tuple[MeshCheck, ...]

    @property
    def is_same(self) -> bool:
        """Whether all tensors are the same as in one process."""
        return not any(mesh.checks for mesh in self)

    @property
    def is_different(self) -> bool:
        """Whether any tensor differs. Tensors that are not comparable do not count."""
        return any(check.is_different for mesh in self for check in mesh.checks)

    def _parts(self) -> list[str]:
        return ["\n".join(map(str, self))]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as builtin types, for JSON."""
        return {"is_same": self.is_same, **super().to_dict()}


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text such as `0-3, 7`."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


# ---- The check


MOST_RANKS = 64
"""The largest number of ranks that are checked by default."""

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""The indices along a dimension that a shard has, as ranges."""
Digest: TypeAlias = tuple[tuple[int, int], ...]
Part: TypeAlias = tuple[Runs, ...]
Place: TypeAlias = tuple[int, int]
"""The size of a dimension of the mesh, and the coordinate of a rank in it."""
Need: TypeAlias = tuple[Part | None, tuple[int, ...], tuple[Place, ...]]
"""The part of a tensor that a rank holds, or else the local shape and the places of the rank."""
Right: TypeAlias = dict[tuple[str, Need], dict[int, Digest]]
"""The digests that a part of a tensor may have, by the dimension of the mesh that a plain tensor is a chunk along."""


@dataclass(frozen=True)
class _Program:
    """The arguments of `check_init` that each rank needs."""

    build: Callable[..., Module]
    engine: str
    plan: Plan
    initialize: Callable[[Module], object] | None
    deferred: bool

    def module(self, job: Job) -> Module:
        """Return the initialized module of this rank. It may be deferred."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", tuple(job.sizes.values()), mesh_dim_names=tuple(job.sizes))
        with Recording() if self.deferred else nullcontext():
            module = self.build(mesh) if _takes_mesh(self.build) else self.build()
        if not isinstance(module, Module):
            raise TypeError(f"`build`: expected a module, got {type(module).__name__}.")
        module = apply_engine(module, mesh, self.engine, self.plan)
        # Tensors that nothing initializes are not the same: in a job they have the values that the memory had.
        initialize_meta(module, self.initialize, filler=0 if job.is_reference else 1)
        return module


@dataclass(frozen=True)
class _Shard:
    """The part of a tensor that a rank holds.

    Attributes:
        shape: The shape of the whole tensor, or of the local tensor if the tensor is not a `DTensor`.
        part: The indices in the whole tensor, by dimension. None for a tensor that is not a `DTensor`.
        digest: The digests of the tensors with data that it consists of. None if it has no values.
        unknown: The reason why it cannot be compared.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part | None
    digest: Digest | None
    unknown: str = ""


Shards: TypeAlias = dict[str, _Shard]


@renamed_keywords(plan="tp_plan")
def check_init(
    build: Callable[..., Module],
    meshes: str | Mapping[str, int] | Iterable[str | Mapping[str, int]],
    *,
    engine: str = "fsdp2",
    tp_plan: Plan = None,
    initialize: Callable[[Module], object] | None = None,
    deferred: bool = False,
    ranks: Iterable[int] | None = None,
) -> InitCheck:
    """Compare the initial weights of each rank of a job with those of one process, bit for bit.

    Each rank runs alone, in a forked process on the CPU. It has the environment variables of torchrun and a default
    process group. A digest of each shard of each parameter and buffer is compared with that of the same part of the
    tensor in one process, where all dimensions of the mesh have size 1. Deferred tensors are computed one at a time.

    Ranks run in ascending order, so that a broadcast or a scatter from a lower rank gives the values of that rank. A
    tensor that depends on any other collective is reported as not comparable.

    Args:
        build: Returns the module. It is called with the `DeviceMesh` if it has a parameter `mesh`, or a required one,
            and else without arguments. Its tensors may be real, deferred, on the device `meta`, or sharded.
        meshes: One or more meshes: the sizes of their dimensions by name, as a dict or as `"fsdp=8,tp=2"`.
        engine: How to shard the module: `fsdp2` (`fully_shard` for each entry of module lists and for the root), `hsdp`
            (the same, with a dimension to replicate and one to shard), `tp` (`parallelize_module`), `ddp`, or `none` if
            `build` shards. With `fsdp2`, `hsdp` and `ddp`, a dimension `tp` is for tensor parallelism.
        tp_plan: The plan of tensor parallelism: a dict for `parallelize_module`, or a function that returns it for the
            module. Default: the `tp_plan` of models of transformers.
        initialize: A function that initializes the sharded module. Default: for modules on `meta`,
            `to_empty(device="cpu")`, then `init_weights()` or the `reset_parameters()` of each submodule.
        deferred: Whether to call `build` under `deferred_init`, so that memory holds one whole tensor at a time.
        ranks: The ranks to check. Default: all ranks of meshes of up to 64 ranks; of larger ones, those whose
            coordinates are 0, 1 or the last one.

    Returns:
        The differences, which print as a report.

    Raises:
        TypeError, ValueError: An argument is wrong.
        RuntimeError: The process has a default process group, or is in a block of fake tensors.
        RankFailedError: The program failed in a rank. The message is its traceback.

    Example:
        >>> def build():
        ...     torch.manual_seed(0)
        ...     return torch.nn.Linear(6, 5)
        >>> print(check_init(build, "fsdp=4"))
        fsdp=4, engine fsdp2: 4 of 4 ranks, 2 tensors: the same as in one process
    """
    if not callable(build):
        raise TypeError(f"`build`: expected a function or a class, got a {type(build).__name__}.")
    if dist.is_initialized() or _C.are_factories_fake():
        raise RuntimeError(
            "check_init() makes its own process groups and real tensors: call it outside of fake_mode() and "
            "deferred_init(), and before torch.distributed.init_process_group()."
        )
    import torch._dynamo  # engines import these, which is slow, and each rank would import them again
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    while_rank_is_alone.prepare()

    program = _Program(build, engine, tp_plan, initialize, deferred)
    given = [parse_mesh(one) for one in ([meshes] if isinstance(meshes, str | Mapping) else meshes)]
    if not given:
        raise ValueError("meshes: expected at least one mesh such as fsdp=8, got none")
    for sizes in given:
        check_engine(engine, list(sizes))
    chosen = None if ranks is None else sorted(set(ranks))
    if chosen == []:
        raise ValueError("ranks: expected at least one rank, got none")
    return InitCheck(tuple(_check_mesh(program, sizes, chosen) for sizes in given))


def _takes_mesh(build: Callable[..., Module]) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.name == "mesh" or (one.default is one.empty and one.kind in by_position) for one in parameters)


# ---- The comparison


def _check_mesh(program: _Program, sizes: dict[str, int], chosen: list[int] | None) -> MeshCheck:
    size = prod(sizes.values())
    ranks = _default_ranks(sizes) if chosen is None else chosen
    if outside := [rank for rank in ranks if not 0 <= rank < size]:
        raise ValueError(f"ranks: expected ranks from 0 to {size - 1}, got {outside[0]}")
    with tempfile.TemporaryDirectory() as folder:
        first = Job(sizes, 0, Path(folder))
        shards = _run_ranks(program, first, ranks)
        if first.disagreement.exists():
            first = replace(first, folder=Path(folder) / "again", sends=True)
            first.folder.mkdir()
            shards = _run_ranks(program, first, ranks)
        one = Job(dict.fromkeys(sizes, 1), 0, Path(folder), is_reference=True)
        needs = {rank: {name: _need(shard, rank, sizes) for name, shard in shards[rank].items()} for rank in ranks}
        whole, right = run_rank(one, partial(_reference, program, needs))
        found = list(
            _compare(shards, needs, whole, right, may_miss=program.engine == "none", is_partial=len(ranks) < size)
        )
        if found and found[0].is_different:
            rank, name = found[0].ranks[0], found[0].name
            found[0] = _with_detail(found[0], program, replace(first, rank=rank), one, needs[rank].get(name))
    return MeshCheck(sizes, program.engine, tuple(ranks), len(whole), tuple(found))


def _default_ranks(sizes: Mapping[str, int]) -> list[int]:
    if prod(sizes.values()) <= MOST_RANKS:
        return list(range(prod(sizes.values())))
    numbers = [0]
    for size in sizes.values():
        numbers = [number * size + place for number in numbers for place in sorted({0, 1 % size, size - 1})]
    return numbers


def _run_ranks(program: _Program, first: Job, ranks: Iterable[int]) -> dict[int, Shards]:
    shards = {}
    unknown: list[str] = []  # also of lower ranks, which may have sent what they received
    for rank in ranks:
        job = replace(first, rank=rank)
        shards[rank], own = run_rank(job, partial(_shards, program))
        unknown += own
        if unknown:
            try:
                perturbed, _ = run_rank(replace(job, is_perturbed=True), partial(_shards, program))
            except RankFailedError:
                perturbed = {}  # the program itself depends on the values, as after gathering objects
            reason = f"depends on values of other ranks: {unknown[0]}"
            for name, one in shards[rank].items():
                if perturbed.get(name) != one:
                    shards[rank][name] = replace(one, unknown=reason)
    return shards


def _shards(program: _Program, job: Job) -> tuple[Shards, list[str]]:
    seen: dict[int, _Shard] = {}  # a tied tensor is computed once
    shards = {}
    for name, tensor in _tensors(program.module(job)):
        if id(tensor) not in seen:
            seen[id(tensor)] = _shard_of(tensor)
        shards[name] = seen[id(tensor)]
    return shards, job.unknown


def _tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _shard_of(tensor: Any) -> _Shard:
    values = _values(tensor)
    placements = getattr(tensor, "placements", ())
    part = _part(tensor) if placements else None
    unknown = ""
    if part is not None and tensor.device_mesh.get_coordinate() is None:
        unknown = "is on a mesh without this rank"
    elif any(one.is_partial() for one in placements):
        unknown = "is a partial sum"
    elif part is not None and len(values) > 1:
        unknown = f"has shards of another wrapper of {len(values)} tensors"
    return _Shard(tuple(tensor.shape), tensor.dtype, part, _digest(values), unknown)


def _values(tensor: Tensor) -> list[Tensor]:
    """Return the values that this rank holds: one tensor, or several for wrappers other than `DTensor`."""
    parts = [_C.evaluate(one) if _C.is_deferred(one) else one.detach() for one in parts_of(tensor)]
    return [one.to_dense() if one.layout is not torch.strided else one for one in parts]


def _digest(values: Sequence[Tensor]) -> Digest | None:
    if any(one.is_meta or _C.is_fake(one) for one in values):
        return None
    return tuple(_C.digest_of(one.contiguous()) for one in values)


def _part(tensor: Any) -> Part:
    """Return the indices that this rank holds, as `DTensor` defines them by splitting for each mesh dimension."""
    mesh = tensor.device_mesh
    indices = [torch.arange(size) for size in tensor.shape]
    for place, size, placement in zip(mesh.get_coordinate() or (), mesh.shape, tensor.placements, strict=False):
        if (dim := getattr(placement, "dim", None)) is not None:
            along_0 = type(placement)(0, **_split_factor(placement))
            chunks, _ = along_0._split_tensor(indices[dim], size, with_padding=False, contiguous=True)
            indices[dim] = chunks[place] if place < len(chunks) else indices[dim][:0]
    return tuple(map(_runs, indices))


def _split_factor(placement: Any) -> dict[str, int]:
    return {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}


def _runs(indices: Tensor) -> Runs:
    if not len(indices):
        return ()
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in indices.tensor_split(breaks))


def _cut(whole: Tensor, part: Part) -> Tensor:
    for dim, runs in enumerate(part):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in runs]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole


# ---- One process


def _need(shard: _Shard, rank: int, sizes: Mapping[str, int]) -> Need:
    if shard.part is not None:
        return shard.part, (), ()
    places = []
    for size in reversed(list(sizes.values())):
        places.append((size, rank % size))
        rank //= size
    return None, shard.shape, tuple(places)


def _reference(program: _Program, needs: Mapping[int, Mapping[str, Need]], job: Job) -> tuple[Shards, Right]:
    """Return the tensors of one process, and the right digests for each part that a rank needs."""
    whole: Shards = {}
    right: Right = {}
    for name, tensor in _tensors(program.module(job)):
        values = _values(tensor)
        whole[name] = _Shard(tuple(tensor.shape), tensor.dtype, None, _digest(values))
        if whole[name].digest is not None and len(values) == 1:
            for need in {own[name] for own in needs.values() if name in own}:
                right[name, need] = {dim: _digest([one]) or () for dim, one in _cuts(values[0], need)}
    return whole, right


def _cuts(whole: Tensor, need: Need) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of `whole` that a rank may hold. Plain tensors may be chunks along any mesh dimension.

    Each part comes with the number of that dimension, counted from the last one. It is -1 for a `DTensor`.
    """
    part, shape, places = need
    if part is not None:
        yield -1, _cut(whole, part)
    elif len(shape) == whole.dim():
        dims = [dim for dim, size in enumerate(shape) if size != whole.shape[dim]]
        for number, (size, place) in enumerate(places if len(dims) == 1 else ()):
            chunks = whole.chunk(size, dims[0])[place : place + 1]
            yield from ((number, one) for one in chunks if one.shape == shape)


def _compare(
    shards: Mapping[int, Shards],
    needs: Mapping[int, Mapping[str, Need]],
    whole: Shards,
    right: Right,
    *,
    may_miss: bool,
    is_partial: bool,
) -> Iterator[TensorCheck]:
    """Yield the tensors that differ, then those that are not comparable, in the order of the module.

    With `may_miss`, a rank may lack tensors that other ranks have, as a stage of a pipeline does. With `is_partial`,
    the other ranks may be among those that are not checked.
    """
    found: dict[tuple[bool, str, str], list[int]] = {}
    for name in dict.fromkeys(chain(whole, *shards.values())):
        is_held = any(name in own for own in shards.values())
        agrees = _is_along_one_dimension(name, shards, needs, right)
        for rank, own in shards.items():
            if may_miss and name not in own and (is_held or is_partial):
                if not is_held:
                    found.setdefault((False, name, "is held by no checked rank"), []).append(rank)
                continue
            expected = right.get((name, needs[rank][name]), {}) if name in own else {}
            verdict = _verdict(own.get(name), whole.get(name), expected.values())
            if verdict is None and not agrees:
                verdict = False, "is not a DTensor, and its values are chunks along no single dimension of the mesh"
            if verdict:
                found.setdefault((verdict[0], name, verdict[1]), []).append(rank)
    for key in sorted(found, key=lambda key: not key[0]):
        yield TensorCheck(key[1], key[0], tuple(found[key]), key[2])


def _is_along_one_dimension(
    name: str, shards: Mapping[int, Shards], needs: Mapping[int, Mapping[str, Need]], right: Right
) -> bool:
    """Return whether the ranks with right chunks in plain tensors hold them along the same dimension of the mesh."""
    held = {rank: own[name] for rank, own in shards.items() if name in own and not own[name].unknown}
    dims = [
        {dim for dim, digest in right.get((name, needs[rank][name]), {}).items() if dim >= 0 and digest == one.digest}
        for rank, one in held.items()
    ]
    found = [one for one in dims if one]
    return not found or bool(set.intersection(*found))


def _verdict(own: _Shard | None, whole: _Shard | None, right: Collection[Digest]) -> tuple[bool, str] | None:
    """Return whether a shard differs and why, or None if it is the same as in one process."""
    if own is None or whole is None:
        return True, "is missing" if own is None else "does not exist in one process"
    if own.unknown:
        return False, own.unknown
    for what, mine, other in (("dtype", own.dtype, whole.dtype), ("shape", list(own.shape), list(whole.shape))):
        if mine != other and (what == "dtype" or own.part is not None):
            return True, f"has the {what} {mine}, but {other} in one process"
    if own.digest is None or whole.digest is None:
        return True, f"has no values{'' if own.digest is None else ' in one process'}: it was not initialized"
    if own.digest in right or (own.part is None and own.digest == whole.digest and own.shape == whole.shape):
        return None
    if own.part is None and own.shape != whole.shape:
        return False, f"is not a DTensor, and has the shape {list(own.shape)}, but {list(whole.shape)} in one process"
    return True, "has other values"


# ---- The source line and the element that differ


def _with_detail(check: TensorCheck, program: _Program, job: Job, one: Job, need: Need | None) -> TensorCheck:
    """Return `check` with the recorded sources of the tensor and its first element that differs, if they are known.

    Both programs run again under `deferred_init`, which also records programs that construct real tensors.
    """
    if need is None:
        return check
    try:
        sources = [run_rank(which, partial(_trace, program, check.name, need)) for which in (job, one)]
        mine, other = (torch.load(_trace_file(which)) for which in (job, one))
    except (RankFailedError, OSError):
        return check
    pairs = zip_longest(*sources, fillvalue=("nothing", (0, 0)))
    pair = next(((a[0], b[0]) for a, b in pairs if a != b), ("", ""))
    differing = (mine != other).logical_and(mine.eq(mine).logical_or(other.eq(other))).nonzero()
    if not len(differing):
        return replace(check, source=pair[0], source_in_one_process=pair[1])
    index = tuple(differing[0].tolist())
    starts = [runs[0][0] for runs in need[0]] if need[0] is not None else [0] * len(index)
    return replace(
        check,
        source=pair[0],
        source_in_one_process=pair[1],
        elements=len(differing),
        first_element=tuple(place + start for place, start in zip(index, starts, strict=True)),
        value=mine[index].item(),
        value_in_one_process=other[index].item(),
    )


def _trace_file(job: Job) -> Path:
    return job.folder / f"values of rank {job.rank} of {job.size}"


def _trace(program: _Program, name: str, need: Need, job: Job) -> list[tuple[str, tuple[int, int]]]:
    """Write the values of the part of a tensor, and return its sources."""
    with Recording(trace=True):
        tensor = dict(_tensors(program.module(job)))[name]
    [values] = _values(tensor)
    is_whole = job.size == 1 and values.shape != need[1]
    torch.save(next(_cuts(values, need))[1] if is_whole else values, _trace_file(job))
    [sources] = _C.sources_of([one for one in parts_of(tensor) if _C.is_deferred(one)])
    # The innermost line outside of PyTorch, if `initialize_meta` calls PyTorch's own functions.
    ours = re.compile(rf" at {re.escape(multiprocessing.process.__file__)}:.*")
    return [(ours.sub("", text), digest) for text, digest in sources]


# ---- The check of initial weights: the ranks of a mesh against one process, bit for bit
