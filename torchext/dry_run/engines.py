"""PyTorch's own engines of training in a dry run: random state, `torch.compile`, pipelines, FSDP and fused modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Backend

from .. import _C
from ..fake.cuda.compiler import compile_observers, why_not_compiled
from ..fake.cuda.libraries import launch_observers
from ..fake.cuda.streams import graph_observers
from ..fake.higher_order import attending_by_kernel, that_may_not_run
from ..fake.values import note_reading, while_values_are_assumed
from ..internals.dispatch_keys import call_on_real_tensors
from ..internals.events import place_of, users_frame
from ..internals.patching import DIFFERENCES, Concerns, Function
from .current import Job, current, while_world_is_open
from .messages import without_answers
from .objects import assigned, others_sending

__all__ = ["ignoring_compilers", "is_in_compiled_code", "observing_kernels"]


# ---- The states of random generators, which are real in a dry run until a program moves them to a GPU
#
# DTensor advances the generators of devices so that ranks draw the numbers of a single process. It computes with the
# values of a state, and moves them to the device and back, which makes them fake. So its functions that compute run
# without fake mode, and the state stays on the CPU.
#
# Other programs send the state of rank 0 to all ranks over the GPUs, and set it. The received state is fake, so the
# generator keeps its state, and the call is counted as a read of a value.


COMPUTES = "computes with the state of a generator"
STATE_KEPT = "not set"
READS = "reads the state of a generator, which a program may have moved to a GPU"

_replaces_in_tracker = partial(while_world_is_open.replaces, "torch.distributed.tensor._random:OffsetBasedRNGTracker")


@_replaces_in_tracker("__init__", reason="compares the states of generators of other ranks")
def _init(original: Function, self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    original(self, device_mesh, False)
    if run_state_sync:
        with without_answers():
            dist.broadcast(torch.empty(16, dtype=torch.uint8, device=self._device), 0)


@_replaces_in_tracker("_get_device_state", reason="moves the state of a generator to its device")
def _get_device_state(original: Function, self: Any) -> Any:
    return self._device_handle.get_rng_state()


_replaces_in_tracker("_set_pre_op_offset", "_set_post_op_offset", reason=COMPUTES)(call_on_real_tensors)
# Since 2.12.
_replaces_in_tracker("_compute_rng_offsets", needs="_compute_rng_offsets", reason=COMPUTES)(call_on_real_tensors)


@while_values_are_assumed.replaces(torch.cuda.random, "set_rng_state", "set_rng_state_all", reason=READS)
@while_values_are_assumed.replaces(torch.Generator, "set_state", reason=READS, concerns=Concerns.FAKES)
def _set_state(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Ignore fake states. `torch.cuda.set_rng_state_all()` receives several states, in any iterable."""
    args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
    given = [*args, *kwargs.values()]
    states = [state for value in given for state in (value if isinstance(value, list | tuple) else [value])]
    if not any(isinstance(state, torch.Tensor) and _C.is_fake(state) for state in states):
        return original(*args, **kwargs)
    note_reading("Generator.set_state", STATE_KEPT, sys._getframe(1))
    return given[0] if isinstance(given[0], torch.Generator) else None  # as `torch.Generator.set_state()` does


# ---- Programs that call `torch.compile()`
#
# The compiler runs as for a GPU, up to its kernels (`fake/cuda/compiler.py`). Compilers that cannot run here are
# ignored, with a remark, by `torch.compiler.set_stance("force_eager")`. Backends that call PyTorch operators are not
# ignored.
#
# While operations are counted, and where compilers are ignored, compiled functions run eagerly. Those that would need
# memory of another order of magnitude are counted as compiled: `flex_attention`, and its block masks if a compiled
# function makes them. For these no kernel writes the mask of each query and key.


# Backends of `torch._dynamo.backends.debugging` that call PyTorch operators.
BACKENDS_THAT_CALL_OPERATORS = ("eager", "aot_eager", "aot_eager_decomp_partition")

IGNORED = "torch.compile() was ignored: this is the memory of the program when it is not compiled"


