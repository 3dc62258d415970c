"""The few places where PyTorch's Python code has to know about fake and deferred tensors.

Nothing is patched before the first `fake_mode` or `deferred_init` of the process: until then no such tensor exists.
Every patch hands real tensors to the original, unchanged.
"""

from __future__ import annotations

import copy
import importlib
import math
import operator
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch._meta_registrations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from . import (
    _C,
    _companions,
    _data_patches,
    _distributed_patches,
    _fake_tensor_mode,
    _higher_order,
    _inductor,
    _meta_functions,
    _rejection,
)
from ._fake_copy import FakeCopy
from ._once import once
from ._patching import patch

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["ReadsInTensorFunctions", "install", "real_value", "teach_transformers"]


@once
def install() -> None:
    """Installs the patches."""
    _patch_repr()
    _patch_deepcopy()
    _patch_reads()
    _data_patches.install()
    _fake_tensor_mode.install()
    _distributed_patches.install()
    _higher_order.install()
    _inductor.install()
    _meta_functions.install()
    _patch_new_tensor()
    _patch_sparse_constructors()
    _patch_sparse_optimizers()
    _patch_device_hint()
    _patch_optimizer_state()
    _companions.install()
    _patch_lazy_parameters()
    _C.watch_nested_lists()
    if _C.built_for_torch < "2.13":
        _patch_calls_of_handlers()
    if _C.built_for_torch >= "2.12":
        _patch_trunc_normal()


def teach_transformers() -> None:
    """Where it sees a FakeTensor, transformers leaves out checks that read values, of attention masks say.

    It may be imported at any time, so this is called for each block.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if hasattr(module, "is_fake_tensor"):
        _patch_transformers(module)


_patched_transformers: set[int] = set()


def _patch_transformers(module: Any) -> None:
    if id(module) in _patched_transformers:
        return
    _patched_transformers.add(id(module))

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_fake_tensor(x: Any) -> bool:
            ours = isinstance(x, torch.Tensor) and _C.is_fake(x) and not _C.is_deferred(x)
            return ours or bool(original(x))

        return is_fake_tensor

    patch(module, "is_fake_tensor", make, "transformers reads values of masks unless they are fake")


def _patch_repr() -> None:
    """`Tensor.__repr__` formats values (`torch._tensor_str`) and cannot be extended."""

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def __repr__(self: torch.Tensor, **kwargs: Any) -> str:
            if not _is_fake(self):
                return original(self, **kwargs)
            if not _shows_values(self):
                return _repr_of_fake(self)
            if kwargs.get("tensor_contents") is None:
                kwargs["tensor_contents"] = _formatted_values(self)
            return original(self, **kwargs)

        return __repr__

    patch(torch.Tensor, "__repr__", make, "formats values, and cannot be extended")


def _is_fake(obj: object) -> bool:
    """Methods of tensors may be called with what is not a tensor, by mistake."""
    return isinstance(obj, torch.Tensor) and _C.is_fake(obj)


def _repr_of_fake(fake: torch.Tensor) -> str:
    parts = [
        f"size={tuple(fake.shape)}",
        f"dtype={fake.dtype}",
        f"device='{fake.device}'",
        *([] if fake.layout is torch.strided else [f"layout={fake.layout}", f"nnz={fake._nnz()}"]),
        *(["requires_grad=True"] if fake.requires_grad and fake.is_leaf else []),
        *([f"grad_fn=<{type(fake.grad_fn).__name__}>"] if fake.grad_fn is not None else []),
    ]
    return f"tensor(..., {', '.join(parts)}, fake=True)"


def _shows_values(tensor: torch.Tensor) -> bool:
    """A constructor may look at what it prints: it gets what is not more than PyTorch prints in full."""
    return (
        _C.is_deferred(tensor)
        and torch._C._dispatch_tls_is_dispatch_key_included("DeferredInit")
        and tensor.numel() <= torch._tensor_str.PRINT_OPTS.threshold
    )


def _formatted_values(tensor: torch.Tensor) -> str:
    cls = type(tensor)
    if tensor.numel() == 0:
        return "[]"
    prefix = "tensor(" if cls in (torch.Tensor, torch.nn.Parameter) else f"{cls.__name__}("
    real = _C.evaluate(tensor)
    ours = torch._C.DispatchKeySet(KEYS[0]).add(KEYS[1])
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._ExcludeDispatchKeyGuard(ours),
    ):
        return str(torch._tensor_str._tensor_str(real, len(prefix)))


def _patch_deepcopy() -> None:
    """`Tensor.__deepcopy__` copies the storage's memory behind the dispatcher's back."""

    def make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if isinstance(memo, FakeCopy):
                return memo.tensor(self)
            # A sparse tensor is cloned, or refused if it is compressed.
            if not _is_fake(self) or self.layout is not torch.strided or id(self) in memo:
                return original(self, memo)
            return _deepcopy_of_fake(self, memo)

        return __deepcopy__

    patch(torch.Tensor, "__deepcopy__", make, "copies the memory of the storage")
    for cls in (torch.nn.Parameter, torch.nn.UninitializedParameter):
        patch(cls, "__deepcopy__", _copying_to_fakes, "the same, for parameters")


def _deepcopy_of_fake(fake: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not fake.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
            f"moment, but this fake tensor of shape {tuple(fake.shape)} was computed from others; call detach() on "
            "it first."
        )
    result = _C.view_storage_like(_data_patches.copied_bytes(fake.untyped_storage(), memo), fake)
    if not result.is_inference():
        torch.autograd.graph.increment_version(result)  # as the `set_()` of the original does
    result = result.resolve_conj().resolve_neg()  # which are on storages of their own
    if type(fake) is not torch.Tensor:
        result = result.as_subclass(type(fake))
    result.requires_grad_(fake.requires_grad)
    memo[id(fake)] = result
    if fake.grad is not None:
        result.grad = copy.deepcopy(fake.grad, memo)
    result.__dict__.update(copy.deepcopy(fake.__dict__, memo))
    return result


def _copying_to_fakes(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Parameter` has a `__deepcopy__` of its own."""

    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return memo.tensor(self) if isinstance(memo, FakeCopy) else original(self, memo)

    return __deepcopy__


