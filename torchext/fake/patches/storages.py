"""The patches for what saves, shares or resizes the memory of fake tensors without calling an operator.

PyTorch refuses most of it by itself, because a fake storage refuses to show its data pointer. Patched is what would end
the process, leave a broken file behind or blame something else, and what can do without data.

A constructor that asks for memory while `deferred_init` runs it gets memory: the deferred tensors that share it become
real then and there. Afterwards it is more likely a mistake to ask, and refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ... import _C
from ...tools.dispatch_keys import is_constructing
from ...tools.leases import while_fakes_live
from ...tools.patching import Concerns
from ..addresses import address_of, are_addresses_shown
from ..copying import FakeCopy

__all__ = ["copied_bytes", "has_data", "install", "is_of_fakes", "make_real", "no_data"]

# What reads or writes memory, or hands it out.
METHODS_OF_STORAGES = (
    *("__getitem__", "__setitem__", "copy_", "fill_", "tolist", "_byteswap", "_write_file"),
    *("pin_memory", "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_"),
)


REMEDY = (
    "If it was constructed by deferred_init, call torchext.deferred_init.materialize_tensor() or materialize_module() "
    "first; otherwise construct it outside of fake_mode()."
)


def install() -> None:
    """Installs the patches."""
    _patch_resize()
    _patch_storage_copies()
    _patch_storage_reads()
    _patch_tensor_memory()
    _patch_is_set_to()
    _patch_profiler()


def no_data(what: str, tensor: torch.Tensor) -> str:
    """The message for `what` cannot be done with a fake `tensor`."""
    shape = tuple(tensor.shape)
    return f"{what} needs the data of a tensor of shape {shape}, but this tensor is fake and has none. {REMEDY}"


def has_data(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor` has memory, or will have it when it is asked for."""
    return not _C.is_fake(tensor) or (_C.is_deferred(tensor) and is_constructing())


def _patch_resize() -> None:
    """`UntypedStorage.resize_()` asks the allocator for memory. FSDP frees and allocates its parameters with it.

    As an operator it is recorded for deferred tensors.
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
                raise RuntimeError(f"A storage cannot be resized to {size} bytes.")
            torch.ops.torchext.resize_storage_(_C.bytes_of_storage(self), size)
            return self

        return resize_

    while_fakes_live.patch(
        torch.UntypedStorage, "resize_", make, "asks the allocator for memory", concerns=Concerns.FAKES
    )


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
    """What does not turn the refusal of a storage into an exception, or asks for a CUDA device before it comes to it.

    `is_shared()` lets it escape through a function without exceptions, and `UntypedStorage(sequence)` does not look at
    whether it could read an element.
    """
    storage = torch.UntypedStorage
    while_fakes_live.patch(torch.UntypedStorage, "data_ptr", _with_address, "reads memory", concerns=Concerns.FAKES)
    while_fakes_live.patch(storage, "share_memory_", _sharing, "moves memory to where other processes find it")
    for name in METHODS_OF_STORAGES:
        while_fakes_live.patch(
            storage,
            name,
            _with_memory,
            "reads memory, and does not turn the refusal into an exception",
            concerns=Concerns.FAKES,
        )
    for name in ANSWERS_FOR_STORAGES:
        make = partial(_answering_for_fakes, answer=ANSWERS_FOR_STORAGES[name])
        while_fakes_live.patch(
            storage,
            name,
            make,
            "asks for the address of memory, or lets the refusal escape through a function without exceptions",
            concerns=Concerns.FAKES,
        )
    while_fakes_live.patch(
        storage, "__new__", _with_memory, "does not look at whether it could read an element", concerns=Concerns.FAKES
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
        for argument in (*args, *kwargs.values()):  # the storage itself, and the other one of `copy_`
            if isinstance(argument, torch.UntypedStorage):
                _ask_for_memory(argument)
        return original(*args, **kwargs)

    return use


# An attribute of storages, which Python keeps as long as they live.
IS_SHARED = "_torchext_is_shared"


def _sharing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Programs that share memory with their workers run dry in one process, where there is nothing to move.

    What is sent to another process is refused when it is pickled.
    """

    def share_memory_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if is_of_fakes(self) and not has_data(_C.bytes_of_storage(self)):
            if self.is_cuda:  # as of real ones, of which every process can be given the memory
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


def is_of_fakes(storage: object) -> bool:
    """Tells whether `storage` is one, and has no memory."""
    return isinstance(storage, torch.UntypedStorage) and _C.is_storage_of_fakes(storage)


def _ask_for_memory(storage: torch.UntypedStorage) -> None:
    if not _C.is_storage_of_fakes(storage):
        return
    all_bytes = _C.bytes_of_storage(storage)
    if not has_data(all_bytes):
        raise RuntimeError(
            f"This storage of {storage.nbytes()} bytes is that of fake tensors and has no data. {REMEDY}"
        )
    _C.materialize([all_bytes])


def _patch_tensor_memory() -> None:
    """Constructors compare addresses, hand them to libraries, and call Python for each element."""
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
    """Gives memory to the deferred tensors among `values`."""
    deferred = [value for value in values if isinstance(value, torch.Tensor) and _C.is_deferred(value)]
    if deferred:
        _C.materialize(deferred)


def _patch_is_set_to() -> None:
    """`aten::is_set_to` has no Meta kernel, and compares storages, of which shadows have others."""

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
    """To record the shape of a tensor the profiler asks for its memory, and prints the refusal of each fake."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def config(self: torch.autograd.profiler.profile, *args: Any, **kwargs: Any) -> Any:
            is_of_shapes = isinstance(self, torch.autograd.profiler.profile) and (self.record_shapes or self.with_flops)
            if is_of_shapes and _C.are_factories_fake():
                warnings.warn(
                    "The profiler records neither shapes nor FLOPs in fake_mode(), because it looks at the memory of "
                    "tensors for that. Pass record_shapes=False and with_flops=False.",
                    stacklevel=3,
                )
                self.record_shapes = self.with_flops = False
            return original(self, *args, **kwargs)

        return config

    while_fakes_live.patch(
        torch.autograd.profiler.profile, "config", make, "looks at the memory of tensors to record their shapes"
    )
