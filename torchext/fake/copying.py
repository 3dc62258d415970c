"""Copies tensors, modules and containers of them to fakes."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import _C

__all__ = ["FakeCopy"]


class FakeCopy(dict[int, Any]):
    """The objects that have been copied to fakes, by `id()`.

    It is the memo of a `copy.deepcopy()`. Patches of tensors and storages look up their copies
    in it.
    """

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self._device = device
        # By the address of the original storage, which is kept alive so that its address is not reused.
        self._storages: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}
        # Kept for the same reason.
        self._originals: list[torch.Tensor] = []
        # Wrappers whose inner tensors are being copied.
        self._wrappers: list[torch.Tensor] = []

    def tree(self, obj: Any) -> Any:
        """Copy a pytree. Leaves other than tensors, modules and optimizers are passed through."""
        return pytree.tree_map(self._leaf, obj, is_leaf=_has_attributes)

    def module(self, module: Module | Optimizer) -> Module | Optimizer:
        """Copy a module or an optimizer with everything attached to it."""
        if isinstance(module, Module):
            for part in module.modules():
                if isinstance(part, torch.jit.ScriptModule):
                    raise TypeError(
                        f"fake_like() cannot copy a {type(part).__name__}, because TorchScript copies the memory of "
                        "tensors itself. Pass the module that was scripted or traced."
                    )
            # A tensor subclass may define a `__deepcopy__` that copies memory.
            for tensor in (*module.parameters(), *module.buffers()):
                self.tensor(tensor)
        try:
            return copy.deepcopy(module, self)
        except NotImplementedError:
            raise
        except Exception as error:
            raise TypeError(
                f"fake_like() copies a {type(module).__name__} with copy.deepcopy(), which raised "
                f"{type(error).__name__}: {error}. Define `__deepcopy__` for the class that cannot be copied, or "
                "construct the module inside fake_mode()."
            ) from error

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor, its `grad` and its attributes."""
        known: torch.Tensor | None = self.get(id(tensor))
        if known is not None:
            return known
        # The copy is internal: modes and subclasses must not observe it.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
            fake = self._make(tensor)
        self[id(tensor)] = fake
        self._originals.append(tensor)
        # Reading `grad` of other tensors warns.
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            fake.grad = self.tensor(tensor.grad)
        self._copy_attributes(tensor, fake)
        return fake

    def storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Copy a storage. Tensors that share it share the copy."""
        return self._bytes_of(storage).untyped_storage()

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if isinstance(leaf, Module | Optimizer):
            return self.module(leaf)
        if isinstance(leaf, torch.UntypedStorage):
            return self.storage(leaf)
        if _has_attributes(leaf):
            result = OrderedDict((key, self.tree(value)) for key, value in leaf.items())
            vars(result).update(copy.deepcopy(vars(leaf), self))
            return result
        return leaf

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return self._rewrap_for_transform(tensor)
        _check_layout(tensor)
        if tensor.layout is not torch.strided:
            return self._make_of_members(tensor)
        if is_traceable_wrapper_subclass(tensor):
            return self._rewrap(tensor)
        if isinstance(tensor, FakeTensor):
            return self._from_fake_tensor(tensor)
        _check_storage(tensor)
        fake = self._view_of_base(tensor)
        if fake is None:
            fake = _C.view_storage_like(self._bytes_of(tensor.untyped_storage(), tensor.device), tensor)
            if tensor.numel() == 1:
                _C.copy_value(fake, tensor)
            if type(tensor) is not torch.Tensor:
                return torch.Tensor._make_subclass(type(tensor), fake, tensor.requires_grad)
        elif type(tensor) is not torch.Tensor:
            fake = fake.as_subclass(type(tensor))
        return fake.requires_grad_(tensor.requires_grad)

    def _rewrap_for_transform(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that `torch.func.vmap` or `grad` has wrapped, and wrap the copy for the same level."""
        functorch = torch._C._functorch
        inner = functorch.get_unwrapped(tensor)
        level = functorch.maybe_get_level(tensor)
        with temporarily_clear_interpreter_stack():
            fake = self.tensor(inner)
        if functorch.is_batchedtensor(tensor):
            return functorch._add_batch_dim(fake, functorch.maybe_get_bdim(tensor), level)
        if functorch.is_gradtrackingtensor(tensor):
            return functorch._wrap_for_grad(fake, level)
        raise NotImplementedError("fake_like() cannot copy a tensor of torch.func.functionalize().")

    def _make_of_members(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of another layout from copies of its strided members."""
        fake = _C.sparse_fake_of(tensor, [self.tensor(member.detach()) for member in _C.layout_members(tensor)])
        if type(tensor) is not torch.Tensor:
            return torch.Tensor._make_subclass(type(tensor), fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _view_of_base(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a view as a view of the copy of its base, where autograd permits that."""
        base = tensor._base
        if base is None or tensor.requires_grad or base.requires_grad or not _is_strided_view(tensor, base):
            return None
        return self.tensor(base).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _rewrap(self, tensor: Any) -> torch.Tensor:
        """Copy a wrapper, which consists of other tensors and has no memory itself."""
        if any(tensor is wrapper for wrapper in self._wrappers):
            raise TypeError(
                f"fake_like() cannot copy a {type(tensor).__name__} of shape {tuple(tensor.shape)} that contains "
                "itself, which torch.utils.swap_tensors() causes for a wrapper and its inner tensor."
            )
        names, context = tensor.__tensor_flatten__()
        self._wrappers.append(tensor)
        try:
            parts = {name: self._part(getattr(tensor, name)) for name in names}
        finally:
            self._wrappers.pop()
        result: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
        return result.requires_grad_(tensor.requires_grad)

    def _part(self, part: Any) -> Any:
        return self.tensor(part) if isinstance(part, torch.Tensor) else part  # a `DTensor` also lists its mesh

    def _from_fake_tensor(self, tensor: FakeTensor) -> torch.Tensor:
        """Copy a `FakeTensor`, which is a subclass around a meta tensor."""
        fake = _C.view_storage_like(self._bytes_of(tensor.untyped_storage(), tensor.device), tensor)
        if getattr(tensor, "_is_param", False):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _bytes_of(self, storage: torch.UntypedStorage, device: torch.device | None = None) -> torch.Tensor:
        key = storage._cdata
        if key not in self._storages:
            device = self._device or device or storage.device
            self._storages[key] = _C.fake_bytes(storage.nbytes(), device), storage
        return self._storages[key][0]

    def _copy_attributes(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            return  # they belong to FakeTensorMode
        names = [] if type(tensor) is torch.Tensor else copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
        for name in names:
            if hasattr(tensor, name) and not hasattr(fake, name):
                setattr(fake, name, copy.deepcopy(getattr(tensor, name), self))
        for name, value in tensor.__dict__.items():
            # A wrapper has created its own attributes. Capsules are PyTorch's caches, which are rebuilt on demand.
            if name not in fake.__dict__ and type(value).__name__ != "PyCapsule":
                fake.__dict__[name] = copy.deepcopy(value, self)


_C.provide("fake_copy", FakeCopy)


def _has_attributes(obj: object) -> bool:
    """Return true if `obj` is an ordered dict of `Module.state_dict()`. PyTorch's pytrees drop its `_metadata`."""
    return type(obj) is OrderedDict and bool(vars(obj))


def _is_strided_view(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Return true if `base.as_strided()` can make `view`."""
    storage = view.untyped_storage()
    last = view.storage_offset() + sum((n - 1) * stride for n, stride in zip(view.size(), view.stride(), strict=True))
    return (
        base.layout is torch.strided  # the values of a compressed tensor are a view of it
        and not is_traceable_wrapper_subclass(base)
        and view.dtype == base.dtype
        and (view.is_conj(), view.is_neg()) == (base.is_conj(), base.is_neg())
        and storage._cdata == base.untyped_storage()._cdata
        and (view.numel() == 0 or (last + 1) * view.element_size() <= storage.nbytes())
    )


def _check_layout(tensor: torch.Tensor) -> None:
    name = type(tensor).__name__
    if tensor.is_nested:
        raise NotImplementedError(f"fake_like() takes strided and sparse tensors, but a {name} is nested.")
    if tensor.layout is torch.strided and not tensor.is_quantized:
        return
    is_wrapper = isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    if is_wrapper or not _C.layout_members(tensor):
        found = "is quantized" if tensor.is_quantized else f"has the layout {tensor.layout}"
        raise NotImplementedError(
            f"fake_like() takes strided and sparse tensors, but a {name} of shape {tuple(tensor.shape)} {found}."
        )


def _check_storage(tensor: torch.Tensor) -> None:
    if _is_opaque_wrapper(tensor):
        raise NotImplementedError(
            f"fake_like() expects tensors with a storage, but a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)} has no storage: it is a wrapper that does not list its inner tensors in "
            "`__tensor_flatten__`."
        )


def _is_opaque_wrapper(tensor: torch.Tensor) -> bool:
    """Return true if `tensor` was made by `_make_wrapper_subclass()` and wraps other tensors."""
    if not torch._C._has_storage(tensor):
        return True
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or _C.is_fake(tensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False
