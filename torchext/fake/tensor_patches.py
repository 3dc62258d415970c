"""Patches for methods of tensors that read memory or print values, and for constructors of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from ..internals.dispatch_keys import (
    call_on_real_tensors,
    is_constructing,
    making_fakes,
    with_our_keys,
    without_our_keys,
)
from ..internals.leases import while_fakes_live
from ..internals.patching import DIFFERENCES, Concerns, Function
from .copying import FakeCopy
from .fake_tensor_mode import is_fake_tensor
from .storage_patches import copied_bytes, no_data

__all__: list[str] = []

replaces: Callable[..., Callable[[Function], Function]] = partial(while_fakes_live.replaces, concerns=Concerns.FAKES)


# ---- Printing


@replaces(Tensor, "__repr__", reason="formats values, and cannot be extended")
def _repr(original: Function, /, self: Tensor, **kwargs: Any) -> Any:
    """The values are formatted by `torch._tensor_str`."""
    if not is_fake_tensor(self):
        return original(self, **kwargs)
    if not _shows_values(self):
        return _repr_of_fake(self)
    if kwargs.get("tensor_contents") is None:
        kwargs["tensor_contents"] = _formatted_values(self)
    return original(self, **kwargs)


def _repr_of_fake(fake: Tensor) -> str:
    try:
        grad_fn = None if fake.grad_fn is None else type(fake.grad_fn).__name__
    except RuntimeError:  # a view that must not be written, as in `torch._tensor_str`
        grad_fn = "Invalid"
    parts = [
        f"size={tuple(fake.shape)}",
        f"dtype={fake.dtype}",
        f"device='{fake.device}'",
        *([] if fake.layout is torch.strided else [f"layout={fake.layout}", f"nnz={fake._nnz()}"]),
        *(["requires_grad=True"] if fake.requires_grad and grad_fn is None else []),
        *([f"grad_fn=<{grad_fn}>"] if grad_fn is not None else []),
    ]
    return f"tensor(..., {', '.join(parts)}, {'deferred' if _C.is_deferred(fake) else 'fake'}=True)"


def _shows_values(tensor: Tensor) -> bool:
    """Return true if `repr()` shows the values: a constructor may print them if PyTorch would print them in full."""
    return _C.is_deferred(tensor) and is_constructing() and tensor.numel() <= torch._tensor_str.PRINT_OPTS.threshold


def _formatted_values(tensor: Tensor) -> str:
    cls = type(tensor)
    if tensor.numel() == 0:
        return "[]"
    prefix = "tensor(" if cls in (Tensor, Parameter) else f"{cls.__name__}("
    real = _C.evaluate(tensor)
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        without_our_keys(),
    ):
        return str(torch._tensor_str._tensor_str(real, len(prefix)))


# ---- Copies


@replaces(Tensor, "__deepcopy__", reason="copies the memory of the storage")
def _deepcopy(original: Function, self: Tensor, memo: dict[int, Any]) -> Any:
    if isinstance(memo, FakeCopy):
        return memo.tensor(self)
    # A sparse tensor is cloned; a compressed one raises.
    if not is_fake_tensor(self) or self.layout is not torch.strided or id(self) in memo:
        return original(self, memo)
    return _deepcopy_of_fake(self, memo)


def _deepcopy_of_fake(fake: Tensor, memo: dict[int, Any]) -> Tensor:
    if not fake.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
            f"moment, but this fake tensor of shape {tuple(fake.shape)} was computed from others; call detach() on "
            "it first."
        )
    result = _C.view_storage_like(copied_bytes(fake.untyped_storage(), memo), fake)
    if not result.is_inference():
        torch.autograd.graph.increment_version(result)  # like `set_()` in the original
    result = result.resolve_conj().resolve_neg()  # results on their own storages
    if type(fake) is not Tensor:
        result = result.as_subclass(type(fake))
    result.requires_grad_(fake.requires_grad)
    memo[id(fake)] = result
    if fake.grad is not None:
        result.grad = copy.deepcopy(fake.grad, memo)
    result.__dict__.update(copy.deepcopy(fake.__dict__, memo))
    return result


@replaces(UninitializedParameter, "__deepcopy__", reason="copies the memory of the storage")
@replaces(Parameter, "__deepcopy__", reason="copies the memory of the storage")
def _deepcopy_of_parameter(original: Function, self: Tensor, memo: dict[int, Any]) -> Any:
    return memo.tensor(self) if isinstance(memo, FakeCopy) else original(self, memo)


# ---- Reads


@replaces(Tensor, "tolist", reason="reads memory without calling an operator")
def _tolist(original: Function, self: Tensor) -> Any:
    known = _C.evaluate(self) if _C.is_deferred(self) else _C.known_value(self)
    return original(self if known is None else known)


def _share(name: str, error: type[Exception], original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Materialize a deferred tensor before `original` returns an array that shares its memory.

    An array of known values shares their memory while they are known.
    """
    if is_fake_tensor(self) and _C.is_deferred(self):
        _C.materialize([self])
    if is_fake_tensor(self):
        is_there = self.device.type == "cpu" or (name == "numpy" and bool(kwargs.get("force")))
        known = _C.known_value(self) if is_there and name != "__dlpack__" else None
        if known is None:
            raise error(no_data(f"{name}()", self))
        return original(known.requires_grad_(self.requires_grad), *args, **kwargs)
    return original(self, *args, **kwargs)


