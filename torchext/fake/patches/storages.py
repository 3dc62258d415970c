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
from torch.multiprocessing import reductions

from ... import _C
from ...errors import TorchextWarning
from ...internals.dispatch_keys import is_constructing
from ...internals.leases import while_fakes_live
from ...internals.patching import Concerns
from ..addresses import Known, address_of, are_addresses_shown, is_of_fakes, storage_description, storage_from
from ..copying import FakeCopy
from ..cuda.functions import fake_cuda

__all__ = ["copied_bytes", "has_data", "install", "make_real", "no_data"]

# Methods that read, write or share memory.
METHODS_OF_STORAGES = (
    *("__getitem__", "__setitem__", "copy_", "fill_", "tolist", "_byteswap", "_write_file"),
    *("pin_memory", "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_"),
)


REMEDY = (
    "If it was constructed by deferred_init, call torchext.deferred_init.materialize_tensor() or materialize_module() "
    "first; otherwise construct it outside of fake_mode()."
)


def install() -> None:
    """Install the patches."""
    _patch_resize()
    _patch_storage_copies()
    _patch_storage_reads()
    _patch_sending()
    _patch_tensor_memory()
    _patch_is_set_to()
    _patch_profiler()


def no_data(what: str, tensor: torch.Tensor) -> str:
    """Return the error message for a use of a fake `tensor` that needs data."""
    shape = tuple(tensor.shape)
    return f"{what} needs the data of a tensor of shape {shape}, but this tensor is fake and has no data. {REMEDY}"


def has_data(tensor: torch.Tensor) -> bool:
    """Return true if `tensor` has memory, or gets memory on access."""
    return not _C.is_fake(tensor) or (_C.is_deferred(tensor) and is_constructing())


def _patch_resize() -> None:
    """`UntypedStorage.resize_()` calls the allocator. FSDP frees and allocates its parameters with it.

    An operator replaces it, so that it is recorded for deferred tensors.
    """
    library = torch.library.Library("torchext", "FRAGMENT")
    library.define("resize_storage_(Tensor(a!) bytes, int nbytes) -> Tensor(a!)")

    def run(all_bytes: torch.Tensor, nbytes: int) -> torch.Tensor:
        all_bytes.untyped_storage().resize_(nbytes)
        return all_bytes

    for key in ("CPU", "CUDA", "Meta"):
        library.impl("resize_storage_", run, key)
    _libraries.append(library)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(self: torch.UntypedStorage, size: int) -> Any:
            if not is_of_fakes(self) or not isinstance(size, int):
                return original(self, size)
            if size < 0:
                raise RuntimeError(f"Cannot resize a storage to {size} bytes.")
            torch.ops.torchext.resize_storage_(_C.bytes_of_storage(self), size)
            return self

        return resize_

    while_fakes_live.patch(torch.UntypedStorage, "resize_", make, "calls the allocator", concerns=Concerns.FAKES)


# Freeing a `torch.library.Library` unregisters its operators.
_libraries: list[torch.library.Library] = []


