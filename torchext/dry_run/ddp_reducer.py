"""The reducer of `DistributedDataParallel` for fakes.

PyTorch's reducer is written in C++ (`reducer.cpp`), and compares memory addresses, which fakes do not have. This one
fills, reduces and empties the same buckets in the same order, with the same operators, so memory and communication
are the same. It assumes that all ranks use the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import distributed as parallel

from .. import _C
from ..internals.held_tensors import storage_of
from ..internals.patching import Function
from .current import current, while_rank_is_alone, while_world_is_open
from .messages import without_answers

__all__ = ["FakeReducer"]

# `kDefaultFirstBucketBytes` in reducer.hpp
FIRST_BUCKET_BYTES = 1024 * 1024


class FakeGradBucket:
    """The argument of a communication hook: see `torch.distributed.GradBucket`."""

    def __init__(self, index: int, count: int, bucket: _Bucket) -> None:
        self._index, self._count, self._bucket = index, count, bucket
        self._buffer = bucket.buffer

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients in one tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer."""
        return [
            self._buffer.narrow(0, offset, parameter.numel()).view(parameter.shape)
            for offset, parameter in zip(self._bucket.offsets, self._bucket.parameters, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of these gradients."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Return true for the last bucket of the backward pass."""
        return self._index == self._count - 1


@dataclass
class _Bucket:
    indices: list[int]
    parameters: list[Tensor]
    offsets: list[int]
    buffer: Tensor
    views: list[Tensor]
    pending: int = 0
    future: Any = None


@dataclass
class _Iteration:
    """The state of the current backward pass."""

    next_bucket: int = 0
    has_marked_unused: bool = False
    is_expected: bool = False
    needs_finalizing: bool = False
    ready: set[int] = field(default_factory=set)
    hooks_left: dict[int, int] = field(default_factory=dict)


class FakeReducer:
    """A reducer with the methods and constructor arguments of `torch.distributed.Reducer`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: dist.ProcessGroup,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 * 1024 * 1024,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: dict[int, str] | None = None,
        first_bucket_bytes_cap: int = FIRST_BUCKET_BYTES,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if any(expect_sparse_gradients):
            raise NotImplementedError(
                "A dry run does not support sparse gradients with DistributedDataParallel, for example of "
                "nn.Embedding(sparse=True). Use dense gradients."
            )
        self._parameters = list(params)
        self._group = process_group
        self._sparse = list(expect_sparse_gradients) or [False] * len(self._parameters)
        self._caps = [first_bucket_bytes_cap, bucket_bytes_cap]
        self._finds_unused = find_unused_parameters
        self._grads_are_views = gradient_as_bucket_view
        self._names = param_to_name_mapping or {}
        self._is_static = False
        self._backward_passes = 0
        self._is_first_hook = True
        self._iteration = _Iteration()
        self._unused: list[int] = []
        self._triggered = [0] * len(self._parameters)
        self._arrived: list[int] | None = []  # until the buckets are rebuilt
        self._has_rebuilt_buckets = False
        self._hook: Callable[[FakeGradBucket], Any] | None = None
        self._futures: list[Any] = []
        self._low_precision: torch.dtype | None = None
        self._is_optimizer_in_backward = False
        self._forward_work: Any = None
        self._divisor = process_group.size()
        self._buckets: list[_Bucket] = []
        self._locations: dict[int, tuple[int, int]] = {}
        self._make_buckets(bucket_indices)
        self._accumulators = [_accumulator(parameter) for parameter in self._parameters]
        self._handles = [
            accumulator.register_hook(self._make_hook(index)) for index, accumulator in enumerate(self._accumulators)
        ]
        self._used_map: Tensor | None = None
        if find_unused_parameters:
            self._make_used_map()

    # Methods that DistributedDataParallel calls, in the order of a step.

    def set_logger(self, logger: object) -> None:
        """Do nothing: a dry run logs nothing."""

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def _rebuild_buckets(self) -> bool:
        """Make buckets in the order in which gradients arrive, once: `Reducer::rebuild_buckets()`."""
        self._check_reducer_finalized()
        if not self._should_rebuild() or not self._arrived:
            return False
        order, self._arrived = self._arrived, None
        self._has_rebuilt_buckets = True
        indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            [self._parameters[i] for i in order], self._caps, self._sparse, order
        )
        self._agree_on(indices)
        self._make_buckets(indices)
        return True

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Begin a backward pass whose gradients will be reduced."""
        for bucket in self._buckets:
            bucket.pending = len(bucket.parameters)
        self._iteration = _Iteration(is_expected=True, hooks_left=dict(enumerate(self._triggered)))
        if self._finds_unused and not self._is_static:
            self._unused = self._search_unused(outputs)

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._forward_work = None if use_static_world_size else work

    def _set_static_graph(self) -> None:
        self._is_static = True
        self._make_used_map()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._low_precision = dtype
        self._make_buckets([bucket.indices for bucket in self._buckets])

    def _set_optimizer_in_backward(self) -> None:
        self._is_optimizer_in_backward = True

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        self._futures += futures

    def _autograd_hook(self, index: int) -> None:
        self._on_gradient(index)

    def _push_all_rebuilt_params(self) -> None:
        if self._should_rebuild() and self._arrived is not None:
            self._arrived += range(len(self._parameters))

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check_reducer_finalized(self) -> None:
        if self._iteration.needs_finalizing:
            missing = sorted(set(range(len(self._parameters))) - self._iteration.ready)
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one. This error "
                "indicates that your module has parameters that were not used in producing loss. You can enable "
                "unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
                "`torch.nn.parallel.DistributedDataParallel`, and by making sure all `forward` function outputs "
                f"participate in calculating loss. Parameter indices which did not receive grad: {missing}"
            )

    def _reset_state(self) -> None:
        self._iteration = _Iteration()
        self._futures = []

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._divisor = group.size()

    def _get_local_used_map(self) -> Tensor:
        self._make_used_map()
        assert self._used_map is not None
        return self._used_map

    def _get_zeros_like_grad_buckets(self) -> list[FakeGradBucket]:
        made = [FakeGradBucket(i, len(self._buckets), bucket) for i, bucket in enumerate(self._buckets)]
        for bucket in made:
            bucket.set_buffer(torch.zeros_like(bucket.buffer()))
        return made

    def _run_allreduce_hook(self, bucket: FakeGradBucket) -> Any:
        return self._all_reduce(bucket)

    def _run_comm_hook(self, bucket: FakeGradBucket) -> Any:
        return self._all_reduce(bucket) if self._hook is None else self._hook(bucket)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing."""

    def description(self) -> tuple[dict[str, str], dict[str, int]]:
        """Return the strings and the numbers that `Logger` reports about a reducer."""
        sizes = ", ".join(str(bucket.buffer.nbytes) for bucket in self._buckets)
        strings = {"backend_name": dist.get_backend(self._group), "bucket_sizes": sizes}
        if self._has_rebuilt_buckets:
            order = ", ".join(" ".join(map(str, bucket.indices)) for bucket in self._buckets)
            strings |= {"rebuilt_bucket_sizes": sizes, "rebuilt_per_bucket_param_indices": order}
        return strings, {
            "rank": self._group.rank(),
            "world_size": self._group.size(),
            "num_parameter_tensors": len(self._parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in self._parameters),
            "bucket_cap_bytes": self._caps[1],
            "find_unused_parameters": int(self._finds_unused),
            "gradient_as_bucket_view": int(self._grads_are_views),
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
        }

    def register_hook(self, hook: Callable[[FakeGradBucket], Any]) -> None:
        """Register the hook that communicates the buckets.

        Raises:
            RuntimeError: A hook is already registered.
        """
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = hook

    # The backward pass.

    def _make_hook(self, index: int) -> Callable[..., None]:
        return lambda *gradients: self._on_gradient(index)

    def _on_gradient(self, index: int) -> None:
        """Handle an accumulated gradient: `Reducer::autograd_hook()`."""
        if self._is_first_hook:
            self._is_first_hook = False
            self._backward_passes += 1
        if self._is_static and self._backward_passes == 1:
            self._triggered[index] += 1
            return
        if not self._iteration.is_expected:
            return
        if not self._iteration.has_marked_unused:
            self._iteration.has_marked_unused = True
            for unused in self._unused:
                self._mark_ready(unused)
        if self._is_static:
            if self._iteration.hooks_left[index] <= 0:
                raise RuntimeError(
                    "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
                    "iteration, but then got used in the second iteration. this is not compatible with static_graph "
                    "set to True."
                )
            self._iteration.hooks_left[index] -= 1
            if self._iteration.hooks_left[index] > 0:
                return
        if self._should_rebuild() and self._arrived is not None:
            self._arrived.append(index)
        self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        if index in self._iteration.ready:
            raise RuntimeError(
                "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
                "1) Use of a module parameter outside the `forward` function. 2) Reused parameters in multiple "
                f"reentrant backward passes. Parameter at index {index} with name {self._names.get(index, '')} has "
                "been marked as ready twice."
            )
        self._iteration.ready.add(index)
        self._iteration.needs_finalizing = True
        number, place = self._locations[index]
        bucket = self._buckets[number]
        self._fill(bucket, place)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._reduce_ready_buckets(number)
        if self._iteration.next_bucket == len(self._buckets):
            if self._finds_unused and not self._is_static:
                self._reduce_used_map()
            Variable._execution_engine.queue_callback(self._finalize)

    def _fill(self, bucket: _Bucket, place: int) -> None:
        """Copy a gradient to its bucket: `Reducer::mark_variable_ready_dense()`."""
        parameter, view = bucket.parameters[place], bucket.views[place]
        gradient = parameter.grad
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif storage_of(gradient) == storage_of(view):
                if self._hook is None:
                    view.div_(self._divisor)
            else:
                if self._hook is not None:
                    view.copy_(gradient)
                elif gradient.requires_grad:
                    view.copy_(gradient * (1.0 / self._divisor))
                else:
                    torch.mul(gradient, torch.tensor(1.0 / self._divisor, dtype=torch.float64), out=view)
                if self._grads_are_views and gradient.dtype == view.dtype:
                    parameter.grad = view
                elif self._grads_are_views:  # the reducer assigns it in C++, where dtypes are not compared
                    gradient.data = view

    def _reduce_ready_buckets(self, number: int) -> None:
        """Reduce complete buckets in their order: `Reducer::mark_bucket_ready()`."""
        if number > self._iteration.next_bucket:
            return
        while self._iteration.next_bucket < len(self._buckets):
            bucket = self._buckets[self._iteration.next_bucket]
            if bucket.pending:
                return
            self._communicate(bucket, self._iteration.next_bucket)
            self._iteration.next_bucket += 1

    def _communicate(self, bucket: _Bucket, number: int) -> None:
        bucket.future = self._run_comm_hook(FakeGradBucket(number, len(self._buckets), bucket))

    def _all_reduce(self, bucket: FakeGradBucket) -> Any:
        options = dist.AllreduceOptions()
        buffer = bucket.buffer()
        work = self._group.allreduce([buffer], options)
        return _Done(work, buffer)

    def _finalize(self) -> None:
        """End a backward pass whose buckets were all sent: `Reducer::finalize_backward()`."""
        if self._is_static and self._backward_passes > 1 and self._should_rebuild() and self._arrived is not None:
            self._arrived += self._unused
        self._end_of_backward()

    def _end_of_backward(self) -> None:
        self._iteration.is_expected = False
        self._iteration.needs_finalizing = False
        self._is_first_hook = True
        for bucket in self._buckets:
            reduced = _result_of(bucket.future)
            bucket.future = None
            views = bucket.views if reduced is bucket.buffer else _views(reduced, bucket)
            for place, view in enumerate(views):
                self._hand_out(bucket, place, view)
        for future in self._futures:
            future.wait()
        self._futures = []
        if self._used_map is not None and not self._is_static:
            self._used_map.zero_()

    def _hand_out(self, bucket: _Bucket, place: int, view: Tensor) -> None:
        """Copy a gradient back: `Reducer::finalize_bucket_dense()`."""
        parameter, own_view = bucket.parameters[place], bucket.views[place]
        is_unused = bucket.indices[place] in self._unused and (self._is_static or self._finds_unused)
        with torch.no_grad():
            if self._grads_are_views:
                if storage_of(own_view) != storage_of(view):
                    own_view.copy_(view)
                if not is_unused and not self._is_optimizer_in_backward and parameter.grad is None:
                    parameter.grad = own_view
            elif not is_unused and not self._is_optimizer_in_backward:
                if parameter.grad is None:
                    parameter.grad = view.clone(memory_format=torch.contiguous_format)
                else:
                    parameter.grad.copy_(view)

    def delay_all_reduce(self) -> None:
        """Reduce all gradients at the end of the first pass: `Reducer::delay_all_reduce()`."""
        self._unused = [i for i, count in enumerate(self._triggered) if count == 0]
        for index in range(len(self._parameters)):
            number, place = self._locations[index]
            self._fill(self._buckets[number], place)
        self._reduce_used_map()
        for number, bucket in enumerate(self._buckets):
            self._communicate(bucket, number)
        self._end_of_backward()

    _delay_all_reduce = delay_all_reduce

    # Buckets.

    def _should_rebuild(self) -> bool:
        return (self._is_static or not self._finds_unused) and self._arrived is not None

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        """Replace the buckets, and free the old ones first: `Reducer::initialize_buckets()`."""
        self._buckets = []
        self._locations = {}
        for number, members in enumerate(indices):
            self._buckets.append(self._make_bucket(list(members)))
            self._locations.update({index: (number, place) for place, index in enumerate(members)})

    def _make_bucket(self, indices: list[int]) -> _Bucket:
        parameters = [self._parameters[i] for i in indices]
        offsets = [0]
        for parameter in parameters:
            offsets.append(offsets[-1] + parameter.numel())
        dtype = self._low_precision or parameters[0].dtype
        buffer = torch.empty(offsets[-1], dtype=dtype, device=parameters[0].device)
        bucket = _Bucket(indices, parameters, offsets[:-1], buffer, [])
        bucket.views = _views(buffer, bucket)
        if self._grads_are_views:
            with torch.no_grad():
                for parameter, view in zip(parameters, bucket.views, strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad)
                        parameter.grad = view
        return bucket

    def _agree_on(self, indices: Sequence[Sequence[int]]) -> None:
        """Broadcast the buckets of rank 0: `Reducer::sync_bucket_indices()`."""
        device = self._parameters[0].device
        for numel in (sum(map(len, indices)) + 1, len(indices)):
            numbers = torch.empty(numel, dtype=torch.int32, device=device)
            numbers.copy_(torch.empty(numel, dtype=torch.int32), non_blocking=True)
            with without_answers():
                self._group.broadcast([numbers], dist.BroadcastOptions()).wait()

    # Unused parameters.

    def _make_used_map(self) -> None:
        if self._used_map is None:
            count = len(self._parameters)
            self._used_map = torch.empty(count, dtype=torch.int32, device=self._parameters[0].device)

    def _reduce_used_map(self) -> None:
        assert self._used_map is not None
        self._used_map.copy_(torch.zeros(len(self._parameters), dtype=torch.int32), non_blocking=True)
        self._group.allreduce([self._used_map], dist.AllreduceOptions()).wait()

    def _search_unused(self, outputs: Iterable[Tensor]) -> list[int]:
        """Return the indices of the parameters that are not in the graph of the outputs."""
        waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return [index for index, accumulator in enumerate(self._accumulators) if accumulator not in seen]


class _Done:
    """The future of a collective that has ended, with the tensor that it wrote."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor


class FakeLogger:
    """A logger with the methods of `torch.distributed.Logger`. It keeps the construction arguments and the buckets."""

    def __init__(self, reducer: FakeReducer) -> None:
        self.reducer = reducer
        self._strings: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        *args: bool,
    ) -> None:
        """Keep the construction arguments of DistributedDataParallel."""
        self._strings = {"module_name": module_name, "device_ids": ", ".join(map(str, device_ids))}
        self._numbers = {
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
        }

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the data without times, by the names of `torch::distributed::Logger`."""
        strings, numbers = self.reducer.description()
        return SimpleNamespace(strs_map=self._strings | strings, ints_map=self._numbers | numbers)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _accumulator(parameter: Tensor) -> Any:
    """Return the graph node that accumulates the gradient. The caller must hold it: autograd does not keep it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def _views(buffer: Tensor, bucket: _Bucket) -> list[Tensor]:
    """Return the gradients in a buffer, with the strides of `AccumulateGrad` ("Gradient Layout Contract")."""
    views = []
    for offset, parameter in zip(bucket.offsets, bucket.parameters, strict=True):
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = parameter.stride() if is_dense else _contiguous_strides(parameter.shape)
        views.append(buffer.detach().as_strided(parameter.shape, strides, offset))
    return views


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return strides[: len(shape)]