for _name, _error in (("numpy", RuntimeError), ("__array__", RuntimeError), ("__dlpack__", BufferError)):
    replaces(Tensor, _name, reason="shares memory without calling an operator")(partial(_share, _name, _error))


# ---- Reads of fakes in Python data from which PyTorch makes tensors
#
# `torch.tensor([x, y])`, `torch.asarray()`, `torch.Tensor()` and similar functions exclude the `Fake` and
# `DeferredInit` keys while they read their data (`internal_new_from_data()`, tensor_new.cpp). The dispatcher therefore
# does not call our handlers. A TorchFunctionMode could observe these reads, but under such a mode, code that checks
# `torch.overrides.has_torch_function()` takes another path (`torch.nn.TransformerEncoder` in eval mode).


_C.provide("typed_storage", torch.TypedStorage)

Storage = torch.UntypedStorage | torch.TypedStorage
WITHOUT_FAKE_KEY = "is called with the Fake key excluded while tensors are made of Python data"


def _reads_python_data() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded("Fake")


# The methods that read an element: `store_scalar()`, python_scalars.h.
@replaces(Tensor, "item", "__float__", "__int__", "__index__", "__bool__", "__complex__", reason=WITHOUT_FAKE_KEY)
def _read(original: Function, self: Tensor) -> Any:
    if not _reads_python_data():
        return original(self)
    with with_our_keys():
        return original(self)


@replaces(Tensor, "__iter__", reason=WITHOUT_FAKE_KEY)
def _iter(original: Function, self: Tensor) -> Any:
    """Compute the rows of a deferred tensor together."""
    if _reads_python_data() and _C.is_deferred(self):
        return original(_C.evaluate(self))
    return original(self)


# The factories that accept a storage.
@replaces(
    torch, "tensor", "as_tensor", "asarray", reason="makes a tensor on a storage without calling an operator on a fake"
)
def _make_on_storage(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Make the result of `original` share the memory of a storage of fakes."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Storage)]
    if not given or not _C.is_storage_of_fakes(_untyped(given[0])):
        return original(*args, **kwargs)
    # A call on another storage determines the inferred metadata and the errors.
    other = [_small_storage(value) if value is given[0] else value for value in args]
    others = {name: _small_storage(value) if value is given[0] else value for name, value in kwargs.items()}
    form = original(*other, **others)
    storage = _untyped(given[0])
    made = torch.empty(0, dtype=form.dtype, device=storage.device).set_(storage)
    return made.to(form.device).requires_grad_(form.requires_grad)


def _small_storage(storage: Storage) -> Storage:
    """Return a real storage of at least one element of any dtype."""
    small = torch.UntypedStorage(16)
    if isinstance(storage, torch.UntypedStorage):
        return small
    return torch.TypedStorage(wrap_storage=small, dtype=storage.dtype, _internal=True)


def _untyped(storage: Storage) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


# ---- Constructors that derive the device from the highest dispatch key (`legacyExtractDispatchKey()`)


def _make_tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> Tensor:
    if isinstance(data, Tensor) and _C.is_fake(data):
        return data.detach().to(device=device, dtype=dtype, copy=True).requires_grad_(requires_grad)
    return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **kwargs)