def copied_bytes(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.Tensor:
    """Return the copy of the bytes of a fake `storage`, one for each `copy.deepcopy()`."""
    key = storage._cdata
    if key not in memo:
        # An operator copies the bytes, so that the copy is recorded if the storage is deferred. The memo keeps
        # `storage` alive, so that its address is not reused during the copy.
        memo[key] = (_C.bytes_of_storage(storage).clone(), storage)
    result: torch.Tensor = memo[key][0]
    return result


def _patch_storage_copies() -> None:
    """`UntypedStorage.copy_()` fills copies of storages."""

    def make_clone(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: copied_bytes(self, {}).untyped_storage() if is_of_fakes(self) else original(self)

    def make_deepcopy(original: Callable[..., Any]) -> Callable[..., Any]:
        def __deepcopy__(self: torch.UntypedStorage, memo: dict[int, Any]) -> Any:
            if isinstance(memo, FakeCopy):
                return memo.storage(self)
            return copied_bytes(self, memo).untyped_storage() if is_of_fakes(self) else original(self, memo)

        return __deepcopy__

    while_fakes_live.patch(torch.UntypedStorage, "clone", make_clone, "copies memory", concerns=Concerns.FAKES)
    while_fakes_live.patch(
        torch.UntypedStorage, "__deepcopy__", make_deepcopy, "copies memory", concerns=Concerns.FAKES
    )


def _patch_storage_reads() -> None:
    """Patch methods that do not propagate a fake storage's error, or access a CUDA device before it.

    `is_shared()` lets the exception escape through a function that is `noexcept`, and `UntypedStorage(sequence)` does
    not check whether it could read an element.
    """
    storage = torch.UntypedStorage
    while_fakes_live.patch(torch.UntypedStorage, "data_ptr", _with_address, "reads memory", concerns=Concerns.FAKES)
    while_fakes_live.patch(storage, "share_memory_", _sharing, "moves memory to where other processes find it")
    for name in METHODS_OF_STORAGES:
        while_fakes_live.patch(
            storage,
            name,
            _with_memory,
            "reads memory, and does not propagate the error",
            concerns=Concerns.FAKES,
        )
    for name in ANSWERS_FOR_STORAGES:
        make = partial(_answering_for_fakes, answer=ANSWERS_FOR_STORAGES[name])
        while_fakes_live.patch(
            storage,
            name,
            make,
            "reads the address, or lets the error escape through a noexcept function",
            concerns=Concerns.FAKES,
        )
    while_fakes_live.patch(
        storage, "__new__", _with_memory, "does not check whether it could read an element", concerns=Concerns.FAKES
    )
    while_fakes_live.patch(torch.TypedStorage, "__str__", _showing_fakes, "shows the elements")


def _showing_fakes(original: Callable[..., str]) -> Callable[..., str]:
    def show(self: torch.TypedStorage) -> str:
        if not isinstance(self, torch.TypedStorage) or not is_of_fakes(self._untyped_storage):
            return original(self)
        storage = self._untyped_storage
        size = storage.nbytes() // self._element_size()
        return f"...\n[{torch.typename(self)}(dtype={self.dtype}, device={storage.device}) of size {size}, fake]"

    return show


ANSWERS_FOR_STORAGES: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "is_pinned": lambda storage: _C.bytes_of_storage(storage).is_pinned(),
    "is_shared": lambda storage: storage.is_cuda or hasattr(storage, IS_SHARED),
    "_get_filename": lambda storage: None,
    "__repr__": lambda storage: (
        f"...\n[{torch.typename(storage)}(device={storage.device}) of size {storage.size()}, fake]"
    ),
}


def _answering_for_fakes(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    def function(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        return answer(self) if is_of_fakes(self) else original(self, *args, **kwargs)

    return function


def _with_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(*args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):  # both storages of `copy_`
            if isinstance(argument, torch.UntypedStorage):
                _ask_for_memory(argument)
        return original(*args, **kwargs)

    return use


# An attribute of storages. Python keeps it as long as the storage lives.
IS_SHARED = "_torchext_is_shared"


def _sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Programs that share memory with their workers run dry in one process, where nothing has to move.

    Sending a fake to another process raises when it is pickled.
    """

    def share_memory_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if is_of_fakes(self) and not has_data(_C.bytes_of_storage(self)):
            if self.is_cuda:  # like a real one, whose memory any process can map
                return self
            if are_addresses_shown():
                setattr(self, IS_SHARED, True)
                return self
            _ask_for_memory(self)
        return original(self, *args, **kwargs)

    return share_memory_


def _with_address(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(self: torch.UntypedStorage) -> int:
        if is_of_fakes(self):
            address = address_of(self)
            if address is not None:
                return address
            _ask_for_memory(self)
        return original(self)

    return data_ptr


def _ask_for_memory(storage: torch.UntypedStorage) -> None:
    if not _C.is_storage_of_fakes(storage):
        return
    all_bytes = _C.bytes_of_storage(storage)
    if not has_data(all_bytes):
        raise RuntimeError(
            f"This storage of {storage.nbytes()} bytes is that of fake tensors and has no data. {REMEDY}"
        )
    _C.materialize([all_bytes])


def _patch_sending() -> None:
    """Queues, pipes and pools send memory of tensors to other processes.

    For a fake they send its description, and for a deferred tensor on the CPU its values.
    """
    memory = "shares memory with the other process"
    while_fakes_live.patch(reductions, "reduce_storage", _describing_storage, memory, concerns=Concerns.FAKES)
    while_fakes_live.patch(reductions, "reduce_tensor", _without_handles, memory, concerns=Concerns.FAKES)


def _describing_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        if not is_of_fakes(storage) or has_data(all_bytes := _C.bytes_of_storage(storage)):
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

    return reduce_storage


def _received(nbytes: int, device: str, known: Known | None) -> torch.UntypedStorage:
    """Return the storage in a process that may have no fake devices."""
    index = torch.device(device).index
    with fake_cuda(False if index is None or index < torch.cuda.device_count() else index + 1):
        return storage_from(nbytes, device, known)


def _without_handles(original: Callable[..., Any]) -> Callable[..., Any]:
    """On the CPU, `reduce_tensor()` sends the storage and the geometry, on CUDA the handle of an allocation."""

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if not (tensor.is_cuda and tensor.layout is torch.strided and _C.is_fake(tensor) and tensor.is_leaf):
            return original(tensor)
        geometry = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.requires_grad
        return reductions.rebuild_tensor, (type(tensor), tensor._typed_storage(), geometry)

    return reduce_tensor


def _patch_tensor_memory() -> None:
    """Constructors compare addresses, pass them to libraries, and call Python for each element."""
    for name in ("data_ptr", "const_data_ptr"):  # the second since 2.13
        if hasattr(torch.Tensor, name):
            while_fakes_live.patch(torch.Tensor, name, _with_address_of_tensor, "reads memory", concerns=Concerns.FAKES)
    for name in ("apply_", "map_", "map2_"):
        while_fakes_live.patch(
            torch.Tensor, name, _of_memory, "uses memory without calling an operator", concerns=Concerns.FAKES
        )
    while_fakes_live.patch(
        torch._C, "_to_dlpack", _of_memory, "uses memory without calling an operator", concerns=Concerns.FAKES
    )


def _with_address_of_tensor(original: Callable[..., int]) -> Callable[..., int]:
    of_memory = _of_memory(original)

    def data_ptr(self: torch.Tensor) -> int:
        if isinstance(self, torch.Tensor) and _C.is_fake(self) and self.layout is torch.strided:
            address = address_of(self.untyped_storage(), int(self.storage_offset()) * self.element_size())
            if address is not None:
                return address if self.numel() else 0
        found: int = of_memory(self)
        return found

    return data_ptr


def _of_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(*args: Any, **kwargs: Any) -> Any:
        if is_constructing():
            make_real((*args, *kwargs.values()))
        return original(*args, **kwargs)

    return use


def make_real(values: Iterable[object]) -> None:
    """Materialize the deferred tensors among `values`."""
    deferred = [value for value in values if isinstance(value, torch.Tensor) and _C.is_deferred(value)]
    if deferred:
        _C.materialize(deferred)


def _patch_is_set_to() -> None:
    """`aten::is_set_to` has no Meta kernel, and compares storages, which differ for shadow tensors."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_set_to(*args: Any, **kwargs: Any) -> bool:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if len(tensors) != 2 or not any(map(_C.is_fake, tensors)):
                return original(*args, **kwargs)
            return _place(tensors[0]) == _place(tensors[1])

        return is_set_to

    while_fakes_live.patch(
        torch.Tensor, "is_set_to", make, "compares storages, and has no Meta kernel", concerns=Concerns.FAKES
    )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride()


def _patch_profiler() -> None:
    """To record a tensor's shape, the profiler accesses its memory, and prints an error for each fake."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def config(self: torch.autograd.profiler.profile, *args: Any, **kwargs: Any) -> Any:
            is_of_shapes = isinstance(self, torch.autograd.profiler.profile) and (self.record_shapes or self.with_flops)
            if is_of_shapes and _C.are_factories_fake():
                warnings.warn(
                    "In fake_mode() the profiler cannot record shapes or FLOPs, because it reads the memory of "
                    "tensors for them. Pass record_shapes=False and with_flops=False.",
                    TorchextWarning,
                    stacklevel=3,
                )
                self.record_shapes = self.with_flops = False
            return original(self, *args, **kwargs)

        return config

    while_fakes_live.patch(
        torch.autograd.profiler.profile, "config", make, "reads the memory of tensors to record their shapes"
    )