def _result_of(future: Any) -> Tensor:
    result = future.wait()
    reduced: Tensor = result[0] if isinstance(result, list | tuple) else result
    return reduced


@while_world_is_open.replaces(dist, "Reducer", reason="compares memory addresses, which fakes do not have")
def _make_reducer(original: Function, /, params: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    is_fake = current() is not None and any(map(_C.is_fake, params))
    return (FakeReducer if is_fake else original)(params, *args, **kwargs)


@while_world_is_open.replaces(dist, "Logger", reason="requires the C++ reducer")
def _make_logger(original: Function, reducer: Any) -> Any:
    return FakeLogger(reducer) if isinstance(reducer, FakeReducer) else original(reducer)


@while_world_is_open.replaces(
    dist, "_register_comm_hook", "_register_builtin_comm_hook", reason="requires the C++ reducer"
)
def _register(original: Function, reducer: Any, *args: Any) -> None:
    if not isinstance(reducer, FakeReducer):
        original(reducer, *args)
    elif len(args) == 2:
        state, hook = args
        reducer.register_hook(lambda bucket: hook(state, bucket))
    else:
        reducer.register_hook(_builtin_hook(args[0], reducer))


def _builtin_hook(kind: Any, reducer: FakeReducer) -> Callable[[FakeGradBucket], Any]:
    """Return a hook of `default_comm_hooks.cpp`."""

    def hook(bucket: FakeGradBucket) -> Any:
        buffer = bucket.buffer()
        if str(kind).endswith("FP16_COMPRESS"):
            buffer = buffer.to(torch.float16)
        bucket.set_buffer(buffer.div_(reducer._divisor))
        return reducer._all_reduce(bucket)

    return hook


@while_rank_is_alone.replaces(
    parallel, "_verify_param_shape_across_processes", reason="reads numbers that other processes send"
)
def _verify(original: Function, group: dist.ProcessGroup, tensors: list[Tensor], logger: Any = None) -> None:
    """Send the shapes as `verify_params_across_processes()` in reducer.cpp does, without comparing them."""
    if (world := current()) is not None and world.is_real:
        return  # the numbers depend on ranks that have not run
    if not any(map(_C.is_fake, tensors)):
        original(group, tensors, logger)
        return
    device = tensors[0].device
    count = torch.empty(1, dtype=torch.int64, device=device)
    group.allgather([[torch.empty_like(count) for _ in range(group.size())]], [count]).wait()
    numbers = torch.empty(sum(2 * tensor.dim() for tensor in tensors), dtype=torch.int64, device=device)
    with without_answers():
        group.broadcast([numbers], dist.BroadcastOptions()).wait()