NEW_TENSOR_OPTIONS = {"data", "dtype", "device", "requires_grad", "pin_memory", "names"}
BY_HIGHEST_KEY = "derives the device from the highest dispatch key (legacyExtractDispatchKey)"


@replaces(Tensor, "new_tensor", reason=BY_HIGHEST_KEY)
def _new_tensor(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    data = kwargs["data"] if "data" in kwargs else args[0] if args else None
    if not is_fake_tensor(self) or len(args) + ("data" in kwargs) != 1 or not kwargs.keys() <= NEW_TENSOR_OPTIONS:
        return original(self, *args, **kwargs)  # raises for these
    _check_highest_key(self)
    given = {name: value for name, value in kwargs.items() if value is not None and name != "data"}
    options: dict[str, Any] = {"dtype": self.dtype, "device": self.device} | given
    result = _make_tensor(data, **options)
    _C.make_amp_like(result, self)
    return result


def _check_highest_key(tensor: Tensor) -> None:
    """Raise the error that PyTorch raises if that key belongs to no device."""
    bits = {"ZeroTensor": tensor._is_zerotensor, "Negative": tensor.is_neg, "Conjugate": tensor.is_conj}
    for key, is_set in bits.items():
        if is_set():
            raise RuntimeError(f"DispatchKey {key} doesn't correspond to a device")


@replaces(Tensor, "new", reason=BY_HIGHEST_KEY)
def _new(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The oldest factory."""
    if not is_fake_tensor(self):
        return original(self, *args, **kwargs)
    _check_highest_key(self)
    options = dict(kwargs)
    device = options.pop("device", None)
    # `size`, `data`, `other` or `storage`; or `indices`, `values` and `size`, in any order.
    names = sorted(options, key=lambda name: {"indices": 0, "values": 1}.get(name, 2))
    given = (*args, *(options[name] for name in names))
    made = _new_fake(self, given, self.device if device is None else device)
    _C.make_amp_like(made, self)
    return made


def _new_fake(like: Tensor, args: tuple[Any, ...], device: torch.device | str | int) -> Tensor:
    if like.layout is torch.sparse_coo and args and isinstance(args[0], Tensor):
        return torch.sparse_coo_tensor(*args, dtype=like.dtype, device=device)
    if not args or isinstance(args[0], int | torch.Size):
        return like.new_empty(*args or (0,), device=device)
    if isinstance(args[0], Storage):
        return like.new_empty(0, device=device).set_(args[0])
    if isinstance(args[0], Tensor):
        alias: Tensor = torch.ops.aten.alias(args[0])
        return alias
    return _make_tensor(args[0], dtype=like.dtype, device=device)


@replaces(type(torch.FloatTensor), "__instancecheck__", reason=BY_HIGHEST_KEY)
def _instancecheck(original: Function, self: type, instance: object) -> Any:
    """`isinstance(tensor, torch.FloatTensor)` compares this key."""
    if not isinstance(instance, Tensor) or not _C.is_fake(instance):
        return original(self, instance)
    return bool(instance.type() == f"{self.__module__}.{self.__name__}")


# ---- Constructors of sparse tensors


@while_fakes_live.replaces(
    torch,
    *(f"sparse_{name}_tensor" for name in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    reason="makes real members from Python data",
)
def _construct(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Make the result of `original` fake in `fake_mode`, like `torch.tensor()`, unless its arguments are tensors."""
    is_given = any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))
    if is_given or not _C.are_factories_fake():
        return original(*args, **kwargs)
    device = torch.empty(0, device=kwargs.get("device")).device
    if device.type == "meta":
        return original(*args, **kwargs)
    with without_our_keys():
        constant = original(*args, **{**kwargs, "device": "cpu"})
    return FakeCopy(device).tensor(constant)


# ---- Other functions


