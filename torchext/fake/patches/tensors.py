"""Patches for tensor methods that read memory, print values, or construct by the highest dispatch key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ... import _C
from ...internals.dispatch_keys import is_constructing, making_fakes, without_our_keys
from ...internals.leases import while_fakes_live
from ...internals.patching import Concerns
from ...internals.torch_release import DIFFERENCES
from ..checks import is_fake_tensor
from ..copying import FakeCopy
from .storages import copied_bytes, no_data

__all__ = ["install"]


def install() -> None:
    """Install the patches."""
    _patch_repr()
    _patch_deepcopy()
    _patch_reads()
    _patch_new_tensor()
    _patch_lazy_parameters()
    _patch_nested_dummy()
    _patch_tensor_types()
    _patch_cudnn()
    if DIFFERENCES["fake_above_python"].applies:
        _patch_calls_of_handlers()


def _patch_repr() -> None:
    """`Tensor.__repr__` formats values (`torch._tensor_str`) and cannot be extended."""

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def __repr__(self: torch.Tensor, **kwargs: Any) -> str:
            if not is_fake_tensor(self):
                return original(self, **kwargs)
            if not _shows_values(self):
                return _repr_of_fake(self)
            if kwargs.get("tensor_contents") is None:
                kwargs["tensor_contents"] = _formatted_values(self)
            return original(self, **kwargs)

        return __repr__

    while_fakes_live.patch(
        torch.Tensor, "__repr__", make, "formats values, and cannot be extended", concerns=Concerns.FAKES
    )


def _repr_of_fake(fake: torch.Tensor) -> str:
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
    return f"tensor(..., {', '.join(parts)}, fake=True)"


def _shows_values(tensor: torch.Tensor) -> bool:
    """Return true if `repr()` shows the values: a constructor may print them if PyTorch would print them in full."""
    return _C.is_deferred(tensor) and is_constructing() and tensor.numel() <= torch._tensor_str.PRINT_OPTS.threshold


def _formatted_values(tensor: torch.Tensor) -> str:
    cls = type(tensor)
    if tensor.numel() == 0:
        return "[]"
    prefix = "tensor(" if cls in (torch.Tensor, torch.nn.Parameter) else f"{cls.__name__}("
    real = _C.evaluate(tensor)
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        without_our_keys(),
    ):
        return str(torch._tensor_str._tensor_str(real, len(prefix)))


def _patch_deepcopy() -> None:
    """`Tensor.__deepcopy__` copies the storage's memory without an operator."""

    def make(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if isinstance(memo, FakeCopy):
                return memo.tensor(self)
            # A sparse tensor is cloned; a compressed one raises.
            if not is_fake_tensor(self) or self.layout is not torch.strided or id(self) in memo:
                return original(self, memo)
            return _deepcopy_of_fake(self, memo)

        return __deepcopy__

    reason = "copies the memory of the storage"
    while_fakes_live.patch(torch.Tensor, "__deepcopy__", make, reason, concerns=Concerns.FAKES)
    for cls in (torch.nn.Parameter, torch.nn.UninitializedParameter):
        while_fakes_live.patch(cls, "__deepcopy__", _copying_to_fakes, reason, concerns=Concerns.FAKES)


def _deepcopy_of_fake(fake: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
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
    if type(fake) is not torch.Tensor:
        result = result.as_subclass(type(fake))
    result.requires_grad_(fake.requires_grad)
    memo[id(fake)] = result
    if fake.grad is not None:
        result.grad = copy.deepcopy(fake.grad, memo)
    result.__dict__.update(copy.deepcopy(fake.__dict__, memo))
    return result


def _copying_to_fakes(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Parameter` has its own `__deepcopy__`."""

    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return memo.tensor(self) if isinstance(memo, FakeCopy) else original(self, memo)

    return __deepcopy__


def _patch_reads() -> None:
    """`tolist()` and `numpy()` read the memory of the tensor without calling an operator."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def tolist(self: torch.Tensor) -> Any:
            known = _C.evaluate(self) if _C.is_deferred(self) else _C.known_value(self)
            return original(self if known is None else known)

        return tolist

    reason = "reads memory without calling an operator"
    while_fakes_live.patch(torch.Tensor, "tolist", make, reason, concerns=Concerns.FAKES)
    for name, error in (("numpy", RuntimeError), ("__array__", RuntimeError), ("__dlpack__", BufferError)):
        make_sharing = partial(_sharing_memory, name=name, error=error)
        reason = "shares memory without calling an operator"
        while_fakes_live.patch(torch.Tensor, name, make_sharing, reason, concerns=Concerns.FAKES)


def _sharing_memory(original: Callable[..., Any], name: str, error: type[Exception]) -> Callable[..., Any]:
    """Materialize a deferred tensor before `original` returns an array that shares its memory.

    An array of known values shares their memory while they are known.
    """

    def share(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_fake_tensor(self) and _C.is_deferred(self):
            _C.materialize([self])
        if is_fake_tensor(self):
            is_there = self.device.type == "cpu" or (name == "numpy" and bool(kwargs.get("force")))
            known = _C.known_value(self) if is_there and name != "__dlpack__" else None
            if known is None:
                raise error(no_data(f"{name}()", self))
            return original(known.requires_grad_(self.requires_grad), *args, **kwargs)
        return original(self, *args, **kwargs)

    return share


def _make_tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    if isinstance(data, torch.Tensor) and _C.is_fake(data):
        return data.detach().to(device=device, dtype=dtype, copy=True).requires_grad_(requires_grad)
    return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **kwargs)


def _patch_new_tensor() -> None:
    """`Tensor.new_tensor()` derives its device from the highest dispatch key (`legacyExtractDispatchKey()`)."""
    reason = "derives the device from the highest dispatch key (legacyExtractDispatchKey)"
    while_fakes_live.patch(torch.Tensor, "new_tensor", _lifting_data, reason, concerns=Concerns.FAKES)
    while_fakes_live.patch(torch.Tensor, "new", _made_by_the_dispatcher, reason, concerns=Concerns.FAKES)


def _lifting_data(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        data = kwargs["data"] if "data" in kwargs else args[0] if args else None
        if not is_fake_tensor(self) or len(args) + ("data" in kwargs) != 1 or not kwargs.keys() <= NEW_TENSOR_OPTIONS:
            return original(self, *args, **kwargs)  # raises for these
        _check_highest_key(self)
        given = {name: value for name, value in kwargs.items() if value is not None and name != "data"}
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device} | given
        result = _make_tensor(data, **options)
        _C.make_amp_like(result, self)
        return result

    return new_tensor


def _check_highest_key(tensor: torch.Tensor) -> None:
    """Raise the error that PyTorch raises if that key belongs to no device."""
    bits = {"ZeroTensor": tensor._is_zerotensor, "Negative": tensor.is_neg, "Conjugate": tensor.is_conj}
    for key, is_set in bits.items():
        if is_set():
            raise RuntimeError(f"DispatchKey {key} doesn't correspond to a device")


NEW_TENSOR_OPTIONS = {"data", "dtype", "device", "requires_grad", "pin_memory", "names"}


def _made_by_the_dispatcher(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.new()`, the oldest factory, also uses the highest dispatch key."""

    def new(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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
    return _make_tensor(args[0], dtype=like.dtype, device=device)


def _patch_lazy_parameters() -> None:
    """A lazy parameter allocates with `torch.empty()` when the first input has determined its shape."""
    cls = torch.nn.UninitializedParameter
    while_fakes_live.patch(cls, "materialize", _fake_if_self_is, "allocates with torch.empty() for any parameter")


def _fake_if_self_is(original: Callable[..., None]) -> Callable[..., None]:
    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not is_fake_tensor(self) or _C.is_deferred(self):
            return original(self, *args, **kwargs)
        with making_fakes():
            return original(self, *args, **kwargs)

    return run


def _patch_nested_dummy() -> None:
    """`torch.nested` makes a tensor with the first jagged tensor and keeps it for the life of the process."""
    from torch.nested._internal import nested_tensor  # not imported by `import torch` in all releases

    def make(original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def _nt_view_dummy() -> torch.Tensor:
            with without_our_keys():
                return original()

        return _nt_view_dummy

    while_fakes_live.patch(
        nested_tensor,
        "_nt_view_dummy",
        make,
        "makes a tensor that outlives the block, and keeps it in a global variable",
    )


def _patch_tensor_types() -> None:
    """`isinstance(tensor, torch.FloatTensor)` compares the highest dispatch key (`legacyExtractDispatchKey()`)."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def __instancecheck__(self: type, instance: object) -> bool:
            if not isinstance(instance, torch.Tensor) or not _C.is_fake(instance):
                return original(self, instance)
            return bool(instance.type() == f"{self.__module__}.{self.__name__}")

        return __instancecheck__

    while_fakes_live.patch(
        type(torch.FloatTensor),
        "__instancecheck__",
        make,
        "derives the device from the highest dispatch key (legacyExtractDispatchKey)",
        concerns=Concerns.FAKES,
    )


def _patch_cudnn() -> None:
    """`RNNBase.flatten_parameters()` checks this before it compares addresses and moves weights into one buffer."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_acceptable(tensor: torch.Tensor) -> bool:
            if is_fake_tensor(tensor) and not _C.is_deferred(tensor):
                return False  # PyTorch's own kernels stand in for those of cuDNN, as on fake devices
            return original(tensor)

        return is_acceptable

    reason = "precedes a comparison of addresses"
    while_fakes_live.patch(torch.backends.cudnn, "is_acceptable", make, reason, concerns=Concerns.FAKES, is_traced=True)


def _patch_calls_of_handlers() -> None:
    """Before 2.13 the `Fake` key is above `Python`, below which handlers of `__torch_dispatch__` call operators."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: torch._ops.OpOverload, /, *args: Any, **kwargs: Any) -> Any:
            return _C.call_from_handler(original, self, *args, **kwargs)

        return __call__

    reason = "handlers of __torch_dispatch__ call operators below the Fake key"
    for operators in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
        while_fakes_live.patch(operators, "__call__", make, reason)