@while_world_is_open.replaces(torch, "compile", reason="generates GPU kernels, which fake GPUs do not run")
def _compile(original: Function, /, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    job = current()
    backend = kwargs.get("backend") or "inductor"
    is_known = not isinstance(backend, str) or backend in BACKENDS_THAT_CALL_OPERATORS
    if job is None or job.gpu is None or is_known or kwargs.get("disable") or model is None:
        return original(model, *args, **kwargs)
    reason = why_not_compiled(backend) if job.compiles else "--no-compile or --advise"
    if reason:
        _ignore_compilers(job)
        note = _once(partial(job.remark, f"{IGNORED} ({reason})", place_of(users_frame())))
        if not isinstance(model, FunctionType | MethodType | torch.nn.Module):
            note()  # calls of other callables cannot be observed
    else:
        note = _do_nothing
    return _marked(original(model, *args, **kwargs), partial(_call, job, note))


def _do_nothing() -> None:
    pass


def _call(job: Job, note: Callable[[], None]) -> None:
    job.has_compiled = True
    note()


def _remark(job: Job, text: str) -> None:
    job.remark(text, place_of(users_frame()))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` once: libraries compile functions at import that a program may never call."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


@contextmanager
def observing_kernels(job: Job) -> Iterator[None]:
    """Count launches of Triton kernels and what compilers do, and add a remark about CUDA graphs to the report."""
    text = (
        "A CUDA graph was captured by running its body once, in a separate memory pool. Replaying it computes nothing, "
        "and counts its passes, optimizer calls and collectives again"
    )
    note = partial(_remark, job, text)
    graph_observers.append(note)
    launch_observers.append(job.count_launch)
    compile_observers.append(job.count_compilation)
    try:
        yield
    finally:
        graph_observers.remove(note)
        launch_observers.remove(job.count_launch)
        compile_observers.remove(job.count_compilation)


def _ignore_compilers(job: Job) -> None:
    if not job.ignores_compilers:
        job.ignores_compilers = True
        note = partial(_remark, job, "flex_attention() was counted as the kernel that a compiler generates")
        job.when_left.enter_context(ignoring_compilers(note))


@contextmanager
def ignoring_compilers(when_attending: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let compiled functions run eagerly in the block, and count `flex_attention` as its kernel.

    Args:
        when_attending: Called for each call of `flex_attention`.
    """
    with torch.compiler.set_stance("force_eager"), attending_by_kernel(when_attending):
        yield


is_in_compiled_code: ContextVar[bool] = ContextVar("is_in_compiled_code", default=False)


def _compiled(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        note()
        before = is_in_compiled_code.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            is_in_compiled_code.reset(before)

    return call


def _marked(compiled: Any, note: Callable[[], None]) -> Any:
    """Mark a compiled function, or the forward pass of a module: an attribute of the wrapper that PyTorch returns."""
    if isinstance(compiled, FunctionType | MethodType):
        return _compiled(compiled, note)
    if isinstance(compiled, torch.nn.Module) and "forward" in vars(compiled):
        compiled.forward = _compiled(compiled.forward, note)
    return compiled


# ---- Masks of `flex_attention`


_replaces_in_masks = partial(
    while_world_is_open.replaces,
    "torch.nn.attention.flex_attention",
    reason="allocates masks that Inductor's kernels do not write",
)


@_replaces_in_masks("create_mask")
def _create_mask(
    original: Function,
    mod_fn: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    device: Any = None,
) -> Any:
    """Return the mask as a view of one element."""
    if not is_in_compiled_code.get() or not _C.are_factories_fake():
        return original(mod_fn, batch, heads, queries, keys, device)
    device = torch.accelerator.current_accelerator() or "cpu" if device is None else device
    return torch.empty((), dtype=torch.bool, device=device).expand(batch or 1, heads or 1, queries, keys)


@_replaces_in_masks("_convert_mask_to_block_mask")
def _convert_mask_to_block_mask(
    original: Function,
    mask: torch.Tensor,
    query_block: int = 128,
    key_block: int = 128,
    separate_full_blocks: bool = False,
) -> Any:
    """Return two masks, for partial and for full blocks."""
    if not is_in_compiled_code.get() or not _C.is_fake(mask) or mask.dim() != 4:
        return original(mask, query_block, key_block, separate_full_blocks)
    *batch, queries, keys = mask.shape
    blocks = (*batch, -(-queries // query_block), -(-keys // key_block))
    partial_blocks, full_blocks = (torch.empty(blocks, dtype=torch.int8, device=mask.device) for _ in range(2))
    return partial_blocks, full_blocks if separate_full_blocks else None


# ---- Pipeline stages whose neighbors do not exist
#
# Before the first step the stages vote on whether all of them have the shapes that they exchange. They send tensors
# from stage to stage, and read them. They do so if the other ranks run in their own processes (`messages.py`).
# Otherwise each stage decides alone, and assumes that the others were constructed in the same way. A stage without
# shapes would receive them from its neighbors, which raises an error.
#
# A traced stage is moved to its device as usual.


_VOTING, _MEETING = DIFFERENCES["pipelines_vote"], DIFFERENCES["pipelines_meet"]
_SCHEDULE = "torch.distributed.pipelining.schedules:_PipelineSchedule"
_VOTES = "reads the votes of other stages"

_are_stages_meeting: ContextVar[bool] = ContextVar("_are_stages_meeting", default=False)


def _are_others_running() -> bool:
    world = current()
    return world is not None and world.messages is not None


if _VOTING.applies:

    @while_world_is_open.replaces(_SCHEDULE, "_warmup_p2p", reason=_VOTES, releases=_VOTING.releases)
    def _warmup_p2p(original: Function, self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        stage_module: Any = sys.modules["torch.distributed.pipelining.stage"]
        if _are_others_running() or not all(isinstance(stage, stage_module.PipelineStage) for stage in stages):
            original(self, stages, has_backward, p2p_done)
            return
        mode = stage_module.InferenceMode
        for stage in stages:
            is_dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC


if _MEETING.applies:

    @while_world_is_open.replaces(
        _SCHEDULE, "_initialize_pipeline_distributed_state", reason=_VOTES, releases=_MEETING.releases
    )
    def _initialize_pipeline_distributed_state(original: Function, /, self: Any, *args: Any, **kwargs: Any) -> None:
        """Report the backend `fake` while stages vote. Since 2.15 they decide alone then, and name missing shapes."""
        before = _are_stages_meeting.set(not _are_others_running())
        try:
            original(self, *args, **kwargs)
        finally:
            _are_stages_meeting.reset(before)

    @while_world_is_open.replaces(  # `torch.distributed`, after the program has imported pipelines
        "torch.distributed.pipelining.schedules:dist",
        "get_backend",
        reason="decides whether other stages exist",
        releases=_MEETING.releases,
    )
    def _get_backend(original: Function, group: dist.ProcessGroup | None = None) -> Any:
        return Backend.FAKE if _are_stages_meeting.get() else original(group)


@while_world_is_open.replaces(
    "torch.distributed.pipelining.stage:_PipelineStage",
    "_move_submod_to_device",
    reason="since 2.14, does not move stages with fake parameters",
)
def _move_submod_to_device(original: Function, self: Any) -> None:
    """Move fake parameters like real ones, unless they are on the meta device."""
    parameters = list(self.submod.parameters())
    if any(_C.is_fake(parameter) for parameter in parameters) and not any(one.is_meta for one in parameters):
        self.submod.to(self.device)
    else:
        original(self)


# ---- The state dict of an optimizer of FSDP1 with `use_orig_params=True`, without the other ranks
#
# A rank has state only for the parameters with elements in its shard. The other ranks have the same kind of state for
# their own elements, so their messages follow from the sharding.


_replaces_in_fsdp = partial(
    while_world_is_open.replaces, "torch.distributed.fsdp._optim_utils", reason="receives the states of other ranks"
)

# A state of this rank, in any FSDP unit. This rank may have no elements of the parameters in a unit.
_any_state: ContextVar[Mapping[str, Any]] = ContextVar("_any_state")


@_replaces_in_fsdp("_optim_state_dict")
def _optim_state_dict(original: Function, /, *args: Any, optim_state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
    states = optim_state_dict.get("state", {}).values()
    with assigned(_any_state, next(filter(None, states), {})):
        return original(*args, optim_state_dict=optim_state_dict, **kwargs)


@_replaces_in_fsdp("_map_param_key_to_optim_keys")
def _map_param_key_to_optim_keys(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if not (given.get("merge_keys") and given["optim_state_dict"]["state"]):
        return original(*args, **kwargs)
    names = [given["param_to_fqns"][parameter] for parameter in given["param_key_to_param"].values()]
    key = sys.modules["torch.distributed.fsdp._optim_utils"]._OptimStateKey
    managed = [key(tuple(one), True) for one in names if one[0] in given["fqn_to_fsdp_param_info"]]
    with others_sending(lambda rank: managed):
        return original(*args, **kwargs)


@_replaces_in_fsdp("_gather_all_orig_param_state")
def _gather_all_orig_param_state(
    original: Function, /, info: Any, input_states: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    with others_sending(partial(_states_of, info, input_states)):
        return original(info, input_states, *args, **kwargs)


def _states_of(info: Any, own: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the states that a rank sends, by the names of parameters: names, sizes and dtypes, and scalars."""
    utils: Any = sys.modules["torch.distributed.fsdp._optim_utils"]
    numels = _numels(info.handle.flat_param, rank)
    likely = next(filter(None, own.values()), _any_state.get({}))
    found = {}
    for name, state in own.items():
        numel = numels[info.param_indices[name]]
        sent = found[name] = utils.StateInfo({}, {}, {})
        for key, value in (state or likely).items() if numel else ():
            if not isinstance(value, torch.Tensor):
                sent.non_tensors[key] = value
            elif value.dim() == 0:
                sent.scalar_tensors[key] = value.cpu()
            else:
                sent.tensors[key] = utils._PosDimTensorInfo(torch.Size([numel]), value.dtype)
    return found


def _numels(flat: Any, rank: int) -> list[int]:
    """Return how many elements of each parameter the shard of a rank has."""
    begin = rank * flat._sharded_size.numel()
    end = begin + flat._sharded_size.numel()
    numels, offset = [], 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            numels.append(max(0, min(offset + numel, end) - max(offset, begin)))
        offset += numel
    return numels


# ---- Calls whose kernels do less than the operators that fakes run: TorchScript, and recurrent networks of cuDNN
#
# TorchScript fuses operators on GPUs. cuDNN computes the gradients of weights for all time steps at once, and has its
# own setting for TF32. So the bound of time counts neither these operators nor their gradients.


_torch: Any = torch._C


def _uncounted(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    with that_may_not_run():
        return original(*args, **kwargs)


for _kind in (_torch.ScriptFunction, _torch.ScriptMethod):
    while_world_is_open.replaces(_kind, "__call__", reason="fuses operators on GPUs")(_uncounted)
for _module in (nn.RNN, nn.LSTM, nn.GRU):
    while_world_is_open.replaces(_module, "forward", reason="calls kernels of cuDNN on GPUs")(_uncounted)