def _patch_reads() -> None:
    """`tolist()` and `numpy()` read the memory of the tensor without calling an operator."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: original(real_value(self))

    patch(torch.Tensor, "tolist", make, "reads memory without calling an operator")
    for name, error in (("numpy", RuntimeError), ("__array__", RuntimeError), ("__dlpack__", BufferError)):
        make_sharing = partial(_sharing_memory, name=name, error=error)
        patch(torch.Tensor, name, make_sharing, "shares memory without calling an operator")


def _sharing_memory(original: Callable[..., Any], name: str, error: type[Exception]) -> Callable[..., Any]:
    """Makes a deferred tensor real before `original` hands out an array that shares its memory."""

    def share(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_fake(self) and _C.is_deferred(self):
            _C.materialize([self])
        if _is_fake(self):
            raise error(_data_patches.no_data(f"{name}()", self))
        return original(self, *args, **kwargs)

    return share


def real_value(data: Any) -> Any:
    """Returns `data`, a tensor or nested sequences, with real tensors in the place of deferred ones.

    What PyTorch reads otherwise than element by element (`internal_new_from_data()`, tensor_new.cpp) is left as it is,
    and so is what it refuses: sequences that are nested too deep, or contain themselves, or cannot be read.
    """
    try:
        return data if _is_nested_too_deep(data) else _real_value(data, ())
    except _UnreadableError:
        return data


class _UnreadableError(Exception):
    """A sequence does not give its elements."""


def _real_value(data: Any, parents: tuple[Any, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return _C.evaluate(data) if _C.is_deferred(data) else data
    if not _is_sequence(data) or any(data is parent for parent in parents):
        return data
    elements = [_element(data, i) for i in range(len(data))]
    parents = (*parents, data)
    values = [_real_value(element, parents) for element in elements]
    if not any(map(operator.is_not, values, elements)):
        return data
    return tuple(values) if type(data) is tuple else values


def _is_nested_too_deep(data: Any) -> bool:
    for _ in range(MAX_DIMENSIONS + 1):
        if isinstance(data, torch.Tensor) or not _is_sequence(data) or len(data) == 0:
            return False
        data = _element(data, 0)  # PyTorch looks at the first ones, too
    return True


def _element(sequence: Any, place: int) -> Any:
    try:
        return sequence[place]
    except Exception as error:
        raise _UnreadableError from error


MAX_DIMENSIONS = 128  # `MAX_DIMS`, tensor_new.cpp
NUMBERS = frozenset({int, float, complex, bool, str, bytes, range})
MEMORY = ("__cuda_array_interface__", "__array_interface__", "__dlpack__")


def _is_sequence(data: object) -> bool:
    cls = type(data)
    if cls in NUMBERS:
        return False
    if isinstance(data, dict | str | bytes | bytearray | memoryview | torch.UntypedStorage | torch.TypedStorage):
        return False
    return hasattr(cls, "__getitem__") and hasattr(cls, "__len__") and not any(hasattr(data, name) for name in MEMORY)


# The factories that read elements and can be asked for by a mode, and how they call what they read.
DATA_OF_FACTORIES: dict[Callable[..., Any], str] = {torch.tensor: "data", torch.as_tensor: "data", torch.asarray: "obj"}
# What reads an element (`store_scalar()`, python_scalars.h).
READS_OF_ELEMENTS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__index__", "__bool__", "__complex__")
)
KEYS = tuple(torch._C._dispatch_key_parse(name) for name in ("DeferredInit", "Fake"))


class ReadsInTensorFunctions(TorchFunctionMode):
    """Lets `torch.tensor([x, y])`, `torch.asarray()`, `torch.Tensor()` and their kin read values of deferred tensors.

    All of them exclude the `Fake` and `DeferredInit` keys while they read their argument (tensor_new.cpp), so the
    dispatcher does not ask us. A mode is asked, on this thread, and leaves nothing behind: about the first two as such,
    about the constructors of tensor types only when they read an element.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, with real values in what it would read."""
        kwargs = kwargs or {}
        if func in DATA_OF_FACTORIES:
            return _make_of_real_values(func, args, kwargs)
        if func in READS_OF_ELEMENTS and torch._C._dispatch_tls_is_dispatch_key_excluded("DeferredInit"):
            return _read_with_keys(func, args)
        return func(*args, **kwargs)


def _make_of_real_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = DATA_OF_FACTORIES[func]
    if not args and name not in kwargs:
        return func(**kwargs)  # raises
    rest = {key: value for key, value in kwargs.items() if args or key != name}
    data = args[0] if args else kwargs[name]
    if isinstance(data, torch.UntypedStorage | torch.TypedStorage) and _C.is_storage_of_fakes(_untyped(data)):
        return _make_on_storage(func, data, rest)
    if func is torch.tensor:
        return make_tensor(data, *args[1:], **rest)
    return func(data if isinstance(data, torch.Tensor) else real_value(data), *args[1:], **rest)


def _make_on_storage(func: Callable[..., Any], storage: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """What `func` makes shares the memory of a storage. What it infers and refuses is tried out on another one."""
    other: Any = torch.UntypedStorage(16)  # at least one element of any dtype
    if isinstance(storage, torch.TypedStorage):
        other = torch.TypedStorage(wrap_storage=other, dtype=storage.dtype, _internal=True)
    form = func(other, **kwargs)
    made = torch.empty(0, dtype=form.dtype, device=_untyped(storage).device).set_(_untyped(storage))
    return made.to(form.device).requires_grad_(form.requires_grad)


def _untyped(storage: torch.UntypedStorage | torch.TypedStorage) -> torch.UntypedStorage:
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


def _read_with_keys(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with torch._C._SetExcludeDispatchKeyGuard(KEYS[0], False), torch._C._SetExcludeDispatchKeyGuard(KEYS[1], False):
        return func(*args)


def make_tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """`torch.tensor()` for data that may be, or hold, fake tensors: a fake is copied, the values of others are read."""
    if isinstance(data, torch.Tensor) and _C.is_fake(data):
        return data.detach().to(device=device, dtype=dtype, copy=True).requires_grad_(requires_grad)
    return torch.tensor(real_value(data), dtype=dtype, device=device, requires_grad=requires_grad, **kwargs)


def _patch_new_tensor() -> None:
    """`Tensor.new_tensor()` asks the highest dispatch key of `self` for its device (`legacyExtractDispatchKey()`)."""
    reason = "asks the highest dispatch key for the device (legacyExtractDispatchKey)"
    patch(torch.Tensor, "new_tensor", _lifting_data, reason)
    patch(torch.Tensor, "new", _making_fakes, reason)


def _lifting_data(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        data = kwargs["data"] if "data" in kwargs else args[0] if args else None
        if not _is_fake(self) or len(args) + ("data" in kwargs) != 1 or not kwargs.keys() <= NEW_TENSOR_OPTIONS:
            return original(self, *args, **kwargs)  # which refuses them
        given = {name: value for name, value in kwargs.items() if value is not None and name != "data"}
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device} | given
        result = make_tensor(data, **options)
        _C.make_amp_like(result, self)
        return result

    return new_tensor


NEW_TENSOR_OPTIONS = {"data", "dtype", "device", "requires_grad", "pin_memory", "names"}


def _making_fakes(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.new()`, the oldest of the factories, asks the highest dispatch key, too."""

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_fake(self):
            return original(self, *args, **kwargs)
        options = dict(kwargs)
        device = options.pop("device", None)
        # `size`, `data`, `other` or `storage`; or `indices`, `values` and `size`, in whatever order they are given.
        names = sorted(options, key=lambda name: {"indices": 0, "values": 1}.get(name, 2))
        given = (*args, *(options[name] for name in names))
        made = _new_fake(self, given, self.device if device is None else device)
        _C.make_amp_like(made, self)
        return made

    return new