@while_fakes_live.replaces(
    UninitializedParameter, "materialize", reason="allocates with torch.empty() for any parameter"
)
def _materialize(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A lazy parameter allocates when the first input has determined its shape."""
    if not is_fake_tensor(self) or _C.is_deferred(self):
        return original(self, *args, **kwargs)
    with making_fakes():
        return original(self, *args, **kwargs)


# The tensor is made with the first jagged tensor of the process.
while_fakes_live.replaces(
    "torch.nested._internal.nested_tensor",
    "_nt_view_dummy",
    reason="makes a tensor that outlives the block, and keeps it in a global variable",
)(call_on_real_tensors)


@replaces(torch.backends.cudnn, "is_acceptable", reason="precedes a comparison of addresses", is_traced=True)
def _is_acceptable(original: Function, tensor: Tensor) -> Any:
    """`RNNBase.flatten_parameters()` checks this before it compares addresses and moves weights into one buffer."""
    if is_fake_tensor(tensor) and not _C.is_deferred(tensor):
        return False  # PyTorch's own kernels stand in for those of cuDNN, as on fake devices
    return original(tensor)


if DIFFERENCES["fake_above_python"].applies:
    for _owner in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
        while_fakes_live.replaces(
            _owner, "__call__", reason="handlers of __torch_dispatch__ call operators below the Fake key"
        )(_C.call_from_handler)


# ---- Patches of PyTorch's Python code for training with fakes: gradients, optimizers and distributed tensors


# ---- Allocations of Python functions in backward passes
#
# Gradient formulas in C++ are observed: csrc/extensions/composites/gradient_formulas.h.


# It recomputes the user's functions, whose factories make real tensors.
CHECKPOINT = "torch.utils.checkpoint"


def _hook(count: int, original: Function, /, *args: Any, **kwargs: Any) -> None:
    """Wrap the last two of `count` arguments, which pack and unpack a tensor."""
    # Errors about wrong arguments quote the arguments. aot_autograd inspects hooks that are graphs, and these do
    # not call functions of the program.
    is_method = not args[:-2] or isinstance(args[0], torch._C._autograd.SavedTensor)
    are_hooks = not kwargs and len(args) == count and is_method and all(map(callable, args[-2:]))
    if not are_hooks or any(isinstance(one, torch.fx.GraphModule) for one in args[-2:]):
        original(*args, **kwargs)
        return
    outside = (update_wrapper(partial(_C.call_outside_of_formula, one), one) for one in args[-2:])
    original(*args[:-2], *outside)


for _hooks, _name, _count in (
    (torch._C._autograd, "_push_saved_tensors_default_hooks", 2),
    (torch._C._autograd.SavedTensor, "register_hooks", 3),
):
    while_fakes_live.replaces(_hooks, _name, reason="makes formulas call functions of the program")(
        partial(_hook, _count)
    )


FUNCTIONS_ALLOCATE = "lets functions allocate, such as the compiled ones of aot_autograd"


@while_fakes_live.replaces(BackwardCFunction, "apply_boxed", needs="apply_boxed", reason=FUNCTIONS_ALLOCATE)
@while_fakes_live.replaces(BackwardCFunction, "apply", reason=FUNCTIONS_ALLOCATE)
def _apply(original: Function, self: Any, *args: Any) -> Any:
    module: str = getattr(getattr(self, "_forward_cls", None), "__module__", "")
    if not module.startswith("torch.") or module == CHECKPOINT:
        return original(self, *args)
    with _factories_like(args[0] if len(args) == 1 and isinstance(args[0], list) else args):
        return original(self, *args)


KINDS = (_C.is_deferred, _C.is_fake)


@contextmanager
def _factories_like(gradients: Any) -> Iterator[None]:
    """Let factories make tensors like those among `gradients`: deferred, fake or real."""
    # Computed before, because a function may free the gradients that it receives in a list.
    is_deferred, is_fake = (any(isinstance(one, Tensor) and check(one) for one in gradients) for check in KINDS)
    if is_deferred:
        _C.enter_deferred_init()
        try:
            yield
        finally:
            _C.leave_deferred_init()
    elif is_fake:
        with making_fakes():
            yield
    else:
        yield


# ---- Optimizers, whose state and steps mix fakes with real or sparse tensors


# By name, because `torch.optim` deletes the names of its modules.
@while_fakes_live.replaces(
    "torch.optim.adagrad", "adagrad", reason="coalesces gradients, which hides their number of elements"
)
@while_fakes_live.replaces(
    "torch.optim._functional", "sparse_adam", reason="coalesces gradients, which hides their number of elements"
)
def _step(original: Function, /, params: list[Tensor], grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The number of elements of coalesced gradients does not affect any metadata."""
    return original(params, [_as_if_coalesced(grad) for grad in grads], *args, **kwargs)


def _as_if_coalesced(grad: Tensor) -> Tensor:
    if not _C.is_fake(grad) or grad.layout is not torch.sparse_coo or grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values(), grad.shape, is_coalesced=True, check_invariants=False
    )


