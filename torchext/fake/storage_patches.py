"""Patches for saving, sharing or resizing the memory of fake tensors without an operator.

PyTorch rejects most of these, because a fake storage raises when its data pointer is read. The patches cover uses that
would crash the process, leave a broken file or raise a misleading error, and uses that need no data.

A constructor that accesses memory while `deferred_init` runs it gets memory: the deferred tensors that share it become
real immediately. After construction such an access is more likely a mistake and raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.serialization
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions
from torch.nn import Module

from .. import _C
from ..errors import TorchextWarning
from ..internals.dispatch_keys import is_constructing, making_fakes
from ..internals.held_tensors import inner_tensors, is_wrapper
from ..internals.leases import while_fakes_live
from ..internals.patching import Concerns, Function
from .addresses import Known, address_of, are_addresses_shown, is_of_fakes, storage_description, storage_from
from .copying import FakeCopy
from .cuda.functions import fake_cuda

__all__ = ["copied_bytes", "make_real", "no_data"]

REMEDY = (
    "If it was constructed by deferred_init, call torchext.deferred_init.materialize_tensor() or materialize_module() "
    "first; otherwise construct it outside of fake_mode()."
)


replaces: Callable[..., Callable[[Function], Function]] = partial(while_fakes_live.replaces, concerns=Concerns.FAKES)


def no_data(what: str, tensor: Tensor) -> str:
    """Return the error message for a use of a fake `tensor` that needs data."""
    shape = tuple(tensor.shape)
    return f"{what} needs the data of a tensor of shape {shape}, but this tensor is fake and has no data. {REMEDY}"


def _has_data(tensor: Tensor) -> bool:
    """Return true if `tensor` has memory, or gets memory on access."""
    return not _C.is_fake(tensor) or (_C.is_deferred(tensor) and is_constructing())


# ---- Sizes and copies of storages


def _define_resizing() -> None:
    """Define an operator for `UntypedStorage.resize_()`, so that it is recorded for deferred tensors."""
    library = torch.library.Library("torchext", "FRAGMENT")
    library.define("resize_storage_(Tensor(a!) bytes, int nbytes) -> Tensor(a!)")

    def run(all_bytes: Tensor, nbytes: int) -> Tensor:
        all_bytes.untyped_storage().resize_(nbytes)
        return all_bytes

    for key in ("CPU", "CUDA", "Meta"):
        library.impl("resize_storage_", run, key)
    _libraries.append(library)


while_fakes_live.declare(_define_resizing)

# Freeing a `torch.library.Library` unregisters its operators.
_libraries: list[torch.library.Library] = []


@replaces(UntypedStorage, "resize_", reason="calls the allocator")
def _resize_(original: Function, self: UntypedStorage, size: int) -> Any:
    """FSDP frees and allocates its parameters with it."""
    if not is_of_fakes(self) or not isinstance(size, int):
        return original(self, size)
    if size < 0:
        raise RuntimeError(f"Cannot resize a storage to {size} bytes.")
    torch.ops.torchext.resize_storage_(_C.bytes_of_storage(self), size)
    return self


def copied_bytes(storage: UntypedStorage, memo: dict[int, Any]) -> Tensor:
    """Return the copy of the bytes of a fake `storage`, one for each `copy.deepcopy()`."""
    key = storage._cdata
    if key not in memo:
        # An operator copies the bytes, so that the copy is recorded if the storage is deferred. The memo keeps
        # `storage` alive, so that its address is not reused during the copy.
        memo[key] = (_C.bytes_of_storage(storage).clone(), storage)
    result: Tensor = memo[key][0]
    return result


@replaces(UntypedStorage, "clone", reason="copies memory")
def _clone(original: Function, self: UntypedStorage) -> Any:
    return copied_bytes(self, {}).untyped_storage() if is_of_fakes(self) else original(self)


@replaces(UntypedStorage, "__deepcopy__", reason="copies memory")
def _deepcopy(original: Function, self: UntypedStorage, memo: dict[int, Any]) -> Any:
    if isinstance(memo, FakeCopy):
        return memo.storage(self)
    return copied_bytes(self, memo).untyped_storage() if is_of_fakes(self) else original(self, memo)


# ---- Methods that do not propagate a fake storage's error, or access a CUDA device before it


@replaces(UntypedStorage, "data_ptr", reason="reads memory")
def _data_ptr(original: Function, self: UntypedStorage) -> Any:
    if is_of_fakes(self):
        address = address_of(self)
        if address is not None:
            return address
        _ask_for_memory(self)
    return original(self)


# An attribute of storages. Python keeps it as long as the storage lives.
IS_SHARED = "_torchext_is_shared"


@while_fakes_live.replaces(UntypedStorage, "share_memory_", reason="moves memory to where other processes find it")
def _share_memory_(original: Function, /, self: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    """Programs that share memory with their workers run dry in one process, where nothing has to move.

    Sending a fake to another process raises when it is pickled.
    """
    if is_of_fakes(self) and not _has_data(_C.bytes_of_storage(self)):
        if self.is_cuda:  # like a real one, whose memory any process can map
            return self
        if are_addresses_shown():
            setattr(self, IS_SHARED, True)
            return self
        _ask_for_memory(self)
    return original(self, *args, **kwargs)


@replaces(UntypedStorage, "__new__", reason="does not check whether it could read an element")
@replaces(
    UntypedStorage,
    *("__getitem__", "__setitem__", "copy_", "fill_", "tolist", "_byteswap", "_write_file"),
    *("pin_memory", "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_"),
    reason="reads memory, and does not propagate the error",
)
def _with_memory(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    for argument in (*args, *kwargs.values()):  # both storages of `copy_`
        if isinstance(argument, UntypedStorage):
            _ask_for_memory(argument)
    return original(*args, **kwargs)


def _answer_for_fakes(
    answer: Callable[[UntypedStorage], Any], original: Function, /, self: UntypedStorage, *args: Any, **kwargs: Any
) -> Any:
    return answer(self) if is_of_fakes(self) else original(self, *args, **kwargs)


ANSWERS: dict[str, Callable[[UntypedStorage], Any]] = {
    "is_pinned": lambda storage: _C.bytes_of_storage(storage).is_pinned(),
    "is_shared": lambda storage: storage.is_cuda or hasattr(storage, IS_SHARED),
    "_get_filename": lambda storage: None,
    "__repr__": lambda storage: (
        f"...\n[{torch.typename(storage)}(device={storage.device}) of size {storage.size()}, fake]"
    ),
}
for _name, _answer in ANSWERS.items():
    replaces(UntypedStorage, _name, reason="reads the address, or lets the error escape through a noexcept function")(
        partial(_answer_for_fakes, _answer)
    )


@while_fakes_live.replaces(torch.TypedStorage, "__str__", reason="shows the elements")
def _str(original: Function, self: torch.TypedStorage) -> Any:
    if not isinstance(self, torch.TypedStorage) or not is_of_fakes(self._untyped_storage):
        return original(self)
    storage = self._untyped_storage
    size = storage.nbytes() // self._element_size()
    return f"...\n[{torch.typename(self)}(dtype={self.dtype}, device={storage.device}) of size {size}, fake]"


def _ask_for_memory(storage: UntypedStorage) -> None:
    if not _C.is_storage_of_fakes(storage):
        return
    all_bytes = _C.bytes_of_storage(storage)
    if not _has_data(all_bytes):
        raise RuntimeError(
            f"This storage of {storage.nbytes()} bytes is that of fake tensors and has no data. {REMEDY}"
        )
    _C.materialize([all_bytes])


# ---- Queues, pipes and pools, which send the memory of tensors to other processes
#
# For a fake they send its description, and for a deferred tensor on the CPU its values.


@replaces(reductions, "reduce_storage", reason="shares memory with the other process")
def _reduce_storage(original: Function, storage: UntypedStorage) -> Any:
    if not is_of_fakes(storage) or _has_data(all_bytes := _C.bytes_of_storage(storage)):
        return original(storage)
    if _C.is_deferred(all_bytes) and not _C.materializes_as_fakes():
        if storage.device.type != "cpu":
            raise RuntimeError(
                f"A deferred tensor on {storage.device} cannot be sent to another process. Materialize it first."
            )
        return original(_C.evaluate(all_bytes).untyped_storage())
    nbytes, device, known = storage_description(storage)
    # Other processes would not see the later values of shared memory.
    return _received, (nbytes, device, None if hasattr(storage, IS_SHARED) else known)


def _received(nbytes: int, device: str, known: Known | None) -> UntypedStorage:
    """Return the storage in a process that may have no fake devices."""
    index = torch.device(device).index
    with fake_cuda(False if index is None or index < torch.cuda.device_count() else index + 1):
        return storage_from(nbytes, device, known)


@replaces(reductions, "reduce_tensor", reason="shares memory with the other process")
def _reduce_tensor(original: Function, tensor: Tensor) -> Any:
    """On the CPU, `reduce_tensor()` sends the storage and the geometry, on CUDA the handle of an allocation."""
    if not (tensor.is_cuda and tensor.layout is torch.strided and _C.is_fake(tensor) and tensor.is_leaf):
        return original(tensor)
    geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad
    return reductions.rebuild_tensor, (type(tensor), tensor._typed_storage(), geometry)


# ---- Tensors: constructors compare addresses, pass them to libraries, and call Python for each element


@replaces(torch._C, "_to_dlpack", reason="uses memory without calling an operator")
@replaces(Tensor, "apply_", "map_", "map2_", reason="uses memory without calling an operator")
def _use_memory(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    if is_constructing():
        make_real((*args, *kwargs.values()))
    return original(*args, **kwargs)


@replaces(Tensor, "const_data_ptr", reason="reads memory", needs="const_data_ptr")  # since 2.13
@replaces(Tensor, "data_ptr", reason="reads memory")
def _data_ptr_of_tensor(original: Function, self: Tensor) -> Any:
    if isinstance(self, Tensor) and _C.is_fake(self) and self.layout is torch.strided:
        address = address_of(self.untyped_storage(), int(self.storage_offset()) * self.element_size())
        if address is not None:
            return address if self.numel() else 0
    return _use_memory(original, self)


def make_real(values: Iterable[object]) -> None:
    """Materialize the deferred tensors among `values`."""
    deferred = [value for value in values if isinstance(value, Tensor) and _C.is_deferred(value)]
    if deferred:
        _C.materialize(deferred)


@replaces(Tensor, "is_set_to", reason="compares storages, and has no Meta kernel")
def _is_set_to(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """The storages of shadow tensors differ."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) != 2 or not any(map(_C.is_fake, tensors)):
        return original(*args, **kwargs)
    return _place(tensors[0]) == _place(tensors[1])


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()