def _new_fake(like: torch.Tensor, args: tuple[Any, ...], device: torch.device | str | int) -> torch.Tensor:
    if like.layout is torch.sparse_coo and args and isinstance(args[0], torch.Tensor):
        return torch.sparse_coo_tensor(*args, dtype=like.dtype, device=device)
    if not args or isinstance(args[0], int | torch.Size):
        return like.new_empty(*args or (0,), device=device)
    if isinstance(args[0], torch.UntypedStorage | torch.TypedStorage):
        return like.new_empty(0, device=device).set_(args[0])
    if isinstance(args[0], torch.Tensor):
        alias: torch.Tensor = torch.ops.aten.alias(args[0])
        return alias
    return make_tensor(args[0], dtype=like.dtype, device=device)


def _patch_sparse_constructors() -> None:
    """`torch.sparse_coo_tensor()` and its kin make real members of data that are no tensors."""
    for name in ("coo", "csr", "csc", "bsr", "bsc", "compressed"):
        patch(torch, f"sparse_{name}_tensor", _lifting, "makes real members of data that are no tensors")


def _lifting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes what `original` returns fake in `fake_mode`, as `torch.tensor()` does, unless it was given tensors."""

    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_given = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
        if is_given or not torch._C._dispatch_tls_is_dispatch_key_included("Fake"):
            return original(*args, **kwargs)
        device = torch.empty(0, device=kwargs.get("device")).device
        if device.type == "meta":
            return original(*args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Fake"))):
            constant = original(*args, **{**kwargs, "device": "cpu"})
        return FakeCopy(device).tensor(constant)

    return construct


def _patch_sparse_optimizers() -> None:
    """These coalesce gradients. How many elements they have then does not show in what is written."""
    for module, name in (("torch.optim._functional", "sparse_adam"), ("torch.optim.adagrad", "adagrad")):
        functions = importlib.import_module(module)  # `torch.optim` deletes the names of its modules
        patch(functions, name, _coalescing, "coalesces gradients, whose number of elements then does not show")


def _coalescing(original: Callable[..., None]) -> Callable[..., None]:
    def step(params: list[torch.Tensor], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        return original(params, [_as_if_coalesced(grad) for grad in grads], *args, **kwargs)

    return step


def _as_if_coalesced(grad: torch.Tensor) -> torch.Tensor:
    if not _C.is_fake(grad) or grad.layout is not torch.sparse_coo or grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values(), grad.shape, is_coalesced=True, check_invariants=False
    )


def _patch_device_hint() -> None:
    """Meta kernels in Python ask `device_hint()` for the device of a FakeTensor, and take CUDA for any other."""

    def make(original: Callable[..., str]) -> Callable[..., str]:
        return lambda tensor: _C.meta_call_device() or original(tensor)

    reason = "takes CUDA for the device of whatever is no FakeTensor of PyTorch's"
    patch(torch._meta_registrations, "device_hint", make, reason)


def _patch_optimizer_state() -> None:
    """`Optimizer.load_state_dict()` takes over the tensors that it is given, and `step()` would write fakes into them.

    Real steps stay real, because optimizers read them.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def take_over(
            param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[Any], key: object = None
        ) -> Any:
            taken = original(param, value, param_id, param_groups, key)
            if not _C.is_fake(param) or _C.is_deferred(param) or _C.is_fake(taken):
                return taken
            return taken.clone() if key == "step" else FakeCopy(None).tensor(taken)

        return take_over

    name = "_process_value_according_to_param_policy"
    patch(torch.optim.Optimizer, name, make, "takes over real tensors, into which step() would write fakes")