@while_fakes_live.replaces(
    torch.optim.Optimizer,
    "_process_value_according_to_param_policy",
    reason="keeps real tensors, into which step() would write fakes",
)
def _take_over(
    original: Function, param: Tensor, value: Tensor, param_id: int, param_groups: list[Any], key: object = None
) -> Any:
    """`Optimizer.load_state_dict()` keeps the tensors that this returns."""
    taken = original(param, value, param_id, param_groups, key)
    if not _C.is_fake(param) or _C.is_deferred(param) or _C.is_fake(taken):
        return taken
    return FakeCopy(None).tensor(taken)


# ---- Distributed tensors
#
# Before PyTorch 2.13, operators on them need help. The `Fake` key was above `Python` then, and `dispatchDTensorOp()` in
# `python_variable.cpp` calls the operator on the local tensors with all keys above `Python` excluded. If arguments have
# to be redistributed first, it leaves the call to Python, where the patch of `OpOverload.__call__` above
# restores the keys. The patch here therefore makes it redistribute always, from the present placements to the same
# placements.
#
# Some operators have their own handlers (`OpDispatcher._custom_op_handlers`). These are called in the same state, and
# call PyTorch functions as well as operators.


DISPATCH = "torch.distributed.tensor._dispatch"

# The handlers of 2.11 and 2.12, by module.
HANDLERS: dict[str, tuple[str, ...]] = {
    DISPATCH: ("as_strided_handler", "found_inf_reduce_handler", "is_pinned_handler", "is_same_size_handler"),
    "torch.distributed.tensor._nonlinear_redux": ("argminmax_handler", "minmax_dim_handler"),
    "torch.distributed.tensor._tp_conv": ("convolution_handler", "convolution_backward_handler"),
    "torch.distributed.tensor.parallel.loss": (
        *("_log_softmax_handler", "_log_softmax_backward_handler"),
        *("_nll_loss_forward_handler", "_nll_loss_backward_handler"),
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": ("_sdpa_handler",),
}


def _leave_call_to_python(
    original: Function, self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
) -> Any:
    sharding = original(self, op_call, args, kwargs, op_info, try_cache)
    if not dataclasses.is_dataclass(sharding) or getattr(sharding, "needs_redistribute", True):
        return sharding
    return dataclasses.replace(sharding, needs_redistribute=True, redistribute_schema=op_info.schema)  # type: ignore[type-var]


def _clear_cache() -> None:
    """Clear the cache before the patch is installed: its results for real tensors would bypass the patch."""
    torch._C._clear_DTensor_sharding_propagator_cache()


if DIFFERENCES["fake_above_python"].applies:
    _replaces = partial(while_fakes_live.replaces, releases=DIFFERENCES["fake_above_python"].releases)
    _replaces(
        f"{DISPATCH}:OpDispatcher",
        "_propagate_op_sharding_dispatch_slow_path",
        reason="calls operators on local tensors below the Fake key",
    )(_leave_call_to_python)
    while_fakes_live.declare_after_import(DISPATCH, _clear_cache)
    for _kind, _names in {f"{DISPATCH}:OpDispatcher": ("redistribute_local_args",), **HANDLERS}.items():
        for _name in _names:
            _replaces(_kind, _name, needs=_name, reason="computes on local tensors below the Fake key")(
                _C.call_from_handler
            )


while_fakes_live.declare(_C.watch_nested_lists)
