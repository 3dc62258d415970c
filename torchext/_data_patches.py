"""The patches for what saves, shares or resizes the memory of fake tensors without calling an operator.

PyTorch refuses most of it by itself, because a fake storage refuses to show its data pointer. Patched is what would end
the process, leave a broken file behind or blame something else, and what can do without data.

A constructor that asks for memory while `deferred_init` runs it gets memory: the deferred tensors that share it become
real then and there. Afterwards it is more likely a mistake to ask, and refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.serialization
import torch.utils.dlpack
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from ._fake_copy import FakeCopy
from ._fake_cuda import fake_cuda

__all__ = ["copied_bytes", "install", "no_data"]

# What reads or writes memory, or hands it out.
METHODS_OF_STORAGES = (
    *("__getitem__", "__setitem__", "copy_", "data_ptr", "fill_", "tolist", "_byteswap", "_write_file"),
    *("is_pinned", "pin_memory", "share_memory_", "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_"),
)

# Data is often long lists of these.
NO_TENSORS = frozenset({int, float, complex, bool, str, bytes, type(None)})

REMEDY = (
    "If it was constructed by deferred_init, call torchext.deferred_init.materialize_tensor() or materialize_module() "
    "first; otherwise construct it outside of fake_mode()."
)


def install() -> None:
    """Installs the patches."""
    _patch_save()
    _patch_rebuilding()
    _patch_resize()
    _patch_storage_copies()
    _patch_storage_reads()
    _patch_tensor_memory()
    _patch_is_set_to()


def no_data(what: str, tensor: torch.Tensor) -> str:
    """The message for `what` cannot be done with a fake `tensor`."""
    shape = tuple(tensor.shape)
    return f"{what} needs the data of a tensor of shape {shape}, but this tensor is fake and has none. {REMEDY}"


def _has_data(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor` has memory, or will have it when it is asked for."""
    return not _C.is_fake(tensor) or (_C.is_deferred(tensor) and _is_constructing())


def _is_constructing() -> bool:
    """Tells whether this thread is in a block of `deferred_init`."""
    return torch._C._dispatch_tls_is_dispatch_key_included("DeferredInit")


def _patch_save() -> None:
    """`torch.save()` opens its file before it meets the first tensor, and closes it properly when that raises."""
    original: Callable[..., None] = torch.serialization.save

    @wraps(original)
    def save(obj: object, *args: Any, **kwargs: Any) -> None:
        fake = _find_fake(obj, set())
        if fake is not None:
            raise RuntimeError(no_data("torch.save()", fake))
        return original(obj, *args, **kwargs)

    torch.serialization.save = save
    torch.save = save


def _find_fake(obj: object, seen: set[int]) -> torch.Tensor | None:
    """A fake tensor in the containers and modules that make up `obj`. Does not look into other objects."""
    if isinstance(obj, torch.Tensor):
        if not is_traceable_wrapper_subclass(obj):
            return None if _has_data(obj) else obj
        obj = [getattr(obj, name) for name in obj.__tensor_flatten__()[0]]
    if isinstance(obj, torch.UntypedStorage):
        return _find_fake(_C.bytes_of_storage(obj), seen) if _C.is_storage_of_fakes(obj) else None
    if not isinstance(obj, dict | list | tuple | set | frozenset | Module) or id(obj) in seen:
        return None
    seen.add(id(obj))
    content = vars(obj) if isinstance(obj, Module) else obj
    for part in content.values() if isinstance(content, dict) else content:
        if type(part) in NO_TENSORS:
            continue
        fake = _find_fake(part, seen)
        if fake is not None:
            return fake
    return None


def _patch_rebuilding() -> None:
    """`copy.copy()` puts a new tensor on the old storage, as unpickling does. On a fake storage it has to be fake."""
    original: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor

    @wraps(original)
    def rebuild(storage: torch.TypedStorage, *args: Any) -> torch.Tensor:
        if not _C.is_storage_of_fakes(storage._untyped_storage):
            return original(storage, *args)
        device = storage._untyped_storage.device
        with fake_cuda(device.index + 1 if device.type == "cuda" else 0):
            _C.enter_fake_mode()
            try:
                return original(storage, *args)
            finally:
                _C.leave_fake_mode()

    torch._utils._rebuild_tensor = rebuild