@while_fakes_live.replaces(
    torch.autograd.profiler.profile, "config", reason="reads the memory of tensors to record their shapes"
)
def _config(original: Function, /, self: torch.autograd.profiler.profile, *args: Any, **kwargs: Any) -> Any:
    """To record a tensor's shape, the profiler accesses its memory, and prints an error for each fake."""
    is_of_shapes = isinstance(self, torch.autograd.profiler.profile) and (self.record_shapes or self.with_flops)
    if is_of_shapes and _C.are_factories_fake():
        warnings.warn(
            "In fake_mode() the profiler cannot record shapes or FLOPs, because it reads the memory of tensors for "
            "them. Pass record_shapes=False and with_flops=False.",
            TorchextWarning,
            stacklevel=3,
        )
        self.record_shapes = self.with_flops = False
    return original(self, *args, **kwargs)


# ---- Saving and rebuilding tensors


# Data is often long lists of these.
NO_TENSORS = frozenset({int, float, complex, bool, str, bytes, type(None)})


@while_fakes_live.replaces(torch.serialization, "save", reason="leaves a broken file behind")
def _save(original: Function, /, obj: object, *args: Any, **kwargs: Any) -> Any:
    """`torch.save()` opens its file before the first tensor, and closes it properly if that raises."""
    fake = _find_fake(obj, set())
    if fake is not None:
        raise RuntimeError(no_data("torch.save()", fake))
    return original(obj, *args, **kwargs)


def _find_fake(obj: object, seen: set[int]) -> Tensor | None:
    """Return a fake tensor in the containers and modules that make up `obj`. Other objects are not searched."""
    if isinstance(obj, Tensor):
        if not is_wrapper(obj):
            return None if _has_data(obj) else obj
        if id(obj) in seen:
            return None
        seen.add(id(obj))
        obj = inner_tensors(obj)
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


@while_fakes_live.replaces(torch._utils, "_rebuild_tensor", reason="makes a real tensor on any storage")
def _rebuild_tensor(original: Function, storage: torch.TypedStorage, *args: Any) -> Any:
    """`copy.copy()` and unpickling put a new tensor on an existing storage. On a fake storage it has to be fake."""
    if not is_of_fakes(getattr(storage, "_untyped_storage", None)):
        return original(storage, *args)
    device = storage._untyped_storage.device
    with fake_cuda(device.index + 1 if device.type == "cuda" else 0), making_fakes():
        return original(storage, *args)