def _patch_lazy_parameters() -> None:
    """A lazy parameter allocates with `torch.empty()` when the first input has told its shape."""
    cls = torch.nn.UninitializedParameter
    patch(cls, "materialize", _fake_if_self_is, "allocates with torch.empty(), whatever the parameter is")


def _fake_if_self_is(original: Callable[..., None]) -> Callable[..., None]:
    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not _is_fake(self) or _C.is_deferred(self):
            return original(self, *args, **kwargs)
        _C.enter_fake_mode()
        try:
            return original(self, *args, **kwargs)
        finally:
            _C.leave_fake_mode()

    return run


def _patch_calls_of_handlers() -> None:
    """Before 2.13 the `Fake` key is above `Python`, and handlers of `__torch_dispatch__` call operators below that."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: torch._ops.OpOverload, /, *args: Any, **kwargs: Any) -> Any:
            return _C.call_from_handler(original, self, *args, **kwargs)

        return __call__

    patch(torch._ops.OpOverload, "__call__", make, "handlers of __torch_dispatch__ call operators below the Fake key")


def _patch_trunc_normal() -> None:
    """Since 2.12 `trunc_normal_` draws again while `mask.any()`, which would compute the tensor to look at it."""
    original = torch.nn.init._no_grad_trunc_normal_
    quiet = _without_warnings(original)
    library = torch.library.Library("torchext", "FRAGMENT")
    library.define(
        "trunc_normal_(Tensor(a!) self, float mean, float std, float a, float b, *, Generator? generator=None)"
        " -> Tensor(a!)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )

    library.define(
        "trunc_normal_draws(int numel, ScalarType dtype, float mean, float std, float a, float b, Generator generator)"
        " -> int"
    )

    def run(
        self: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if generator is None or not self.is_contiguous() or self.numel() < 2 * _rejection.CHUNK:
            return quiet(self, mean, std, a, b, generator)
        _rejection.sample(partial(sample, mean, std, a, b), self, generator)
        return self

    def draws(
        numel: int, dtype: torch.dtype, mean: float, std: float, a: float, b: float, generator: torch.Generator
    ) -> int:
        return _rejection.count_draws(partial(sample, mean, std, a, b), numel, dtype, generator)

    def sample(mean: float, std: float, a: float, b: float, tensor: torch.Tensor, generator: torch.Generator) -> object:
        return quiet(tensor, mean, std, a, b, generator)

    def fake(
        self: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return self

    for key in ("CPU", "CUDA"):
        library.impl("trunc_normal_", run, key)
    library.impl("trunc_normal_draws", draws, "CompositeExplicitAutograd")
    library.impl("trunc_normal_", fake, "Meta")

    patch(torch.nn.init, "_no_grad_trunc_normal_", _recorded_trunc_normal, "reads whether it must draw again")
    _libraries.append(library)


def _recorded_trunc_normal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def _no_grad_trunc_normal_(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if _is_fake(tensor) and (tensor.is_conj() or tensor.is_neg()):
            _call_on_nothing(original, _conjugated if tensor.is_conj() else _negated, mean, std, a, b)  # raises
        if not _is_fake(tensor) or not tensor.is_floating_point():
            return original(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            if _never_rejects(mean, std, a, b):
                return tensor.normal_(mean, std, generator=generator)
            if not a - 2 * std <= mean <= b + 2 * std:
                _call_on_nothing(original, torch.clone, mean, std, a, b)  # warns
            torch.ops.torchext.trunc_normal_(tensor, mean, std, a, b, generator=generator)
            # The first draw, and the write of what was drawn again, which is not needed only if nothing was rejected.
            for _ in range(2):
                torch.autograd.graph.increment_version(tensor)
            return tensor

    return _no_grad_trunc_normal_


def _without_warnings(function: Callable[P, R]) -> Callable[P, R]:
    """A copy of `function` that warns nobody: it may run often for what the user has called once.

    Not so by `warnings.catch_warnings()`, which hushes all threads.
    """
    if type(function) is not FunctionType:
        return function
    names = {**function.__globals__, "warnings": SimpleNamespace(warn=lambda *args, **kwargs: None)}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return cast("Callable[P, R]", copy)


def _conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64).conj()


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    return _conjugated(tensor).imag


def _call_on_nothing(function: Callable[..., Any], view: Callable[[torch.Tensor], torch.Tensor], *args: Any) -> None:
    """Calls `function` with `view` of a real tensor without elements, of which modes of the user's see nothing."""
    ours = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Fake")).add(
        torch._C._dispatch_key_parse("DeferredInit")
    )
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch._C._ExcludeDispatchKeyGuard(ours):
        function(view(torch.empty(0)), *args)


# A `torch.library.Library` takes its operators back when it is freed.
_libraries: list[torch.library.Library] = []


def _never_rejects(mean: float, std: float, a: float, b: float) -> bool:
    """Tells whether `trunc_normal_` surely accepts its first draw of every element.

    Box-Muller's radius is sqrt(-2 log u) for a uniform u of 53 bits at most (`normal_distribution<double>`), so that no
    draw is farther than sqrt(2 * 53 * log 2) = 8.57 standard deviations from the mean. The bounds and the draws are
    rounded to the tensor's dtype, for which one standard deviation and one percent of everything are far more than
    enough.
    """
    reach = (math.sqrt(2 * 53 * math.log(2)) + 1) * std
    slack = 0.01 * (abs(mean) + reach)
    return std > 0 and mean - reach - slack > a and mean + reach + slack < b