def _patch_resize() -> None:
    """`UntypedStorage.resize_()` asks the allocator for memory. FSDP frees and allocates its parameters with it.

    As an operator it is recorded for deferred tensors.
    """
    library = torch.library.Library("torchext", "FRAGMENT")
    library.define("resize_storage_(Tensor(a!) bytes, int nbytes) -> Tensor(a!)")
    original: Callable[..., Any] = torch.UntypedStorage.resize_

    def run(all_bytes: torch.Tensor, nbytes: int) -> torch.Tensor:
        original(all_bytes.untyped_storage(), nbytes)
        return all_bytes

    for key in ("CPU", "CUDA", "Meta"):
        library.impl("resize_storage_", run, key)
    _libraries.append(library)

    @wraps(original)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if not _C.is_storage_of_fakes(self):
            return original(self, size)
        if size < 0:
            raise RuntimeError(f"A storage cannot be resized to {size} bytes.")
        torch.ops.torchext.resize_storage_(_C.bytes_of_storage(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]


# A `torch.library.Library` takes its operators back when it is freed.
_libraries: list[torch.library.Library] = []


def copied_bytes(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.Tensor:
    """The copy of the bytes of a fake `storage`, one for each `copy.deepcopy()`."""
    key = storage._cdata
    if key not in memo:
        # Copied by an operator, which is recorded if the storage is deferred. `storage` is kept too, so that its
        # address is not given to another one meanwhile.
        memo[key] = (_C.bytes_of_storage(storage).clone(), storage)
    result: torch.Tensor = memo[key][0]
    return result


def _patch_storage_copies() -> None:
    """Copies of storages are filled by `UntypedStorage.copy_()`."""
    clone: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.clone
    deepcopy: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.__deepcopy__

    @wraps(clone)
    def cloned(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return copied_bytes(self, {}).untyped_storage() if _C.is_storage_of_fakes(self) else clone(self)

    @wraps(deepcopy)
    def __deepcopy__(self: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage:
        if isinstance(memo, FakeCopy):
            return memo.storage(self)
        return copied_bytes(self, memo).untyped_storage() if _C.is_storage_of_fakes(self) else deepcopy(self, memo)

    torch.UntypedStorage.clone = cloned  # type: ignore[assignment]
    torch.UntypedStorage.__deepcopy__ = __deepcopy__  # type: ignore[assignment]


def _patch_storage_reads() -> None:
    """What does not turn the refusal of a storage into an exception, or asks for a CUDA device before it comes to it.

    `is_shared()` lets it escape through a function without exceptions, and `UntypedStorage(sequence)` does not look at
    whether it could read an element.
    """
    for name in METHODS_OF_STORAGES:
        setattr(torch.UntypedStorage, name, _with_memory(getattr(torch.UntypedStorage, name)))
    is_shared: Callable[..., bool] = torch.UntypedStorage.is_shared
    filename: Callable[..., str | None] = torch.UntypedStorage._get_filename
    construct: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.__new__
    show: Callable[..., str] = torch.UntypedStorage.__repr__

    @wraps(is_shared)
    def shared(self: torch.UntypedStorage) -> bool:
        return self.is_cuda if _C.is_storage_of_fakes(self) else is_shared(self)

    @wraps(filename)
    def get_filename(self: torch.UntypedStorage) -> str | None:
        return None if _C.is_storage_of_fakes(self) else filename(self)

    def __new__(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        for argument in args:
            if isinstance(argument, torch.UntypedStorage):
                _ask_for_memory(argument)
        return construct(cls, *args, **kwargs)

    @wraps(show)
    def __repr__(self: torch.UntypedStorage) -> str:
        if not _C.is_storage_of_fakes(self):
            return show(self)
        return f"...\n[{torch.typename(self)}(device={self.device}) of size {self.size()}, fake]"

    torch.UntypedStorage.is_shared = shared  # type: ignore[assignment, method-assign]
    torch.UntypedStorage._get_filename = get_filename  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.__new__ = __new__  # type: ignore[assignment, method-assign]
    torch.UntypedStorage.__repr__ = __repr__  # type: ignore[assignment, method-assign]


def _with_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def use(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        _ask_for_memory(self)
        for argument in args:  # of `copy_`
            if isinstance(argument, torch.UntypedStorage):
                _ask_for_memory(argument)
        return original(self, *args, **kwargs)

    return use


def _ask_for_memory(storage: torch.UntypedStorage) -> None:
    if not _C.is_storage_of_fakes(storage):
        return
    all_bytes = _C.bytes_of_storage(storage)
    if not _has_data(all_bytes):
        raise RuntimeError(
            f"This storage of {storage.nbytes()} bytes is that of fake tensors and has no data. {REMEDY}"
        )
    _C.materialize([all_bytes])


def _patch_tensor_memory() -> None:
    """Constructors compare addresses, hand them to libraries, and call Python for each element."""
    for name in ("data_ptr", "apply_", "map_", "map2_"):
        setattr(torch.Tensor, name, _of_memory(getattr(torch.Tensor, name)))
    to_dlpack = _of_memory(torch._C._to_dlpack)
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = to_dlpack  # type: ignore[attr-defined]


def _of_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def use(self: torch.Tensor, *args: Any) -> Any:
        deferred = [tensor for tensor in (self, *args) if isinstance(tensor, torch.Tensor) and _C.is_deferred(tensor)]
        if deferred and _is_constructing():
            _C.materialize(deferred)
        return original(self, *args)

    return use


def _patch_is_set_to() -> None:
    """`aten::is_set_to` has no Meta kernel, and compares storages, of which shadows have others."""
    original: Callable[..., bool] = torch.Tensor.is_set_to

    @wraps(original)
    def is_set_to(self: torch.Tensor, tensor: torch.Tensor) -> bool:
        if not (_C.is_fake(self) or _C.is_fake(tensor)):
            return original(self, tensor)
        return _place(self) == _place(tensor)

    torch.Tensor.is_set_to = is_set_to  # type: ignore[assignment, method-assign]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()
